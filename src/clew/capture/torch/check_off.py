"""Checks and taps switched off (``CLEW_CHECKS=0``): the value goes through and nothing else happens."""

from __future__ import annotations

from typing import Any, Final


def pass_through(x: Any, *_: Any, **__: Any) -> Any:
    """Return the value, in the place of every check, ``clew.print`` and ``clew.tap``."""
    return x


def new_step(*_: Any) -> None:
    """Do nothing: no name is bound."""


finite = positive = non_negative = negative = non_positive = pass_through
equal = less = less_equal = in_range = integer = pass_through
rank = rank_at_least = dtype = shape = pass_through
non_decreasing = strictly_increasing = probabilities = rows_differ = that = pass_through


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


def checks(*_: Any, **__: Any) -> NoAttachment:
    """Set no hook."""
    return NoAttachment()


on = checks
