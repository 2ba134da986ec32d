"""Time and memory: waiting for data, memory that grows, code compiled again and again, fewer steps than planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from clew.doctor.measure import round_number
from clew.doctor.rule import Found, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from clew.doctor.case import Case

_NOT_HELD: Final = ("memory.process_peak", "memory.kept")
"""What was held once, and what clew itself holds."""

_WORTH_SECONDS: Final = 1.0
"""Waiting of a whole run that is worth a word."""

_MOST_WAITING: Final = 0.6
"""Healthy loaders without workers were seen to take up to 0.55 of a small model's time."""

_PHASES: Final = ("rest", "data", "forward", "eval", "backward", "optimizer")


@rule(
    "T01",
    "input-bound",
    severity="warning",
    watches="time.data against the time of a step",
    threshold="over 60 % of the time of 50 steps is waiting for the loader: 5 ms of the median step and 1 s in all",
    silent="small data costs less than 5 ms, a short run has nothing to win; loaders without workers take up to half",
    hint="give the DataLoader workers (num_workers, prefetch_factor, pin_memory), or make __getitem__ cheaper",
    needs=("scalar:time.data", "steps:50"),
)
def input_bound(case: Case) -> Iterator[Found]:
    """Training waits for data most of the time."""
    data = case.scalar("time.data")
    whole = np.zeros(len(data))
    for phase in _PHASES:
        values = case.scalar(f"time.{phase}").values
        if len(values) == len(whole):
            whole += values
    recent = slice(-max(50, len(data) // 2), None)
    share = float(data.values[recent].sum() / max(whole[recent].sum(), 1e-12))
    typical = float(np.median(data.values[recent]))
    if (
        len(data) >= 50
        and share > _MOST_WAITING
        and typical > 0.005
        and float(data.values.sum()) > _WORTH_SECONDS
        and typical > _MOST_WAITING * float(np.median(whole[recent]))
    ):
        yield Found(
            int(data.steps[recent][0]),
            evidence={"share_of_time": round_number(share), "median_wait_seconds": round_number(typical)},
        )


@rule(
    "T03",
    "memory-grows",
    severity="warning",
    watches="memory of the process and of the devices",
    threshold="a steady climb over the steps, over 64 MB and 10 % in all, in the second half as in the first",
    silent="caches fill and then stay",
    hint="something keeps tensors from step to step: add loss.item() instead of loss, detach what you collect",
    needs=("scalar:memory.process", "steps:30"),
)
def memory_grows(case: Case) -> Iterator[Found]:
    """Memory grows with every step."""
    for name, series in case.scalars.items():
        if not name.startswith("memory.") or name.endswith("_reserved") or name in _NOT_HELD:
            continue
        late = series.steps >= 10
        steps, values = series.steps[late], series.values[late]
        if name == "memory.process":
            values = values - _kept_by_clew(case, steps)
        # What a function held is free again when it returns: the climb ends at its highest point.
        top = int(np.argmax(values)) + 1 if len(values) else 0
        if top > 0.8 * len(values):
            steps, values = steps[:top], values[:top]
        if len(steps) < 6 or steps[-1] - steps[0] < 20:
            continue
        growth = float(values[-1] - values[0])
        halves = values[len(values) // 2]
        if growth < max(64e6, 0.1 * values[0]) or values[-1] - halves < 0.3 * growth:
            continue
        slope, start = np.polyfit(steps, values, 1)
        rest = values - (slope * steps + start)
        is_straight = float(rest.var()) < 0.05 * float(values.var())
        if is_straight and (np.diff(values) >= -0.02 * growth).all():
            yield Found(
                int(steps[0]),
                evidence={"memory": name, "bytes_a_step": round_number(float(slope)), "growth_bytes": growth},
            )
            return


def _kept_by_clew(case: Case, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the bytes of the batches that clew holds on to for replays, at each of some steps."""
    kept = case.scalars.get("memory.kept")
    if kept is None or not len(kept.steps):
        return np.zeros(len(steps))
    at = np.maximum(np.searchsorted(kept.steps, steps, side="right") - 1, 0)
    return np.asarray(kept.values[at], np.float64)


@rule(
    "T04",
    "recompiles",
    severity="warning",
    watches="graphs that torch.compile has made",
    threshold="new graphs in 4 steps after the first two",
    silent="a second shape makes one more graph, and then it is dynamic",
    hint="something in the code changes every step (a shape, a number, a list): mark it dynamic or keep it outside",
    needs=("probe:evaluation", "note:compiled"),
)
def recompiles(case: Case) -> Iterator[Found]:
    """torch.compile compiles again and again."""
    notes = case.noted("compiled")
    later = [note for note in notes if note["step"] > notes[0]["step"] + 1]
    if len({note["step"] for note in later}) >= 4:
        yield Found(
            int(later[0]["step"]),
            evidence={"steps": len(later), "graphs": notes[-1]["graphs"], "last_step": later[-1]["step"]},
        )


@rule(
    "P04",
    "too-few-steps",
    severity="warning",
    watches="the number of steps against the number that was planned",
    threshold="a run that ended by itself with under 90 % of the steps logged as expected_steps",
    silent="only a number that the user declares counts",
    hint="check epochs × len(loader) // accumulation, drop_last and early exits of the loop",
    needs=("scalar:expected_steps",),
)
def too_few_steps(case: Case) -> Iterator[Found]:
    """The run had fewer steps than planned."""
    planned = float(case.scalar("expected_steps").values[-1])
    if case.ended and not case.died and case.steps < 0.9 * planned:
        yield Found(case.step, evidence={"steps": case.steps, "expected_steps": planned})
