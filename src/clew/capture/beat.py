"""What the steps of a loop touch of a recording: the compiled bases where they are there, or their twins.

In a loop in which nothing is new the compiled ``Beat`` lets the events of a step pass without a Python frame; the twin
leaves every one of them to the general way, which does the same and more. A quiet step is one that is not recorded in
full.
"""

from __future__ import annotations

from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from clew.stats.built import BUILT

LONGEST_GAP: Final = 1000
"""A thinned run still shows a sign of life this often."""

_MEMORY: Final = 0.9
"""Weight of the past in the running mean of the cost."""

_BANK_STEPS: Final = 2.0
"""Unspent time may be saved up for this many recorded steps, not more: no bursts after a pause."""

_PROBE_EVERY: Final = 25
_PROBE_SHARE: Final = 20
_PROBE_RARELY: Final = 200
"""After the start of a run, one recorded step in so many is probed for the doctor; in a long run ever fewer: the
recorded steps so far divided by a number, up to a limit."""


class SlowLedger:
    """The twin of the kernel's ``Ledger``."""

    share = bank = most = cost = unseen = 0.0
    """The part of the time that clew may take; what is saved of it, at most, in seconds; what a recorded step costs,
    and what each step costs that no clock sees."""
    period = warmup_steps = forced_until = thinned = since_last = 0
    recorded = probed_at = found_until = 0
    """How many steps were recorded; how many when one was last probed; until when something that was found is looked
    at."""

    def is_due(self, step: int) -> bool:
        """Return whether this step is recorded in full."""
        if step < self.warmup_steps or step <= self.forced_until:
            return True
        if self.period:
            return step % self.period == 0
        return self.bank >= self.cost or self.since_last >= LONGEST_GAP

    def is_probed(self, step: int) -> bool:
        """Return whether the rules get a closer look at this step, which costs more than its statistics."""
        if step < self.warmup_steps or step <= self.found_until:
            return True
        gap = min(max(_PROBE_EVERY, self.recorded // _PROBE_SHARE), _PROBE_RARELY)
        if self.recorded - self.probed_at < gap:
            return False
        self.probed_at = self.recorded
        return True

    def account(self, step: int, cost_seconds: float, wall_seconds: float, was_due: bool) -> None:
        """Take note of what a finished step took in all, and how much of that was clew."""
        if was_due:
            self.recorded += 1
            self.since_last = 0
            keep = _MEMORY if self.cost else 0.0
            self.cost = keep * self.cost + (1 - keep) * cost_seconds
            self.most = _BANK_STEPS * self.cost
        else:
            self.thinned += 1
            self.since_last += 1
        self.pay(step, cost_seconds, wall_seconds)

    def pay(self, step: int, cost_seconds: float, wall_seconds: float) -> None:
        """Put a step's share of the time aside, and take what clew has cost in it."""
        if self.share and step >= self.warmup_steps:
            cost = cost_seconds + self.unseen
            saved = self.bank + self.share * (wall_seconds - cost) - cost
            self.bank = min(self.most, saved)


class SlowHolder:
    """The twin of the kernel's ``Holder``."""

    thread = 0
    is_shared = False


class SlowTurns:
    """The twin of the kernel's ``Turns``."""

    reason = ""
    steps = turn = 0
    lowest = highest = 0.0


class SlowUpdates:
    """The twin of the kernel's ``Updates``."""

    __slots__ = (
        "grad_keys",
        "known_groups",
        "may_scale",
        "param_keys",
        "parameters",
        "rates",
        "shadows",
        "stepped",
        "steps",
        "tensors",
        "turn",
    )


class SlowPlace:
    """The twin of the kernel's ``Place``."""

    __slots__ = ("calls", "eval_calls", "eval_recalls", "off", "recalls", "serial", "site", "wanted")


class SlowSource:
    """The twin of the kernel's ``Source``."""

    __slots__ = ("name", "pending", "position", "ref")


class SlowShelf:
    """The twin of the kernel's ``Shelf``: every entry is closed by the general way."""

    off = ""
    is_whole = True
    clones = is_ending = is_dear = False
    keep_batches = pending_bytes = flush_bytes = ring_bytes = 0
    trouble_at = -1

    def stay_quiet(self, seconds: float) -> None:
        """Let entries be closed by the short way for so long; here there is none."""


class SlowBeat:
    """The twin of the kernel's ``Beat``: no step is quiet."""

    nested = updating = inside = rooted = resumes = seeing = tag = 0
    quiet_with = -1
    wants_loss = fetching = False

    def stay_quiet(self, seconds: float) -> None:
        """Let steps end by the short way for so long; here there is none."""

    def end_quietly(self) -> bool:
        """Leave the end of a step to the general way."""
        return False

    def begin_call(self, *_: Any) -> int:
        """Leave a root call to the general way."""
        return -1

    def begin_pass(self, *_: Any) -> int:
        """Leave a backward pass to the general way."""
        return -1


class SlowCourse:
    """The twin of the kernel's ``Course``: every step ends by the general way."""

    ended_at = step_seconds = 0.0

    def keep_pace(self, step: int) -> None:
        """A step has ended: take how long it took. The shortest of late counts: a validation makes a step look long."""
        now = perf_counter()
        if self.ended_at:
            spent, limit = now - self.ended_at, 1.1 * self.step_seconds
            self.step_seconds = spent if spent < limit or not limit else limit
        self.ended, self.ends, self.ended_at = step, 1, now

    def rest(self) -> None:
        """Let the next step begin now: what went before was none of it."""
        self.ended_at = perf_counter()

    def end_pass(self, *_: Any) -> bool:
        """Leave the end of a backward pass to the general way."""
        return False

    def end_update(self, *_: Any) -> int:
        """Leave the end of a step to the general way."""
        return -1


if TYPE_CHECKING:
    from clew.stats._kernel import Beat, Course, Holder, Latch, Ledger, Place, Shelf, Source, Turns, Updates
else:
    Beat = getattr(BUILT, "Beat", SlowBeat)
    Course = getattr(BUILT, "Course", SlowCourse)
    Holder = getattr(BUILT, "Holder", SlowHolder)
    Latch = getattr(BUILT, "Latch", RLock)
    Ledger = getattr(BUILT, "Ledger", SlowLedger)
    Place = getattr(BUILT, "Place", SlowPlace)
    Shelf = getattr(BUILT, "Shelf", SlowShelf)
    Source = getattr(BUILT, "Source", SlowSource)
    Turns = getattr(BUILT, "Turns", SlowTurns)
    Updates = getattr(BUILT, "Updates", SlowUpdates)

__all__ = ["Beat", "Course", "Holder", "Latch", "Ledger", "Place", "Shelf", "Source", "Turns", "Updates"]
