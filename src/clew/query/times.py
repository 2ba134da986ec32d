"""How long the steps of a run took, and when each ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clew.query.table import Series

if TYPE_CHECKING:
    from clew.query.run import Run

STEP_TIME = "time"
"""The name of the seconds of each step, all its phases together: made, not recorded."""


def step_times(run: Run, *, rank: int = 0) -> Series:
    """Return the seconds of each step: what its phases took together."""
    phases = [each for name, each in run.scalars(rank=rank).items() if name.startswith(f"{STEP_TIME}.")]
    steps = np.unique(np.concatenate([np.zeros(0, np.int64), *(each.steps for each in phases)]))
    seconds = np.zeros(len(steps))
    for each in phases:
        seconds[np.searchsorted(steps, each.steps)] += each.values
    return Series(STEP_TIME, steps, seconds)


def passed_at(run: Run, steps: np.ndarray[tuple[int], np.dtype[np.int64]], *, rank: int = 0) -> Series:
    """Return the seconds of training that had passed when each of some steps ended; empty if none were recorded."""
    times = step_times(run, rank=rank)
    if not len(times):
        return Series("passed", steps[:0], np.zeros(0))
    at = np.searchsorted(times.steps, steps, side="right") - 1
    passed = np.cumsum(times.values)
    return Series("passed", steps, np.where(at >= 0, passed[np.maximum(at, 0)], 0.0))
