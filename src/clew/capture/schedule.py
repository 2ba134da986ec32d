"""Which steps are recorded: every Nth, or as many as a share of the run's time can pay for."""

from __future__ import annotations

from typing import Final

from clew.capture.beat import Ledger

_SEEN: Final = 0.7
_UNSEEN_SECONDS: Final = 30e-6
"""Part of the budget for what the clock and those of clew's threads see; caches left cold by what they see make up the
rest. And what a step costs that they do not: torch finding its way past our gates, by measurements against the plain
loop on steps of some milliseconds."""


class Schedule(Ledger):
    """Decides, step by step, what is due; told afterwards what each step took and cost."""

    def __init__(self, *, every: int | None, budget: float | None, warmup_steps: int) -> None:
        self.every = every if every is not None else (1 if budget is None else None)
        self.period = self.every or 0
        self.budget = budget
        self.warmup_steps = warmup_steps
        self.forced_until = -1
        self.share = _SEEN * budget if budget is not None else 0.0
        self.unseen = _UNSEEN_SECONDS
        self.found_until = -1
        self._looks_from = 0

    def force(self, step: int, *, steps: int, is_probed: bool = True) -> None:
        """Make this and the following steps due whatever they cost: something was found here, or is compared later."""
        self.forced_until = max(self.forced_until, step + steps - 1)
        if is_probed:
            self.found_until = max(self.found_until, step + steps - 1)

    def look_again(self, step: int, *, steps: int) -> None:
        """Give the rules a closer look at some recorded steps from here on; the loop is not what it was."""
        self._looks_from = step
        if self.every is None:
            self.force(step, steps=steps)
        else:
            self.found_until = max(self.found_until, step + steps * self.every - 1)

    def is_first(self, step: int, *, steps: int) -> bool:
        """Return whether a step is among the first so many of the run, or since the rules look again."""
        return step - self._looks_from < steps

    def charge(self, seconds: float) -> None:
        """Take note of what clew's own threads have cost since the last time."""
        if self.share:
            self.bank -= seconds
