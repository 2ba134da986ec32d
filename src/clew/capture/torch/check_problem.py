"""A broken demand on a value: finding the elements to blame, and only then looking at each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from clew.capture.torch.taps_value import blind_reason, format_number, open_value, quietly
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

SHOWN: Final = 5
"""How many offending elements a problem lists."""


@dataclass(frozen=True, slots=True)
class Offender:
    """One element that breaks a demand; ``beside`` is what it was held against."""

    index: tuple[int, ...]
    value: Any
    beside: str = ""

    def __str__(self) -> str:
        return f"{list(self.index)} = {format_number(self.value)}{self.beside}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken demand: what must hold, what was found, and the elements to blame. ``array`` is what was read."""

    must: str
    found: str
    array: Any = None
    note: str = ""
    count: int = 0
    total: int = 0
    offenders: tuple[Offender, ...] = ()


def judge(
    x: Any, must: str, holds: Callable[[Any], Any], *, ordered: bool = True, convex: bool = False
) -> Problem | None:
    """Return the problem with the elements for which a condition does not hold.

    A convex condition holds for all elements if it holds for the least and the largest.
    """
    if blind_reason(x):
        return None
    return quietly(_judge_elements, x, must, holds, ordered, convex)


def _judge_elements(
    x: Any, must: str, holds: Callable[[Any], Any], ordered: bool, convex: bool
) -> Problem | None:
    array, note = open_value(x)
    if ordered:
        refuse_complex(array, must)
    if convex and isinstance(array, torch.Tensor) and array.numel() and array.dtype is not torch.bool:
        # Two numbers in one pass; NaN spoils both and fails every comparison, so it is not missed.
        least, largest = torch.aminmax(array)
        if holds(least.item()) and holds(largest.item()):
            return None
    with np.errstate(all="ignore"):
        return blame(array, holds(array), must=must, note=note)


def refuse_complex(array: Any, must: str) -> None:
    """Raise for numbers that are neither more nor less than others."""
    if "complex" in str(array.dtype):
        raise UsageError(
            f"complex numbers have no order, so they cannot be asked to {must}",
            next_step="check x.abs(), x.real or x.imag",
        )


def blame(
    array: Any,
    good: Any,
    *,
    must: str,
    note: str = "",
    beside: Callable[[tuple[int, ...]], str] = lambda _: "",
    noun: str = "elements",
) -> Problem | None:
    """Return the problem of an array some elements of which are not good."""
    good = good if isinstance(good, torch.Tensor) else np.asarray(good)
    if bool(good.all()):
        return None
    bad = ~good
    shape = tuple(bad.shape)
    values = array.broadcast_to(shape) if isinstance(array, torch.Tensor) else np.broadcast_to(array, shape)
    total, count = math.prod(shape), int(bad.sum())
    offenders = []
    for position in _first_true(bad, min(count, SHOWN)):
        index = tuple(int(part) for part in np.unravel_index(position, shape)) if shape else ()
        offenders.append(Offender(index, values[index].item(), beside(index)))
    found = f"{count:,} of {total:,} {noun} {'is' if count == 1 else 'are'} not"
    if not shape:
        found = f"it is {format_number(offenders[0].value)}"
    return Problem(must, found, array, note, count, total, tuple(offenders))


def is_nan(array: Any) -> Any:
    """Return which elements are NaN."""
    return torch.isnan(array) if isinstance(array, torch.Tensor) else np.isnan(array)


def _first_true(mask: Any, n: int) -> list[int]:
    """Return the first ``n`` positions that are true, without a list of all of them."""
    flat = mask.reshape(-1)
    if isinstance(flat, torch.Tensor):
        flat = flat.view(torch.uint8)
    positions: list[int] = []
    start = 0
    while len(positions) < n:
        start += int(flat[start:].argmax())
        positions.append(start)
        start += 1
    return positions
