"""What snapshots cost, spread over the steps between them, and what executing a step under the lens costs.

    python -m benchmarks.snapshots

A recording takes a snapshot every so many steps. The first half of the steps between two snapshots pays for copying,
writing and the step that is recorded in full; the second half pays for nothing. What the first takes more, in time of
all threads, is what a snapshot costs: both are near each other in time, and the median over many is kept. Divided by
the steps that clew itself would put between two snapshots, and with what every step pays for keeping its batch, it is
the amortised cost. The lens is timed against the plain step, in turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import clew
from benchmarks.trainings import Training, make
from clew.capture.sites import SiteTable
from clew.capture.torch.registry import Registry
from clew.replay.rehearsal import Rehearsal

if TYPE_CHECKING:
    from collections.abc import Callable

_HALF = {"mlp": 16, "cnn": 3, "gpt": 3}
"""Steps of half the way from one snapshot to the next: long enough for the thread to have written it."""
_ROUNDS = {"mlp": 40, "cnn": 8, "gpt": 6}
_WARM_UP = {"mlp": 400, "cnn": 24, "gpt": 22}


class Cost(NamedTuple):
    """Milliseconds of a step, of keeping its batch and of a snapshot, steps between two, and the ratios that follow."""

    step_ms: float
    keep_ms: float
    snapshot_ms: float
    every: int
    amortised: float
    lens: float


def measure(name: str) -> Cost:
    """Return what snapshots and the lens cost on one of the trainings."""
    training, half = make(name), _HALF[name]
    with tempfile.TemporaryDirectory() as folder:
        watch = clew.watch(
            {name: training.model},
            training.optimizer,
            out=folder,
            name="run",
            status=False,
            doctor=False,
            snapshots=f"every:{2 * half}",
        )
        with watch:
            lens = watch._recording._snapshots
            keeping = _time_keeping(lens)
            step, snapshot = _compare(training, lens, half=half, rounds=_ROUNDS[name], warm=_WARM_UP[name])
            keep = statistics.median(keeping)
            lens._fixed, lens._step_seconds = None, step
            every = lens._choose_period()
    share = (keep + max(snapshot, 0.0) / every) / step
    return Cost(step * 1e3, keep * 1e3, snapshot * 1e3, every, 1 + share, _time_lens(training, rounds=5))


def _time_keeping(lens: Any) -> list[float]:
    """Have the seconds of every look at the end of a step kept in a list, which is returned."""
    spent: list[float] = []
    end_step = lens.end_step

    def timed() -> None:
        started = time.thread_time()
        end_step()
        spent.append(time.thread_time() - started)

    lens.end_step = timed
    return spent


def _compare(training: Training, lens: Any, *, half: int, rounds: int, warm: int) -> tuple[float, float]:
    """Return seconds of a step and seconds that a snapshot adds."""
    _time(training, warm)
    taken = lens.taken
    while lens.taken == taken:
        training.step()
    _time(
        training, 2 * half - 1
    )  # a snapshot is taken at the end of a step, the next one at the end of the next
    steps, extra = [], []
    for _ in range(rounds):
        loaded, free = _time(training, half), _time(training, half)
        steps.append(free / half)
        extra.append(loaded - free)
    return statistics.median(steps), statistics.median(extra)


def _time(training: Training, steps: int) -> float:
    started = time.process_time()
    for _ in range(steps):
        training.step()
    return time.process_time() - started


def _time_lens(training: Training, *, rounds: int) -> float:
    """Return how many plain steps one step under the lens takes."""
    registry = Registry(SiteTable(("*",)))
    registry.add_tree(training.model)

    def look() -> None:
        Rehearsal(registry).run(training.step)

    look()
    return statistics.median(_seconds(look) / _seconds(training.step) for _ in range(rounds))


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main(names: list[str]) -> None:
    """Print one line for each training."""
    print(f"{'training':10}{'step':>10}{'keep':>10}{'snapshot':>12}{'every':>8}{'amortised':>11}{'lens':>8}")
    for name in names or ["mlp", "cnn", "gpt"]:
        cost = measure(name)
        print(
            f"{name:10}{cost.step_ms:>7.2f} ms{cost.keep_ms:>7.3f} ms{cost.snapshot_ms:>9.1f} ms{cost.every:>8}"
            f"{cost.amortised:>11.3f}{cost.lens:>7.1f}x"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
