"""Checks of whole rows: their order, their sum, whether they differ."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clew.capture.torch.check_problem import Problem, blame, is_nan, refuse_complex
from clew.capture.torch.taps_value import blind_reason, dtype_of, format_number, header, open_value, quietly
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


def non_decreasing(x: Any, dim: int = -1) -> Problem | None:
    """Each element is at least as large as the one before it."""
    return _judge_order(x, dim, "be non-decreasing", lambda before, after: after >= before)


def strictly_increasing(x: Any, dim: int = -1) -> Problem | None:
    """Each element is larger than the one before it."""
    return _judge_order(x, dim, "be strictly increasing", lambda before, after: after > before)


def _judge_order(x: Any, dim: int, must: str, holds: Callable[[Any, Any], Any]) -> Problem | None:
    if blind_reason(x):
        return None
    return quietly(_look_along, x, dim, must, holds)


def _look_along(x: Any, dim: int, must: str, holds: Callable[[Any, Any], Any]) -> Problem | None:
    array = _open_whole(x, must)
    refuse_complex(array, must)
    if not array.ndim:
        return None
    axis = _axis(array, dim)
    before, after = _cut(array, axis, slice(None, -1)), _cut(array, axis, slice(1, None))
    problem = blame(
        after,
        holds(before, after),
        must=f"{must} along dim {dim}",
        beside=lambda index: f" after {format_number(before[index].item())}",
        noun="steps",
    )
    if problem is None:
        return None
    moved = (
        replace(each, index=(*each.index[:axis], each.index[axis] + 1, *each.index[axis + 1 :]))
        for each in problem.offenders
    )
    return replace(problem, array=array, offenders=tuple(moved))


def _cut(array: Any, axis: int, part: slice) -> Any:
    return array[(slice(None),) * axis + (part,)]


def _axis(array: Any, dim: int) -> int:
    if not -array.ndim <= dim < array.ndim:
        raise UsageError(
            f"there is no dim {dim} in shape {list(array.shape)}",
            next_step=f"give a dim from {-array.ndim} to {array.ndim - 1}",
        )
    return dim % int(array.ndim)


def _open_whole(x: Any, must: str) -> Any:
    """Return the elements where they stand; a part of them would say nothing about rows and neighbours."""
    array, note = open_value(x)
    if note:
        raise UsageError(
            f"{header(x)} cannot be asked to {must}: only {note} can be read here",
            next_step="check the dense tensor, outside of vmap",
        )
    return array


def probabilities(x: Any, dim: int = -1, atol: float | None = None) -> Problem | None:
    """Numbers from 0 to 1 that sum to 1 along a dimension, within a tolerance that fits the type."""
    if blind_reason(x):
        return None
    return quietly(_look_at_probabilities, x, dim, atol)


def _look_at_probabilities(x: Any, dim: int, atol: float | None) -> Problem | None:
    must = "be probabilities"
    array = _open_whole(x, must)
    refuse_complex(array, must)
    if not math.prod(array.shape):
        return None
    if not array.ndim:
        array = array.reshape(1)
    axis = _axis(array, dim)
    if atol is None:
        atol = _tolerance(dtype_of(x))
    bad = blame(array, (array >= -atol) & (array <= 1 + atol), must=must)
    if bad is not None:
        return bad
    # Sums of many narrow numbers drift by themselves: sum in double.
    exact = array.double() if isinstance(array, torch.Tensor) else array.astype(np.float64)
    sums = exact.sum(axis)
    problem = blame(sums, abs(sums - 1) <= atol, must=f"sum to 1 along dim {dim}", noun="sums")
    return None if problem is None else replace(problem, array=array)


def _tolerance(dtype: str) -> float:
    return {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 0.3 if "float8" in dtype else 1e-5)


def rows_differ(x: Any) -> Problem | None:
    """Wrong when there are several rows and every one equals the first; here NaN equals NaN."""
    if blind_reason(x):
        return None
    return quietly(_look_at_rows, x)


def _look_at_rows(x: Any) -> Problem | None:
    array = _open_whole(x, "have rows that differ")
    if array.ndim == 0:
        raise UsageError(
            "a single number has no rows", next_step="check a tensor whose first dim is the batch"
        )
    if array.shape[0] < 2 or not math.prod(array.shape):
        return None
    first = array[:1]
    same = (array == first) | (is_nan(array) & is_nan(first))
    if not bool(same.all()):
        return None
    return Problem("have rows that differ", f"all {array.shape[0]:,} rows are the same", array)
