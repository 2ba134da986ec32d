"""Times a training plain and recorded in turns, in one process, so that drift of the machine hits both alike."""

from __future__ import annotations

import ctypes
import itertools
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

import clew
from benchmarks.trainings import Training, make

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchmarks.modes import Mode

_WARM_UP = {"mlp": 1300, "loader": 1300, "cnn": 110, "gpt": 22}
"""Steps before the timing. The doctor looks closer at the first hundred, and at times at the hundreds after it, which
shows unless steps are long; ``benchmarks.doctor_cost`` measures what it costs there."""
_MOST_STEPS = 2000
_SETTLING = 4
_SETTLING_SECONDS = 0.3
"""Steps after a switch that are not timed, fewer where one alone takes as long as this: they find the caches of the
other side, and clew gets to know the loop again. A training has no such switches."""
_FEWEST_ROUNDS = 8
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER, _LARGEST = 2**31 - 1, 2**25
"""Of glibc: the numbers of two settings of ``mallopt``, and the greatest value that each takes."""


class Spent(NamedTuple):
    """Seconds a block of steps took: on the clock, of the processor, and of each step alone."""

    wall: float
    cpu: float
    steps: list[float]


class Plan(NamedTuple):
    """Steps of a block that are timed, and those before them that are not."""

    block: int
    settling: int


Pair = tuple[Spent, Spent]
"""A plain block and a recorded one."""


@dataclass(frozen=True)
class Cost:
    """Ratios of the recorded to the plain step: of all rounds together, and median and quartiles of single rounds."""

    wall: float
    wall_quartiles: tuple[float, float]
    cpu: float
    cpu_quartiles: tuple[float, float]
    cpu_total: float
    cpu_error: float
    """All recorded steps to all plain ones, and the standard error: what is done seldom is in no median, and the mean
    of ratios would be too high, as each divides by a number that scatters."""
    undisturbed: float
    """Ratio of the fastest quarter of single steps on each side: what is left of the cost on a busy machine."""
    plain_ms: float
    rounds: int
    block: int


def keep_memory() -> bool:
    """Have malloc keep what is freed for this process instead of giving it back; return whether it does.

    By itself it gives the end of the heap back at some steps and has it mapped again at the next, if nothing lies
    behind it. Whether that happens is chance: a plain CNN has from none to 11,000 page faults a step, from process to
    process, and one side can have a thousand more than the other. That is up to a tenth of a step, on either.
    """
    try:
        choose = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library; no such thing as the program itself
        return False
    return bool(choose(_TRIM_THRESHOLD, _NEVER) and choose(_MMAP_THRESHOLD, _LARGEST))


def measure(name: str, mode: Mode, *, seconds: float) -> Cost:
    """Alternate blocks of plain and recorded steps, changing which comes first, for about so many seconds."""
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
            # Half of the time nothing is recorded: this way as many steps are written at once as in a training.
            watch._recording._writer._flush_seconds *= 2
            # The first steps are never thinned and every cache is cold: neither is what a training costs.
            for _ in range(_WARM_UP[name]):
                training.step()
            watch.pause()
            plan = _make_plan(training, mode.block_seconds)
            others = time.process_time() - time.thread_time()
            pairs = _time_rounds(training, watch, plan, seconds)
            others = time.process_time() - time.thread_time() - others
    if torch.get_num_threads() == 1:
        pairs = _charge(pairs, plan, others)
    return _summarise(pairs, plan.block)


def _make_plan(training: Training, seconds: float) -> Plan:
    training.step()
    spent = []
    for _ in range(3):
        start = time.process_time()
        training.step()
        spent.append(time.process_time() - start)
    block = max(1, min(_MOST_STEPS, round(seconds / min(spent))))
    return Plan(block, max(1, min(_SETTLING, math.ceil(_SETTLING_SECONDS / min(spent)))))


def _time_rounds(training: Training, watch: clew.Watch, plan: Plan, seconds: float) -> list[Pair]:
    pairs: list[Pair] = []
    end = time.perf_counter() + seconds
    while len(pairs) < _FEWEST_ROUNDS or time.perf_counter() < end:
        # Now and then a step more between: what clew does at every so many steps falls on timed ones and on others.
        turn = plan._replace(settling=plan.settling + len(pairs) // 2 % 2)
        pairs.append(_time_round(training, watch, turn, plain_first=bool(len(pairs) % 2)))
    return pairs


def _time_round(training: Training, watch: clew.Watch, plan: Plan, *, plain_first: bool) -> Pair:
    plain = _time_block(training, plan) if plain_first else None
    watch.resume()
    recorded = _time_block(training, plan, watch)
    watch.pause()
    return plain or _time_block(training, plan), recorded


def _time_block(training: Training, plan: Plan, watch: clew.Watch | None = None) -> Spent:
    """Time steps; of recorded ones also the work that is put off, which is done at last when clew looks away."""
    now = _choose_clock()
    for _ in range(plan.settling):
        training.step()
    wall, marks = time.perf_counter(), [now()]
    for _ in range(plan.block):
        training.step()
        marks.append(now())
    if watch is not None:
        watch._recording.session.recorder.hand_over()
    steps = [after - before for before, after in itertools.pairwise(marks)]
    return Spent(time.perf_counter() - wall, now() - marks[0], steps)


def _choose_clock() -> Callable[[], float]:
    """Return the clock of this thread if the training is all in it: what clew's threads do falls on either side."""
    return time.thread_time if torch.get_num_threads() == 1 else time.process_time


def _charge(pairs: list[Pair], plan: Plan, others: float) -> list[Pair]:
    """Put what other threads have spent on the recorded steps, timed or not: a plain training has no other threads."""
    share = others / len(pairs) * plan.block / (plan.block + plan.settling + 0.5)
    return [(plain, recorded._replace(cpu=recorded.cpu + share)) for plain, recorded in pairs]


def _summarise(pairs: list[Pair], block: int) -> Cost:
    wall = sorted(recorded.wall / plain.wall for plain, recorded in pairs)
    cpu = sorted(recorded.cpu / plain.cpu for plain, recorded in pairs)
    total, error = _compare(pairs)
    return Cost(
        wall=statistics.median(wall),
        wall_quartiles=_quartiles(wall),
        cpu=statistics.median(cpu),
        cpu_quartiles=_quartiles(cpu),
        cpu_total=total,
        cpu_error=error,
        undisturbed=_fast(recorded for _, recorded in pairs) / _fast(plain for plain, _ in pairs),
        plain_ms=1000 * statistics.median(plain.wall for plain, _ in pairs) / block,
        rounds=len(pairs),
        block=block,
    )


def _compare(pairs: list[Pair]) -> tuple[float, float]:
    """Return the ratio of all recorded to all plain time, and its standard error."""
    plain = sum(each.cpu for each, _ in pairs)
    ratio = sum(each.cpu for _, each in pairs) / plain
    left = sum((recorded.cpu - ratio * before.cpu) ** 2 for before, recorded in pairs)
    return ratio, math.sqrt(left * len(pairs) / (len(pairs) - 1)) / plain


def _fast(blocks: Iterable[Spent]) -> float:
    return _quartiles(sorted(step for block in blocks for step in block.steps))[0]


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return low, high
