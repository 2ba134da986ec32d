"""Checks on a value in flight. Each returns the very value it was given, or says in full what is wrong with it.

An empty tensor has no element that could be wrong, so it passes. NaN satisfies no demand. Every check takes a name for
the message and ``warn=True``, which records the failure (or warns once) and goes on. Elements are not looked at where
there are none to see: on the meta device and while torch traces a graph of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch

from clew.capture.torch.check_form import name_dtype
from clew.capture.torch.check_names import new_step
from clew.capture.torch.check_report import report
from clew.capture.torch.check_rules import RULES
from clew.capture.torch.taps_compiled import emit, is_compiling, is_left_out, runs
from clew.capture.torch.taps_place import find_place
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

__all__ = [  # noqa: PLE0604 - the table of rules is the list
    *RULES,
    "new_step",
]


def finite(x: T, name: str = "", *, warn: bool = False) -> T:
    """Demand that there is no NaN and no infinity."""
    return _check("finite", x, (), name, warn=warn)


def positive(x: T, name: str = "", *, warn: bool = False) -> T:
    """Demand that every element is above zero."""
    return _check("positive", x, (), name, warn=warn)


def non_negative(x: T, name: str = "", *, warn: bool = False) -> T:
    """Demand that no element is below zero."""
    return _check("non_negative", x, (), name, warn=warn)


def negative(x: T, name: str = "", *, warn: bool = False) -> T:
    """Demand that every element is below zero."""
    return _check("negative", x, (), name, warn=warn)


def non_positive(x: T, name: str = "", *, warn: bool = False) -> T:
    """Demand that no element is above zero."""
    return _check("non_positive", x, (), name, warn=warn)


def equal(
    x: T,
    other: Any,
    name: str = "",
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    equal_nan: bool = False,
    warn: bool = False,
) -> T:
    """Demand that every element equals that of the other (a tensor of the same shape, or a number)."""
    return _check("equal", x, (other, rtol, atol, equal_nan), name, warn=warn)


def less(x: T, other: Any, name: str = "", *, warn: bool = False) -> T:
    """Demand that every element is less than the other (a number, or a tensor that broadcasts)."""
    return _check("less", x, (other,), name, warn=warn)


def less_equal(x: T, other: Any, name: str = "", *, warn: bool = False) -> T:
    """Demand that every element is at most the other (a number, or a tensor that broadcasts)."""
    return _check("less_equal", x, (other,), name, warn=warn)


def in_range(x: T, low: Any, high: Any, name: str = "", *, warn: bool = False) -> T:
    """Demand that every element lies between two bounds, which count as inside."""
    return _check("in_range", x, (low, high), name, warn=warn)


def integer(x: T, name: str = "", *, warn: bool = False) -> T:
    """Demand whole numbers, whatever the type that holds them; ``dtype(x, "integer")`` asks for the type."""
    return _check("integer", x, (), name, warn=warn)


def rank(x: T, wanted: int | tuple[int, ...], name: str = "", *, warn: bool = False) -> T:
    """Demand a number of dimensions, or one of several."""
    return _check("rank", x, (wanted,), name, warn=warn)


def rank_at_least(x: T, wanted: int, name: str = "", *, warn: bool = False) -> T:
    """Demand a number of dimensions or more."""
    return _check("rank_at_least", x, (wanted,), name, warn=warn)


def dtype(x: T, wanted: Any, name: str = "", *, warn: bool = False) -> T:
    """Demand a dtype, one of several, or one of the kinds ``floating``, ``integer``, ``complex``, ``bool``."""
    several = wanted if isinstance(wanted, (tuple, list)) else (wanted,)
    return _check("dtype", x, (tuple(_text(each) for each in several),), name, warn=warn)


def shape(x: T, spec: str | Sequence[Any], name: str = "", *, warn: bool = False) -> T:
    """Demand a shape such as ``"B T 64"``: sizes, names, ``_`` for any size, ``...`` for any dimensions.

    A name stands for one size within a step. A new step begins when the recorded run goes on to its next step, when the
    outermost module is called anew, when the line that bound the name runs again outside of any module, and with
    ``clew.check.new_step()``.
    """
    return _check("shape", x, (spec,), name, warn=warn)


def non_decreasing(x: T, name: str = "", *, dim: int = -1, warn: bool = False) -> T:
    """Demand that along a dimension no element is less than the one before it."""
    return _check("non_decreasing", x, (dim,), name, warn=warn)


def strictly_increasing(x: T, name: str = "", *, dim: int = -1, warn: bool = False) -> T:
    """Demand that along a dimension every element is larger than the one before it."""
    return _check("strictly_increasing", x, (dim,), name, warn=warn)


def probabilities(x: T, name: str = "", *, dim: int = -1, atol: float | None = None, warn: bool = False) -> T:
    """Demand numbers from 0 to 1 that sum to 1 along a dimension, within a tolerance that fits the type."""
    return _check("probabilities", x, (dim, atol), name, warn=warn)


def rows_differ(x: T, name: str = "", *, warn: bool = False) -> T:
    """Demand that not every row equals the first, as the outputs of a collapsed model do; NaN equals NaN here."""
    return _check("rows_differ", x, (), name, warn=warn)


def that(condition: T, name: str = "", *, show: Sequence[Any] = (), warn: bool = False) -> T:
    """Demand that a condition, or every element of one, is true; ``show`` adds tensors to the message."""
    return _check("that", condition, (), name, warn=warn, show=tuple(show))


def _check(
    check: str, x: T, args: tuple[Any, ...], name: str, *, warn: bool, show: tuple[Any, ...] = ()
) -> T:
    if is_compiling():
        _check_compiled(check, x, args, {"name": name, "warn": warn}, show)
    elif not is_left_out(x):
        run_rule(check, x, args, name=name, warn=warn, show=show)
    return x


def run_rule(
    check: str,
    x: Any,
    args: tuple[Any, ...],
    *,
    name: str,
    warn: bool = False,
    show: Sequence[Any] = (),
    site: str | None = None,
    key: str | None = None,
) -> None:
    """Hold a value to a demand and report what is wrong; ``site`` and ``key`` say what the stack does not."""
    rule = RULES[check]
    try:
        problem = rule(x, *args, name=name, key=key) if check == "shape" else rule(x, *args)
    except UsageError as error:
        error.where = error.where or str(find_place(site))
        raise
    if problem is not None:
        report(
            check,
            x,
            problem,
            name=name,
            warn=warn,
            place=find_place(site),
            show=show,
            at_site=site is not None,
        )


def _text(wanted: Any) -> str:
    if isinstance(wanted, (str, torch.dtype)):
        return str(wanted)
    return name_dtype(wanted)


_MAY_BE_OPEN: Final = frozenset({"equal", "less", "less_equal", "in_range", "shape"})
"""Checks whose numbers may be sizes that the compiler keeps open: those are no constants and travel as tensors."""


def _check_compiled(
    check: str, x: Any, args: tuple[Any, ...], order: dict[str, Any], show: tuple[Any, ...]
) -> None:
    """Put a check into the graph: tensors among the arguments by their number, the rest as constants."""
    tensors: list[Any] = [x]
    marks = [_mark(each, tensors, is_open=check in _MAY_BE_OPEN) for each in args]
    emit([*tensors, *show], {"tap": "check", "check": check, "args": marks, "shown": len(show), **order})


def _mark(value: Any, tensors: list[Any], *, is_open: bool) -> Any:
    if isinstance(value, (tuple, list)):
        return [_mark(each, tensors, is_open=is_open) for each in value]
    if is_open and isinstance(value, (int, float)) and not isinstance(value, bool):
        kind = torch.int64 if isinstance(value, int) else torch.float64
        tensors.append(torch.full((), value, dtype=kind, device="cpu"))
        return {"number": len(tensors) - 1}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    return "..." if value is ... else value


def _unmark(mark: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(mark, list):
        return tuple(_unmark(each, tensors) for each in mark)
    if not isinstance(mark, dict):
        return mark
    return tensors[mark["number"]].item() if "number" in mark else tensors[mark["tensor"]]


@runs("check")
def _check_running(tensors: list[torch.Tensor], order: dict[str, Any], key: str) -> None:
    args = tuple(_unmark(each, tensors) for each in order["args"])
    show = tensors[len(tensors) - order["shown"] :]
    run_rule(order["check"], tensors[0], args, name=order["name"], warn=order["warn"], show=show, key=key)
