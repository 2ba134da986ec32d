"""Looking at one value at a debugger's prompt: in a line, in numbers, as a distribution, in a file."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.describe import examine_tensor
from clew.capture.torch.leaves import walk
from clew.errors import UsageError
from clew.replay.exception_value import describe_value
from clew.replay.kept import Gone

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_LINES: Final = 40
_LONGEST: Final = 500
_BINS: Final = 20
_SHOWN: Final = 200_000_000
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def describe_lines(name: str, value: Any) -> list[dict[str, Any]]:
    """Return a value as rows of a name and either facts of a tensor or a text."""
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return [_row(name, value)]
    leaves = list(walk(value)) if not isinstance(value, (torch.nn.Module, Gone)) else []
    if leaves:
        rows = [_row(f"{name}{path}", leaf) for path, leaf in leaves[:_MOST_LINES]]
        return rows + (
            [{"name": "…", "text": f"{len(leaves)} tensors in all"}] if len(leaves) > _MOST_LINES else []
        )
    return [_row(name, value)]


def _row(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return describe_value(name, value, reads=value.numel() <= _SHOWN)
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - the user's own repr
        text = f"<{type(value).__name__} without a repr: {type(error).__name__}: {error}>"
    return {
        "name": name,
        "text": text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)",
    }


def list_statistics(name: str, value: Any) -> list[dict[str, Any]]:
    """Return every statistic of each tensor in a value."""
    rows = []
    for path, leaf in _tensors(value):
        facts = examine_tensor(leaf)
        rows.append(
            {
                "name": f"{name}{path}",
                "shape": list(facts.shape),
                "dtype": facts.dtype,
                "stats": facts.stats or {},
                "note": facts.note,
            }
        )
    return rows


def bin_values(value: Any) -> dict[str, Any]:
    """Return how the values of a tensor are spread: equal bins over the finite ones, and how many are not finite."""
    tensor = _tensors(value)[0][1].detach()
    tensor = (tensor.abs() if tensor.is_complex() else tensor).double().reshape(-1).cpu()
    finite = tensor[torch.isfinite(tensor)]
    bins: list[dict[str, Any]] = []
    if finite.numel():
        low, high = float(finite.min()), float(finite.max())
        if low == high:
            bins = [{"low": low, "high": high, "count": finite.numel()}]
        else:
            counts = torch.histc(finite, _BINS, low, high).tolist()
            width = (high - low) / _BINS
            bins = [
                {"low": low + i * width, "high": low + (i + 1) * width, "count": int(count)}
                for i, count in enumerate(counts)
            ]
    bad = {
        "nan": int(torch.isnan(tensor).sum()),
        "pos_inf": int((tensor == math.inf).sum()),
        "neg_inf": int((tensor == -math.inf).sum()),
    }
    return {"count": tensor.numel(), "bins": bins, **bad}


def save_value(value: Any, file: str) -> str:
    """Write a tensor, or the tensors of a container, to a file and return its path."""
    path = Path(file).expanduser()
    tensors = {name or "value": leaf.detach().cpu().contiguous().clone() for name, leaf in _tensors(value)}
    if path.suffix == ".npy" and len(tensors) == 1:
        import numpy as np

        [tensor] = tensors.values()
        array = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
        write: Callable[[], object] = functools.partial(np.save, path, array)
    elif path.suffix == ".safetensors":
        from safetensors.torch import save_file

        write = functools.partial(save_file, tensors, path)
    else:
        raise UsageError(
            f"cannot write {len(tensors)} tensor(s) to '{file}'",
            next_step="end the name with .safetensors, or with .npy for one tensor",
        )
    try:
        write()
    except OSError as error:
        raise UsageError(f"cannot write '{file}': {error.strerror or error}") from None
    return str(path)


def _tensors(value: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, Gone):
        value()  # says why it is not there
    if isinstance(value, (bool, int, float)):
        value = torch.tensor(value)
    found = list(walk(value))
    if not found:
        raise UsageError(f"a {type(value).__name__} has no tensors", next_step="name a tensor, such as out")
    return found
