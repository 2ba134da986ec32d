"""Looking at a value in flight without touching it: any kind of torch tensor, a numpy array or a number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch

from clew.errors import UnsupportedTensor, UsageError
from clew.model.schema import STAT_NAMES
from clew.stats import reference
from clew.stats.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_WIDE: Final = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
    }
)  # fmt: skip
"""Types that every operation of torch can compute with; others are converted first."""


def quietly(look: Callable[..., T], *args: Any) -> T:
    """Call a function whose operations no mode, subclass, transform or gradient gets to see."""
    with torch._C.DisableTorchFunction():
        if not torch._C._len_torch_dispatch_stack() and torch._C._functorch.peek_interpreter_stack() is None:
            return look(*args)
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes(), torch._C._DisableFuncTorch():
            return look(*args)


def blind_reason(x: Any) -> str:
    """Return why the elements of a value cannot be read now, or an empty string."""
    if not isinstance(x, torch.Tensor):
        return ""
    if x.device.type == "meta" or hasattr(x, "fake_mode") or torch._is_functional_tensor(x):
        return "it has a shape but no values"
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return ""


def open_value(x: Any) -> tuple[Any, str]:
    """Return the elements of a readable value as a plain tensor or array, and which ones if not all of it."""
    if isinstance(x, torch.Tensor):
        return _open_tensor(x)
    if isinstance(x, (bool, int, float, complex, np.generic)) or hasattr(x, "__array__"):
        array = np.asarray(x)
        if array.dtype.kind in "biufc":
            return array, ""
        raise _not_numbers(f"an array of {array.dtype}")
    raise _not_numbers("None" if x is None else f"a {type(x).__name__}")


def _not_numbers(kind: str) -> UsageError:
    return UsageError(
        f"expected a tensor, an array or a number, got {kind}",
        next_step="give each tensor of a container to its own call",
    )


def _open_tensor(x: torch.Tensor) -> tuple[torch.Tensor, str]:
    note = ""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            note = "the whole batch of vmap"
        x = torch._C._functorch.get_unwrapped(x)
    x = x.detach()
    if hasattr(x, "to_local"):
        x, note = x.to_local(), "the local shard"
    if x.is_nested:
        x, note = x.values(), "the parts joined"
    elif x.layout is not torch.strided:
        x, note = (x.coalesce() if x.layout is torch.sparse_coo else x).values(), "the stored values"
    if x.is_quantized:
        x = x.dequantize()
    return (x if x.dtype in _WIDE else x.float()), note


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape as the user's code sees it, so without the batch of a vmap."""
    return tuple(x.shape) if hasattr(x, "shape") else ()


def dtype_of(x: Any) -> str:
    """Return the name of the dtype without its package."""
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return str(dtype).removeprefix("torch.")


def header(x: Any) -> str:
    """Return ``float32[4, 16]``, and the device and the need of a gradient where they are worth saying."""
    words = [f"{dtype_of(x)}{list(shape_of(x))}"]
    if isinstance(x, torch.Tensor):
        if x.device.type != "cpu":
            words.append(str(x.device))
        if x.requires_grad:
            words.append("grad")
    elif isinstance(x, np.ndarray):
        words.append("numpy")
    return " ".join(words)


def measure(array: Any) -> dict[str, float]:
    """Return the statistics of opened elements by name; empty when they cannot be measured."""
    try:
        if isinstance(array, torch.Tensor):
            rows = Rows(capacity=1)
            rows.measure(array, 0)
            row = rows.take(1)[0][0]
        else:
            row = reference.summarise(array)
    except UnsupportedTensor:
        return {}
    return dict(zip(STAT_NAMES, row.tolist(), strict=True))


def stats_line(stats: dict[str, float]) -> str:
    """Return the statistics that people look at first, and the counts of bad numbers where there are any."""
    shown = [
        f"{name} {format_number(stats[name])}"
        for name in ("min", "max", "mean", "std")
        if name in stats and not math.isnan(stats[name])
    ]
    labels = {"nan": "nan", "pos_inf": "+inf", "neg_inf": "-inf"}
    shown += [f"{label} {stats[key]:,.0f}" for key, label in labels.items() if stats.get(key)]
    if stats.get("zero"):
        shown.append(f"zero {100 * stats['zero'] / stats['count']:.3g}%")
    return "  ".join(shown)


def first_entries(array: Any, n: int) -> list[Any]:
    """Return the first ``n`` elements in row-major order as Python numbers; a negative ``n`` means all."""
    size = math.prod(array.shape)
    n = size if n < 0 else min(n, size)
    if n == 0:
        return []
    # A strided tensor would be copied whole by flattening it: cut off what is not needed first.
    while array.ndim > 1 and math.prod(array.shape[1:]) >= n:
        array = array[0]
    if array.ndim > 1:
        array = array[: -(-n // math.prod(array.shape[1:]))]
    entries: list[Any] = array.reshape(-1)[:n].tolist()
    return entries


def format_number(value: Any) -> str:
    """Return a number in at most four significant digits; whole numbers and truth values as they are."""
    if isinstance(value, (bool, int)):
        return str(value)
    return f"{value:.4g}"


def format_entries(array: Any, n: int) -> str:
    """Return the first entries between brackets, with dots where there are more."""
    entries = [format_number(entry) for entry in first_entries(array, n)]
    if len(entries) < math.prod(array.shape):
        entries.append("…")
    return f"[{', '.join(entries)}]"
