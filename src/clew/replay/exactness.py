"""Whether an execution equals the recording: losses and hashes of outputs and gradients, compared step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from clew.capture.assemble import (
    DROPPED,
    KIND_SHIFT,
    MODE_MASK,
    MODE_SHIFT,
    ORDINAL_MASK,
    OUTSIDE,
    SITE_SHIFT,
)
from clew.model.schema import KINDS, MODES, STAT_INDEX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.capture.torch.recorder import Recorder
    from clew.query import Run

COMPARED_KINDS: Final = ("batch", "output", "grad_output", "grad", "param")
"""What is compared, besides the losses; updates and buffers follow from these."""

TOLERANCE: Final = 1e-6
_MOST_STEPS: Final = 12
_MERGED_ORDINAL: Final = 15
"""Calls of a module beyond this one are merged into it, so their hash stands for many."""

Key = tuple[str, str, int, str]


@dataclass(frozen=True, slots=True)
class Print:
    """The hash of a tensor with two of its numbers, to tell nearly equal from different."""

    hash: int
    l2: float
    mean: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the recording knows of the steps up to the wanted one: losses of all, hashes of some."""

    losses: dict[int, dict[int, float]]
    prints: dict[int, dict[Key, Print]]

    @property
    def full_steps(self) -> frozenset[int]:
        """The steps of which hashes are known here."""
        return frozenset(self.prints)


def read_recorded(run: Run, step: int, *, rank: int = 0) -> Recorded:
    """Return what there is to compare an execution up to ``step`` with; hashes of the first and the last steps."""
    losses: dict[int, dict[int, float]] = {}
    for label, series in run.scalars("loss", rank=rank).items():
        ordinal = int(label.partition("[")[2].rstrip("]") or 0)
        for at, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            if at <= step:
                losses.setdefault(int(at), {})[ordinal] = float(value)
    return Recorded(losses, _read_prints(run, step, rank=rank))


def _read_prints(run: Run, step: int, *, rank: int) -> dict[int, dict[Key, Print]]:
    flags = run.scalars("clew.recorded", rank=rank).get("clew.recorded")
    full = (
        [int(s) for s, v in zip(flags.steps, flags.values, strict=True) if v and s <= step] if flags else []
    )
    chosen = sorted({*full[:2], *full[-_MOST_STEPS:]})
    return {each: _read_step(run, each, rank=rank) for each in chosen}


def _read_step(run: Run, step: int, *, rank: int) -> dict[Key, Print]:
    table = run.stats(kind=COMPARED_KINDS, step=step, rank=rank, columns=("hash", "l2", "mean"))
    found: dict[Key, Print] = {}
    for row in table:
        if row["ordinal"] < _MERGED_ORDINAL and row["hash"]:
            key = (row["site"], row["kind"], int(row["ordinal"]), row["mode"])
            found.setdefault(key, Print(int(row["hash"]), float(row["l2"]), float(row["mean"])))
    return found


@dataclass(slots=True)
class Comparison:
    """How well the steps compared so far agree; the first difference stays."""

    losses: int = 0
    hashes: int = 0
    is_exact: bool = True
    diverged_at: str = ""
    close_at: str = ""

    @property
    def exactness(self) -> str:
        """``identical``, ``close`` (equal to 1e-6, or nothing but losses to compare), ``diverged`` or ``none``."""
        if self.diverged_at:
            return "diverged"
        if not self.losses and not self.hashes:
            return "none"
        return "identical" if self.is_exact and self.hashes else "close"

    def add_step(self, recorder: Recorder, recorded: Recorded, *, losses: list[float] | None = None) -> None:
        """Compare the step that a recorder is in; ``losses`` are those of a step that has not come to its end."""
        step = recorder.step
        known = recorded.prints.get(step, {})
        seen = set()
        for key, mine in _rows_of(recorder):
            theirs = known.get(key)
            if theirs is None or key in seen:
                continue
            seen.add(key)
            self.hashes += 1
            site, kind = key[0], key[1]
            self._judge(mine.hash == theirs.hash, _is_close(mine, theirs), f"{site} ({kind}) in step {step}")
        self._add_losses(recorder, recorded.losses.get(step, {}), losses)

    def _add_losses(self, recorder: Recorder, known: dict[int, float], partial: list[float] | None) -> None:
        # Where a scaler is at work, the recorder's number is the one without the scale.
        mine = dict(enumerate(partial or ()))
        mine |= {each.ordinal: each.value for each in recorder.scalars if each.name == "loss"}
        for ordinal, value in mine.items():
            if ordinal in known:
                self.losses += 1
                theirs = known[ordinal]
                self._judge(
                    _is_same(value, theirs), _is_near(value, theirs), f"the loss in step {recorder.step}"
                )
        if partial is None and len(mine) != len(known):
            self._judge(False, False, f"the number of losses in step {recorder.step}")

    def _judge(self, is_same: bool, is_close: bool, where: str) -> None:
        if is_same:
            return
        self.is_exact = False
        if not is_close:
            self.diverged_at = self.diverged_at or where
        else:
            self.close_at = self.close_at or where


def _rows_of(recorder: Recorder) -> Iterator[tuple[Key, Print]]:
    """Yield what a recorder has measured in the present step, in order of execution."""
    recorder.rows.settle()
    rows, copies = recorder.rows, dict(recorder.copies)
    if rows.hashes is None:
        return
    for row, packed in enumerate(recorder.keys):
        # Gradients that no optimizer uses are cleared by nobody and part of no snapshot: nothing depends on them.
        if packed == DROPPED or packed & OUTSIDE:
            continue
        source: Any = copies.get(row, row)
        key = (
            recorder.sites[packed >> SITE_SHIFT].name,
            KINDS[packed >> KIND_SHIFT & 0xFF],
            packed & ORDINAL_MASK,
            MODES[packed >> MODE_SHIFT & MODE_MASK],
        )
        values = rows.values[source]
        yield (
            key,
            Print(
                int(rows.hashes[source]), float(values[STAT_INDEX["l2"]]), float(values[STAT_INDEX["mean"]])
            ),
        )


def _is_close(mine: Print, theirs: Print) -> bool:
    return _is_near(mine.l2, theirs.l2) and _is_near(mine.mean, theirs.mean, scale=theirs.l2)


def _is_same(mine: float, theirs: float) -> bool:
    return mine == theirs or (math.isnan(mine) and math.isnan(theirs))


def _is_near(mine: float, theirs: float, *, scale: float = 0.0) -> bool:
    if _is_same(mine, theirs):
        return True
    return abs(mine - theirs) <= TOLERANCE * max(abs(theirs), abs(scale))
