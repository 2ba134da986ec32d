"""What a user asks for in words, turned into numbers; wrong words are answered with the nearest right one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.errors import UsageError, suggest
from clew.model.schema import KIND_INDEX, KINDS, MODES, STAT_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

QUANTILE: Final = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


def unknown(word: str, value: object, right: Sequence[str]) -> UsageError:
    """Return the error for a word that is none of the right ones."""
    listed = ", ".join(right) if len(right) <= 16 else f"{len(right)} are known"
    hint = suggest(str(value), right)
    return UsageError(f"unknown {word} '{value}'", next_step=hint or f"{word}: {listed}")


def choose_kinds(kind: str | Iterable[str] | None) -> tuple[int, ...] | None:
    """Return the numbers of one or several kinds, None for all."""
    if kind is None:
        return None
    words = [kind] if isinstance(kind, str) else list(kind)
    for word in words:
        if word not in KIND_INDEX:
            raise unknown("kind", word, KINDS)
    return tuple(KIND_INDEX[word] for word in words)


def choose_mode(mode: str | None) -> tuple[int, ...] | None:
    """Return the number of a mode, None for both."""
    if mode is None:
        return None
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    return (MODES.index(mode),)


def choose_first_calls(steps: NDArray[np.int64], ordinals: NDArray[np.int16]) -> NDArray[np.intp]:
    """Return, of rows of one series, those of the lowest ordinal in each step, in order of steps."""
    order = np.lexsort((ordinals, steps))
    _, first, counts = np.unique(steps[order], return_index=True, return_counts=True)
    lowest = np.repeat(ordinals[order][first], counts)
    chosen: NDArray[np.intp] = order[ordinals[order] == lowest]
    return chosen


def quantile_of(stat: str) -> float | None:
    """Return the quantile that ``median`` or ``p05`` asks for, or None for any other word."""
    if stat == "median":
        return 0.5
    match = QUANTILE.fullmatch(stat)
    return float(match[1]) / 100 if match else None


def check_stat(stat: str) -> None:
    """Raise when a word is no statistic."""
    if stat not in STAT_NAMES and quantile_of(stat) is None:
        raise unknown("stat", stat, (*STAT_NAMES, "median", "p05", "p25", "p75", "p95"))


class StepChoice:
    """Which steps are wanted: ``first`` and ``last`` (included), and a stride between them."""

    def __init__(self, step: int | slice | range | str | None, latest: int) -> None:
        self.first, self.last, self.stride = _bounds(step, latest)

    def thin(self, steps: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return which of the steps within the bounds are on the stride, or None for all."""
        return None if self.stride == 1 else (steps - (self.first or 0)) % self.stride == 0


def _bounds(step: Any, latest: int) -> tuple[int | None, int | None, int]:
    if step is None:
        return None, None, 1
    if step == "latest":
        return latest, latest, 1
    if isinstance(step, range):
        step = slice(step.start, step.stop, step.step)
    if isinstance(step, slice):
        values = (step.start, step.stop, step.step)
        if all(value is None or isinstance(value, int) for value in values) and (step.step or 1) > 0:
            last = None if step.stop is None else step.stop - 1
            return (step.start or 0), last, (step.step or 1)
    elif isinstance(step, int | np.integer) and step >= 0:
        return int(step), int(step), 1
    raise UsageError(
        f"step {step!r} is not understood",
        next_step="give a step number from 0 on, a slice such as slice(100, 200), a range, or 'latest'",
    )
