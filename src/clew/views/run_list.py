"""The list of runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol

from clew.views.block import Block, Callout, Cell, Column, Page, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

STATE_TONES: Final = {"recording": "good", "complete": "plain", "died": "bad", "unknown": "warn"}

COLUMNS: Final = (
    Column("name", "name", flexible=True),
    Column("state", "state"),
    Column("steps", "steps", "integer"),
    Column("loss", "last loss", "number"),
    Column("size_bytes", "size", "bytes", drop=1),
    Column("started", "started", "time", drop=2),
)


class Listed(Protocol):
    """What the list needs to know of a run."""

    @property
    def name(self) -> str:
        """The name of its folder."""

    @property
    def state(self) -> str:
        """``recording``, ``complete``, ``died`` or ``unknown``."""

    @property
    def steps(self) -> int:
        """How many steps it has."""

    @property
    def loss(self) -> float | None:
        """The last loss, if there was any."""

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""

    @property
    def started(self) -> str:
        """When it began, as an ISO time."""

    @property
    def problem(self) -> str:
        """What is wrong with the record, or nothing."""


def make_page(runs: Sequence[Listed], *, root: str) -> Page:
    """Return the runs in the order given, and what is wrong with some of them."""
    table = Table(
        COLUMNS,
        tuple(_row(run) for run in runs),
        empty=f"no runs in {root}; record one with: clew run train.py",
    )
    broken = [run for run in runs if run.problem]
    warnings: list[Block] = [
        Callout("warning", f"{run.name}: {shorten_problem(run.problem)}") for run in broken
    ]
    return Page("runs", (table, *warnings))


def _row(run: Listed) -> tuple[Cell, ...]:
    return (
        Cell(run.name),
        Cell(run.state, STATE_TONES.get(run.state, "plain")),
        Cell(run.steps),
        Cell(run.loss, "plain" if run.loss is None or math.isfinite(run.loss) else "bad"),
        Cell(run.size_bytes),
        Cell(run.started or None),
    )


def shorten_problem(text: str) -> str:
    """Return the first and the last line of a problem: what happened, and the error at the end of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " … ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else ""
