"""The few numbers a list of runs needs, kept next to the tables so that nobody has to open them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from clew.model.record import Stretch
from clew.store import layout, typed

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from clew.model.record import StepRecord


_PARTIAL: Final = ("clew.partial", 0)


@dataclass(slots=True)
class Summary:
    """How far a rank has come: steps that ended, those with statistics, the last with a record, rows, the last loss."""

    steps: int = 0
    full: int = 0
    first_step: int = -1
    last_step: int = -1
    rows: int = 0
    loss: float | None = None

    def add(self, records: Iterable[StepRecord | Stretch], *, with_rows: bool = True) -> None:
        """Count more steps, which were written with their statistics or without."""
        for record in records:
            if isinstance(record, Stretch):
                self._add_stretch(record, with_rows=with_rows)
                continue
            is_partial = is_full = False
            for name, value, _ in record.scalars:
                if name == "loss":
                    self.loss = float(value)
                elif name == "clew.partial":
                    is_partial = True
                elif name == "clew.recorded":
                    is_full = with_rows and bool(value)
            is_step = record.step != self.last_step and not is_partial
            self.steps += is_step
            self.full += is_step and is_full
            self.first_step = record.step if self.first_step < 0 else self.first_step
            self.last_step = record.step
            self.rows += len(record.sites) if with_rows else 0

    def _add_stretch(self, stretch: Stretch, *, with_rows: bool) -> None:
        losses = {
            (int(steps[-1]), ordinal): float(values[-1])
            for (name, ordinal), (steps, values) in stretch.columns.items()
            if name == "loss"
        }
        if losses:
            self.loss = losses[max(losses)]
        partial = len(stretch.columns[_PARTIAL][0]) if _PARTIAL in stretch.columns else 0
        steps = stretch.steps - partial - (stretch.first == self.last_step)
        self.steps += steps
        if with_rows and stretch.rows is not None:
            self.full += steps
            self.rows += stretch.steps * len(stretch.rows.sites)
        self.first_step = stretch.first if self.first_step < 0 else self.first_step
        self.last_step = stretch.last


def read_summary(folder: Path, rank: int) -> Summary:
    """Read the summary of a rank; an empty one when there is none or it is damaged."""
    path = layout.rank_folder(folder, rank) / layout.SUMMARY
    try:
        return typed.make(Summary, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Summary()
