"""Where the time of a step goes; every moment belongs to exactly one phase, clew's own included."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from clew.stats._kernel import Clock

    AnyClock: TypeAlias = "StepClock | Clock"

PHASES: Final = ("rest", "data", "forward", "eval", "backward", "optimizer", "clew")
REST, DATA, FORWARD, EVAL, BACKWARD, OPTIMIZER, CLEW = range(len(PHASES))


def make_clock() -> AnyClock:
    """Return a clock: the compiled one where there is one, which costs a third in the hot paths."""
    try:
        from clew.stats._kernel import Clock
    except ImportError:
        return StepClock()
    return Clock(len(PHASES), CLEW)


class StepClock:
    """A stopwatch with one hand per phase. ``switch`` moves to a phase and returns the one before."""

    __slots__ = ("_marked", "_since", "_times", "phase")

    def __init__(self) -> None:
        self.phase = REST
        self._times = [0.0] * len(PHASES)
        self._marked: list[float] | None = None
        self._since = perf_counter()

    def switch(self, phase: int) -> int:
        """Charge the time since the last switch to the phase that ends; begin another."""
        now = perf_counter()
        before = self.phase
        self._times[before] += now - self._since
        self._since = now
        self.phase = phase
        return before

    def charge(self, seconds: float) -> None:
        """Count time that clew causes where no switch can see it, such as the calling of a hook."""
        self._times[CLEW] += seconds
        self._times[self.phase] -= seconds

    def mark(self) -> None:
        """Remember now as the end of the step, in case it turns out to be."""
        self.switch(self.phase)
        self._marked = self._times.copy()

    def split(self) -> list[float]:
        """End the step at the mark (or now) and return its seconds by phase; what came after is carried over."""
        self.switch(self.phase)
        ended = self._marked if self._marked is not None else self._times.copy()
        self._times = [later - earlier for later, earlier in zip(self._times, ended, strict=True)]
        self._marked = None
        return ended

    def restart(self) -> None:
        """Forget what was measured and begin again: the watch was paused."""
        self._times = [0.0] * len(PHASES)
        self._marked = None
        self._since = perf_counter()
