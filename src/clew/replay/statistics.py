"""The statistics of a value by name, computed when asked for: ``stats.abs_max > 100`` in a condition."""

from __future__ import annotations

from typing import Any

from clew.capture.torch.describe import examine_tensor
from clew.capture.torch.leaves import walk
from clew.errors import UsageError, suggest
from clew.model.schema import STAT_NAMES


class Statistics:
    """What ``stats`` is in an expression: attributes named as in the record, of the first tensor of the value."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._numbers: dict[str, float] | None = None

    def __getattr__(self, name: str) -> float:
        if name not in STAT_NAMES:
            if name.startswith("__"):
                raise AttributeError(name)
            raise UsageError(
                f"no statistic '{name}'",
                next_step=suggest(name, STAT_NAMES) or f"there are {', '.join(STAT_NAMES)}",
            )
        if self._numbers is None:
            found = next(walk(self._value), None)
            if found is None:
                raise UsageError("there is no tensor here to take statistics of")
            self._numbers = examine_tensor(found[1]).stats or {}
        return self._numbers.get(name, float("nan"))

    def __call__(self, value: Any) -> Statistics:
        """Return the statistics of another value: ``stats(args[0]).nan``."""
        return Statistics(value)

    def __repr__(self) -> str:
        if next(walk(self._value), None) is None:
            return "no tensor here"
        return " ".join(f"{name} {getattr(self, name):g}" for name in STAT_NAMES)
