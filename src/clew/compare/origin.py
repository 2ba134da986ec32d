"""The place where two runs part, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

CAUSES: Final = (
    "data",
    "initial-weight",
    "argument",
    "operation",
    "gradient",
    "optimizer",
    "learning-rate",
    "randomness",
    "precision",
    "structure",
)
"""The classes of causes."""

EXPLAINED_BY_ROUNDING: Final = ("operation", "precision", "gradient", "optimizer", "argument")
"""Causes that a difference within the tolerance may only seem to have; the others are facts."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The first difference: step, phase, site and kind, the class of its cause, and the reason in words.

    ``site_b`` is the name in the second run; ``side`` the run that alone has the site, if one does; ``row`` the row of
    the step's table; ``is_within`` says that rounding could explain the difference.
    """

    step: int
    phase: str
    site: str
    kind: str
    cause: str
    reason: str
    site_b: str = ""
    side: str = ""
    op: str = ""
    row: int = -1
    is_within: bool = False
    rank: int = 0

    def changed(self, **more: Any) -> Origin:
        """Return the same with other fields."""
        return replace(self, **more) if more else self
