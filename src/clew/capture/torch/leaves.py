"""Tensors inside whatever a module takes or returns: lists, dicts, dataclasses, model outputs, packed sequences."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Final

import numpy as np
import torch

from clew.stats.rows import KERNEL

_DEEPEST: Final = 6
_LONGEST: Final = 64
"""How deep and how wide a container is searched: enough for every model, a fence against caches of tensors."""

_PLAIN: Final = frozenset({tuple, list})


_WHOLE: Final = (torch.Tensor, torch.nn.Parameter)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a distributed tensor that this process holds, and any other tensor as it is."""
    inner = getattr(tensor, "_local_tensor", None) if type(tensor) not in _WHOLE else None
    return inner if isinstance(inner, torch.Tensor) else tensor


_BARE: Final = (
    bytearray, complex, type, range, slice, enum.Enum, np.generic, np.ndarray,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""What holds no tensors, besides None, texts and numbers."""


def walk(
    value: Any, path: str = "", depth: int = 0, missed: dict[str, str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in a value with its path, such as ``[0]`` or ``[logits]``.

    ``missed`` takes, by path, what may hold tensors and is not looked into: an object of an unknown class is neither
    iterated nor asked for anything, since that might run code of its own.
    """
    if isinstance(value, torch.Tensor):
        # A nested tensor has no shape to speak of; nothing that looks at leaves can read one.
        if not value.is_nested:
            yield path, value
        elif missed is not None:
            missed[path] = "a nested tensor"
        return
    if value is None or isinstance(value, (str, bytes, int, float)):
        return
    parts = _parts(value) if depth < _DEEPEST else None
    if missed is not None and not issubclass(type(value), _BARE):
        _note_missed(value, parts, path, missed)
    for name, part in parts or ():
        yield from walk(part, f"{path}[{name}]", depth + 1, missed)


def _note_missed(value: Any, parts: list[tuple[str, Any]] | None, path: str, missed: dict[str, str]) -> None:
    if parts is None:
        missed[path] = f"an object of class {type(value).__qualname__}"
    elif len(parts) == _LONGEST and isinstance(value, Sized) and len(value) > _LONGEST:
        missed[path] = f"all but the first {_LONGEST} parts of a {type(value).__qualname__}"


def list_leaves(value: Any) -> list[torch.Tensor]:
    """Return every tensor in a value; without their paths that takes a fraction of the time."""
    quick = KERNEL.list_leaves(value) if KERNEL is not None else None
    return list_slowly(value) if quick is None else quick


def list_slowly(value: Any) -> list[torch.Tensor]:
    """Do the same where there is no kernel, or the value is not plain."""
    found: list[torch.Tensor] = []
    _collect(value, found, 0)
    return found


def _collect(value: Any, found: list[torch.Tensor], depth: int) -> None:
    kind = type(value)
    if kind is torch.Tensor and not value.is_nested:
        found.append(value)
    elif kind in _PLAIN and depth < _DEEPEST:
        for part in value[:_LONGEST]:
            _collect(part, found, depth + 1)
    elif kind is dict and depth < _DEEPEST and len(value) <= _LONGEST:
        for part in value.values():
            _collect(part, found, depth + 1)
    elif value is not None:
        found.extend(leaf for _, leaf in walk(value, depth=depth))


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return the named parts of a container; None for an object that is none."""
    if type(value) in _PLAIN:
        return [(str(index), part) for index, part in enumerate(value[:_LONGEST])]
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return [("data", value.data)]
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in list(value.items())[:_LONGEST]]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=False))
    if isinstance(value, (list, tuple)):
        return [(str(index), part) for index, part in enumerate(value[:_LONGEST])]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return None


def has_meta(what: tuple[Any, ...]) -> bool:
    """Return whether a tensor, model or optimizer among these is on the meta device: shapes without numbers."""
    parameters = [p for each in what if isinstance(each, torch.nn.Module) for p in each.parameters()]
    optimizers = [each for each in what if isinstance(each, torch.optim.Optimizer)]
    parameters += [p for each in optimizers for group in each.param_groups for p in group["params"]]
    return any(tensor.is_meta for tensor in (*list_leaves(what), *parameters))
