"""A few numbers of a tensor, enough to recognise it: probes ask for them in every step, so they have to be quick."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from clew.capture.torch.leaves import local_part
from clew.stats.compiled import ELEMENT_TYPES
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUMPY: Final = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.bool))
_TYPES: Final[dict[torch.dtype, np.dtype[Any]]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.uint8: np.dtype(np.uint8),
    torch.bool: np.dtype(np.bool_),
}

_CODES: Final = {ELEMENT_TYPES.index(dtype.name): dtype for dtype in _TYPES.values() if dtype.name != "bool"}

_FEW: Final = 4096

Stamp = tuple[int, int]
"""One state of a gradient: which tensor it is and how often it was written."""


def thin(tensor: torch.Tensor, most: int) -> Any:
    """Return at most twice so many numbers, evenly spread: an array where numpy can slice, in a fifth of the time."""
    values = local_part(tensor).detach()
    if values.is_meta:
        return np.empty(0)  # a shape without numbers
    if values.dtype in _NUMPY and type(values) is torch.Tensor and values.is_cpu and not values.is_neg():
        flat: Any = values.numpy().reshape(-1)
        return flat[:: max(1, flat.size // most)]
    flat = values.reshape(-1)
    return flat[:: max(1, flat.numel() // most)]


def glance(tensor: torch.Tensor, most: int) -> tuple[float, ...]:
    """Return a few numbers of a dense tensor, evenly spread over it."""
    numbers = KERNEL.glance(tensor, most) if KERNEL is not None else None
    return tuple(thin(tensor, most)[:most].tolist()) if numbers is None else numbers


def glance_row(tensor: torch.Tensor, row: int, most: int) -> tuple[float, ...]:
    """Return the same of one row of a dense tensor, counted from the end where that is negative."""
    numbers = KERNEL.glance_row(tensor, row, most) if KERNEL is not None else None
    return glance(tensor.detach()[row], most) if numbers is None else numbers


def count_zeros(tensor: torch.Tensor, first: int) -> int:
    """Return how many of the first so many numbers of a dense tensor are zero."""
    found = KERNEL.count_zeros(tensor, first) if KERNEL is not None else None
    return glance(tensor.detach().reshape(-1)[:first], first).count(0.0) if found is None else found


def add_up(tensor: torch.Tensor, most: int) -> float:
    """Return the sum of the magnitudes of some numbers of a dense tensor."""
    found = KERNEL.add_up(tensor, most) if KERNEL is not None else None
    if found is None:
        some = thin(tensor, most)
        found = abs(some.astype(np.float64) if isinstance(some, np.ndarray) else some.abs().double()).sum()
    return float(found)


def copy_numbers(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a copy of a small dense tensor, to reckon with where torch would take a call for each operation."""
    dtype = _TYPES.get(tensor.dtype)
    if KERNEL is not None and dtype is not None:
        memory = KERNEL.sample_rows(tensor, 1, tensor.numel())
        if memory is not None:
            return np.frombuffer(memory, dtype).reshape(tensor.shape)
    held = local_part(tensor).detach().resolve_conj().resolve_neg()
    copied = held.cpu() if held.dtype in _TYPES or held.is_complex() else held.to("cpu", torch.float32)
    found: NDArray[Any] = copied.clone(memory_format=torch.contiguous_format).numpy()
    return found


def count_labels(labels: list[torch.Tensor]) -> Counter[int]:
    """Return how often each number is in tensors of whole numbers."""
    found = KERNEL.count_labels(labels) if KERNEL is not None else None
    return _count_slowly(labels) if found is None else Counter(found)


def _count_slowly(labels: list[torch.Tensor]) -> Counter[int]:
    numbers: list[Any] = []
    counted: Counter[int] = Counter()
    for each in labels:
        if each.numel() <= _FEW:
            numbers += glance(each, _FEW)
        else:
            found, counts = np.unique(copy_numbers(each), return_counts=True)
            counted.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
    counted.update(numbers)
    return counted


def sample_rows(tensor: torch.Tensor, numbers: int) -> tuple[bytes, np.dtype[Any]]:
    """Return a copy of a few numbers of each row of a dense tensor, one row after another, and their type."""
    if KERNEL is not None and tensor.dtype in _TYPES:
        memory = KERNEL.sample_rows(tensor, len(tensor), numbers)
        if memory is not None:
            return memory, _TYPES[tensor.dtype]
    held = tensor.detach()
    if held.is_complex():
        held = torch.view_as_real(held.resolve_conj())
    is_plain = held.is_cpu and held.dtype in _NUMPY and not held.is_neg()
    rows: Any = (held.numpy() if is_plain else held).reshape(len(held), -1)
    some = rows[:, :: max(1, rows.shape[1] // numbers)][:, :numbers]
    copied = np.ascontiguousarray(some if is_plain else some.double().cpu().numpy())
    return copied.tobytes(), copied.dtype


def sample_first(
    value: Any, numbers: int, fewest: int
) -> tuple[int, bytes, np.dtype[Any]] | tuple[()] | None:
    """Return the same for the first plain tensor in a value that was not computed and has enough numbers a row, and how
    many rows; nothing where there is none, None where the value has to be searched by its parts.
    """
    found = KERNEL.sample_first(value, numbers, fewest) if KERNEL is not None else None
    return (found[0], found[1], _CODES[found[2]]) if found else found


def stamp(parameters: list[torch.Tensor]) -> list[Stamp | None]:
    """Return the states of the gradients of some parameters, None for one without."""
    return KERNEL.stamp(parameters) if KERNEL is not None else stamp_slowly(parameters)


def stamp_slowly(parameters: list[torch.Tensor]) -> list[Stamp | None]:
    """Do the same where there is no kernel."""
    gradients = [parameter.grad for parameter in parameters]
    return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]
