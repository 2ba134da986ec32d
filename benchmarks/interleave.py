"""Times a training plain and recorded in turns, in one process, so that drift of the machine hits both alike."""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import clew
from benchmarks.trainings import Training, make

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.modes import Mode

_WARM_UP = {"mlp": 1300, "loader": 1300, "cnn": 24, "gpt": 22}
"""Steps before the timing. The doctor looks closer at the first hundreds, which shows on steps of a millisecond."""
_MOST_STEPS = 2000
_SETTLING = 30
"""Steps after a switch that are not timed, fewer where a block is shorter: they find the caches of the other side, and
clew looks closer at what comes first. A training has no such switches."""
_SHORT_BLOCKS = 3
"""Blocks of several steps are short, so that a machine whose speed changes within seconds hits both sides alike, and
there are so many times as many of them."""


class Spent(NamedTuple):
    """Seconds a block of steps took: on the clock, of all threads of this process, and of each step alone."""

    wall: float
    cpu: float
    steps: list[float]


@dataclass(frozen=True)
class Cost:
    """Ratios of the recorded to the plain step over the rounds: median and quartiles."""

    wall: float
    wall_quartiles: tuple[float, float]
    cpu: float
    cpu_quartiles: tuple[float, float]
    cpu_mean: float
    cpu_error: float
    """Mean and standard error of the processor's ratios: what a thinned recording does seldom is in no median."""
    undisturbed: float
    """Ratio of the fastest quarter of single steps on each side: what is left of the cost on a busy machine."""
    plain_ms: float
    rounds: int
    block: int


def measure(name: str, mode: Mode, *, rounds: int) -> Cost:
    """Alternate blocks of plain and recorded steps, changing which comes first, and compare them by round."""
    training = make(name)
    with tempfile.TemporaryDirectory() as folder:
        watch = clew.watch(
            {name: training.model},
            training.optimizer,
            out=folder,
            status=False,
            name=mode.name,
            **mode.settings,
        )
        with watch:
            # The first steps are never thinned and every cache is cold: neither is what a training costs.
            for _ in range(_WARM_UP[name]):
                training.step()
            watch.pause()
            block = _choose_block(training, mode.block_seconds)
            rounds *= _SHORT_BLOCKS if block > 1 else 1
            pairs = [
                _time_round(training, watch, block, plain_first=bool(index % 2)) for index in range(rounds)
            ]
    return _summarise(pairs, block)


def _choose_block(training: Training, seconds: float) -> int:
    training.step()
    spent = []
    for _ in range(3):
        start = time.process_time()
        training.step()
        spent.append(time.process_time() - start)
    return max(1, min(_MOST_STEPS, round(seconds / min(spent))))


def _time_round(
    training: Training, watch: clew.Watch, block: int, *, plain_first: bool
) -> tuple[Spent, Spent]:
    plain = _time_block(training, block) if plain_first else None
    watch.resume()
    recorded = _time_block(training, block)
    watch.pause()
    return plain or _time_block(training, block), recorded


def _time_block(training: Training, block: int) -> Spent:
    for _ in range(min(_SETTLING, block)):
        training.step()
    wall, marks = time.perf_counter(), [time.process_time()]
    for _ in range(block):
        training.step()
        marks.append(time.process_time())
    steps = [after - before for before, after in itertools.pairwise(marks)]
    return Spent(time.perf_counter() - wall, marks[-1] - marks[0], steps)


def _summarise(pairs: list[tuple[Spent, Spent]], block: int) -> Cost:
    wall = sorted(recorded.wall / plain.wall for plain, recorded in pairs)
    cpu = sorted(recorded.cpu / plain.cpu for plain, recorded in pairs)
    return Cost(
        wall=statistics.median(wall),
        wall_quartiles=_quartiles(wall),
        cpu=statistics.median(cpu),
        cpu_quartiles=_quartiles(cpu),
        cpu_mean=statistics.mean(cpu),
        cpu_error=statistics.stdev(cpu) / math.sqrt(len(cpu)) if len(cpu) > 1 else 0.0,
        undisturbed=_fast(recorded for _, recorded in pairs) / _fast(plain for plain, _ in pairs),
        plain_ms=1000 * statistics.median(plain.wall for plain, _ in pairs) / block,
        rounds=len(pairs),
        block=block,
    )


def _fast(blocks: Iterable[Spent]) -> float:
    return _quartiles(sorted(step for block in blocks for step in block.steps))[0]


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return low, high
