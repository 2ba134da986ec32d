"""What snapshots cost, spread over the steps between them, and what executing a step under the lens costs.

    python -m benchmarks.snapshots

Two recordings of one training take turns in one process: one takes a snapshot in each of its blocks, the other none.
The difference, writing thread included, is what a snapshot costs; divided by the steps that clew itself would put
between two of them, it is the amortised cost. The lens is timed against the plain step, in turns as well.
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

_BLOCK = {"mlp": 400, "cnn": 14, "gpt": 14}
_ROUNDS = {"mlp": 6, "cnn": 3, "gpt": 3}
_WARM_UP = {"mlp": 100, "cnn": 4, "gpt": 4}


class Cost(NamedTuple):
    """Milliseconds of a plain step and of a snapshot, the steps between two, and the ratios that follow."""

    step_ms: float
    snapshot_ms: float
    every: int
    amortised: float
    lens: float


def measure(name: str) -> Cost:
    """Return what snapshots and the lens cost on one of the trainings."""
    training = make(name)
    with tempfile.TemporaryDirectory() as folder:
        block = _BLOCK[name]
        on = _watch(training, name, folder, "on", snapshots=f"every:{block}")
        off = _watch(training, name, folder, "off", snapshots="off")
        plain, snapshot, every = _compare(
            training, on, off, block=block, rounds=_ROUNDS[name], warm=_WARM_UP[name]
        )
    lens = _time_lens(training, rounds=5)
    return Cost(plain * 1e3, snapshot * 1e3, every, 1 + max(snapshot, 0.0) / (every * plain), lens)


def _watch(training: Training, name: str, folder: str, side: str, **settings: Any) -> Any:
    return clew.watch(
        {name: training.model},
        training.optimizer,
        out=folder,
        name=side,
        status=False,
        doctor=False,
        **settings,
    )


def _compare(
    training: Training, on: Any, off: Any, *, block: int, rounds: int, warm: int
) -> tuple[float, float, int]:
    """Return seconds of a step, seconds that a snapshot adds, and the steps that clew would put between two."""
    with on:
        _time(training, warm)
        on.pause()
        with off:
            _time(training, warm)
            off.pause()
            steps, extra = [], []
            for _ in range(rounds):
                without = _time_watched(training, off, block)
                extra.append(_time_watched(training, on, block) - without)
                steps.append(without / block)
        lens = on._recording._snapshots
        lens._fixed, lens._step_seconds = None, statistics.median(steps)
        every = lens._choose_period()
    return statistics.median(steps), statistics.median(extra), every


def _time_watched(training: Training, watch: Any, steps: int) -> float:
    watch.resume()
    spent = _time(training, steps)
    watch.pause()
    return spent


def _time(training: Training, steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        training.step()
    return time.perf_counter() - started


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
    print(f"{'training':10}{'step':>10}{'snapshot':>12}{'every':>8}{'amortised':>11}{'lens':>8}")
    for name in names or ["mlp", "cnn", "gpt"]:
        cost = measure(name)
        print(
            f"{name:10}{cost.step_ms:>7.2f} ms{cost.snapshot_ms:>9.1f} ms{cost.every:>8}"
            f"{cost.amortised:>11.3f}{cost.lens:>7.1f}x"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
