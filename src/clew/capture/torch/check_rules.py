"""What each check demands: functions from a value to the problem with it, or None. NaN never satisfies a demand."""

from __future__ import annotations

import cmath
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from clew.capture.torch.check_along import non_decreasing, probabilities, rows_differ, strictly_increasing
from clew.capture.torch.check_form import dtype, kind_of, rank, rank_at_least, shape
from clew.capture.torch.check_problem import Problem, blame, is_nan, judge, refuse_complex
from clew.capture.torch.taps_value import (
    blind_reason,
    dtype_of,
    format_number,
    header,
    open_value,
    quietly,
    shape_of,
)
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


def finite(x: Any) -> Problem | None:
    """NaN and the infinities are wrong."""
    if blind_reason(x):
        return None
    return quietly(_finite, x)


def _finite(x: Any) -> Problem | None:
    array, note = open_value(x)
    if isinstance(array, torch.Tensor):
        if not (array.is_floating_point() or array.is_complex()):
            return None
        # One bad element spoils the sum, so a finite sum clears them all; a sum may overflow, so look again.
        narrow = array.dtype in (torch.float16, torch.bfloat16)
        total = (array.sum(dtype=torch.float32) if narrow else array.sum()).item()
        if cmath.isfinite(total) if isinstance(total, complex) else math.isfinite(total):
            return None
        good: Any = torch.isfinite(array)
    else:
        good = np.isfinite(array)
    return blame(array, good, must="be finite", note=note)


def positive(x: Any) -> Problem | None:
    """Zero is wrong."""
    return judge(x, "be positive", lambda v: v > 0, convex=True)


def non_negative(x: Any) -> Problem | None:
    """Anything below zero is wrong."""
    return judge(x, "be non-negative", lambda v: v >= 0, convex=True)


def negative(x: Any) -> Problem | None:
    """Zero is wrong."""
    return judge(x, "be negative", lambda v: v < 0, convex=True)


def non_positive(x: Any) -> Problem | None:
    """Anything above zero is wrong."""
    return judge(x, "be non-positive", lambda v: v <= 0, convex=True)


def in_range(x: Any, low: Any, high: Any) -> Problem | None:
    """The bounds themselves are right."""
    low, high = _as_number(low), _as_number(high)
    are_numbers = not shape_of(low) and not shape_of(high)
    if are_numbers and not blind_reason(low) and not blind_reason(high) and not low <= high:
        raise UsageError(
            f"no number lies in [{low}, {high}]", next_step="give the lower bound first, then the upper one"
        )
    must = f"be in [{_say(low)}, {_say(high)}]"
    return judge(x, must, lambda v: (v >= low) & (v <= high), convex=are_numbers)


def _as_number(value: Any) -> Any:
    """Return the number in a tensor of one, so that it is read once; anything else as it is."""
    single = isinstance(value, torch.Tensor) and not value.shape and not blind_reason(value)
    return quietly(value.item) if single else value


def integer(x: Any) -> Problem | None:
    """Integer types pass; numbers of other types have to be whole. Truth values are no numbers."""
    kind = kind_of(dtype_of(x))
    if kind == "integer":
        return None
    if kind == "bool":
        return Problem("be whole numbers", "they are truth values (bool)")
    return judge(x, "be whole numbers", lambda v: (v - v == 0) & ((v % 1) == 0))


def that(condition: Any) -> Problem | None:
    """Every element of a condition has to be true."""
    return judge(condition, "be true", lambda v: v != 0, ordered=False)


def equal(
    x: Any, other: Any, rtol: float = 0.0, atol: float = 0.0, equal_nan: bool = False
) -> Problem | None:
    """NaN equals NaN only with ``equal_nan``; shapes have to be equal unless one side is a single number."""
    if shape_of(x) != shape_of(other) and shape_of(x) != () and shape_of(other) != ():
        return Problem(
            "equal the other", f"the shapes {list(shape_of(x))} and {list(shape_of(other))} differ"
        )

    def holds(v: Any, w: Any) -> Any:
        good = v == w
        if rtol or atol:
            good = good | (abs(v - w) <= atol + rtol * abs(w))
        return good | (is_nan(v) & is_nan(w)) if equal_nan else good

    close = "be close to" if rtol or atol else "equal"
    return _compare(x, other, must=f"{close} {_say(other)}", holds=holds, ordered=False)


def less(x: Any, other: Any) -> Problem | None:
    """Equal is wrong."""
    return _compare(x, other, must=f"be less than {_say(other)}", holds=lambda v, w: v < w)


def less_equal(x: Any, other: Any) -> Problem | None:
    """Equal is right."""
    return _compare(x, other, must=f"be at most {_say(other)}", holds=lambda v, w: v <= w)


def _compare(
    x: Any, other: Any, *, must: str, holds: Callable[[Any, Any], Any], ordered: bool = True
) -> Problem | None:
    if blind_reason(x) or blind_reason(other):
        return None
    return quietly(_compare_elements, x, other, must, holds, ordered)


def _compare_elements(
    x: Any, other: Any, must: str, holds: Callable[[Any, Any], Any], ordered: bool
) -> Problem | None:
    array, note = open_value(x)
    if ordered:
        refuse_complex(array, must)
    beside = _alike(array, open_value(other)[0])
    try:
        with np.errstate(all="ignore"):
            good = holds(array, beside)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"{header(x)} cannot be compared with {header(other)}",
            next_step=f"bring both to one device and to shapes that broadcast ({str(error).splitlines()[0]})",
        ) from None
    shape = tuple(good.shape)
    spread = np.broadcast_to(beside, shape) if isinstance(beside, np.ndarray) else beside.broadcast_to(shape)
    show: Callable[[tuple[int, ...]], str] = lambda _: ""  # noqa: E731
    if shape_of(other):
        show = lambda index: f" against {format_number(spread[index].item())}"  # noqa: E731
    return blame(array, good, must=must, note=note, beside=show)


def _alike(array: Any, other: Any) -> Any:
    """Return the other value in the library of the first, so that they can be compared."""
    if isinstance(array, torch.Tensor):
        return other if isinstance(other, torch.Tensor) else torch.tensor(other)
    return other.cpu().numpy() if isinstance(other, torch.Tensor) else other


def _say(value: Any) -> str:
    if shape_of(value):
        return "the other"
    return format_number(value.item() if hasattr(value, "item") and not blind_reason(value) else value)


RULES: Final[dict[str, Callable[..., Problem | None]]] = {
    rule.__name__: rule
    for rule in (
        finite, positive, non_negative, negative, non_positive, equal, less, less_equal, in_range, integer,
        rank, rank_at_least, dtype, shape, non_decreasing, strictly_increasing, probabilities, rows_differ, that,
    )
}  # fmt: skip
"""Every check by name."""
