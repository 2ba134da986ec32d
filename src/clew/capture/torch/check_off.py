"""Checks and taps switched off (``CLEW_CHECKS=0``): the value goes through and nothing else happens.

Each has the arguments of what it stands for, spelled out: that is less than half the price of taking any, and a
call that would be wrong when switched on stays wrong.
"""

# ruff: noqa: ARG001, D103 - signatures without a body
from __future__ import annotations

from typing import Any, Final


def keep(x: Any, name: str = "", *, warn: bool = False) -> Any:
    return x


finite = positive = non_negative = negative = non_positive = integer = rows_differ = keep


def equal(
    x: Any,
    other: Any,
    name: str = "",
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    equal_nan: bool = False,
    warn: bool = False,
) -> Any:
    return x


def less(x: Any, other: Any, name: str = "", *, warn: bool = False) -> Any:
    return x


less_equal = less


def in_range(x: Any, low: Any, high: Any, name: str = "", *, warn: bool = False) -> Any:
    return x


def rank(x: Any, wanted: Any, name: str = "", *, warn: bool = False) -> Any:
    return x


rank_at_least = dtype = rank


def shape(x: Any, spec: Any, name: str = "", *, warn: bool = False) -> Any:
    return x


def non_decreasing(x: Any, name: str = "", *, dim: int = -1, warn: bool = False) -> Any:
    return x


strictly_increasing = non_decreasing


def probabilities(
    x: Any, name: str = "", *, dim: int = -1, atol: float | None = None, warn: bool = False
) -> Any:
    return x


def that(condition: Any, name: str = "", *, show: Any = (), warn: bool = False) -> Any:
    return condition


def new_step() -> None:
    return None


def print_value(
    x: Any,
    label: str = "",
    *,
    first_n: int | None = None,
    every: int = 1,
    when: Any = None,
    summarize: int = 3,
    file: Any = None,
) -> Any:
    return x


def dump(x: Any, path: Any, *, first_n: int | None = None, every: int = 1, when: Any = None) -> Any:
    return x


def tap(x: Any, fn: Any, *, replace: bool | None = None) -> Any:
    return x


class NoAttachment:
    """What ``clew.on`` and ``clew.checks`` return: no hooks, nothing to remove."""

    sites: Final[tuple[str, ...]] = ()
    is_on: Final = False
    calls: Final = 0

    def remove(self) -> None:
        """Do nothing."""

    def __enter__(self) -> NoAttachment:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


def checks(model: Any, table: Any = None, *, warn: bool = False) -> NoAttachment:
    return NoAttachment()


def on(patterns: Any, fn: Any, *, phase: str = "forward", model: Any = None) -> NoAttachment:
    return NoAttachment()
