"""A run in TensorBoard's files: its numbers, statistics and histograms."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.errors import UsageError
from clew.query.times import passed_at
from clew.render.tensorboard import EventFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from clew.model.record import Site
    from clew.query import Run

STATS: Final = ("mean", "std", "l2")
"""What is written of each site and kind; NaN and infinities are counted where there are any."""
_NUMBERS: Final = ("min", "max", "mean", "l2", "zero", "count", "nan", "pos_inf", "neg_inf")


def write_run(
    run: Run,
    folder: Path | str,
    *,
    site: str | None = None,
    kind: list[str] | None = None,
    steps: list[int] | None = None,
    rank: int | None = None,
) -> int:
    """Write a run as an event file for each rank and return how many values were written."""
    ranks = run.ranks if rank is None else [rank]
    wanted = np.array(run.steps if steps is None else steps, np.int64)
    written = 0
    for each in ranks:
        target = f"{folder}/rank{each}" if len(ranks) > 1 else folder
        with EventFile(target) as file:
            writer = _RankWriter(run, file, each, wanted)
            written += writer.write_scalars() if site is None and kind is None else 0
            written += writer.write_sites(site or "*", kind)
    return written


class _RankWriter:
    """Writes what one rank recorded."""

    def __init__(
        self, run: Run, file: EventFile, rank: int, steps: np.ndarray[Any, np.dtype[np.int64]]
    ) -> None:
        self._run = run
        self._file = file
        self._rank = rank
        self._steps = steps
        began = _parse_time(run.info.started)
        passed = passed_at(run, steps, rank=rank)
        self._times = {step: began + seconds for step, seconds in passed}
        self._began = began

    def write_scalars(self) -> int:
        """Write every number of the steps."""
        count = 0
        for name, series in self._run.scalars(rank=self._rank).items():
            for step, value in self._inside(series.steps, series.values):
                self._file.add_scalar(name, value, step=step, time=self._time(step))
                count += 1
        return count

    def write_sites(self, pattern: str, kinds: list[str] | None) -> int:
        """Write statistics of each site and kind, and histograms where they were recorded."""
        count = 0
        found = self._run.find(pattern)
        if not found:
            raise UsageError(
                f"no site '{pattern}'", where=self._run.name, next_step="clew show lists the sites"
            )
        for site in found:
            for kind in self._run.kinds(site):
                if kinds is None or kind in kinds:
                    count += self._write_kind(site, kind)
        return count

    def _write_kind(self, site: Site, kind: str) -> int:
        count = 0
        for stat in STATS:
            series = self._run.series(site, kind, stat, rank=self._rank)
            for step, value in self._inside(series.steps, series.values):
                self._file.add_scalar(f"{kind} {stat}/{site.name}", value, step=step, time=self._time(step))
                count += 1
        nonfinite = self._nonfinite(site, kind)
        for step, value in nonfinite:
            self._file.add_scalar(f"{kind} nonfinite/{site.name}", value, step=step, time=self._time(step))
        return count + len(nonfinite) + self._write_histograms(site, kind)

    def _nonfinite(self, site: Site, kind: str) -> list[tuple[int, float]]:
        """Return the counts of elements that are not finite, nothing when there never were any."""
        series = [
            self._run.series(site, kind, stat, rank=self._rank) for stat in ("nan", "pos_inf", "neg_inf")
        ]
        total = np.asarray(sum(each.values for each in series), np.float64)
        return list(self._inside(series[0].steps, total)) if total.any() else []

    def _write_histograms(self, site: Site, kind: str) -> int:
        if site.role == "module" and kind in ("param", "grad", "update", "state"):
            return 0
        steps, counts = self._run.histograms(site, kind, rank=self._rank)
        if not len(steps):
            return 0
        columns = {name: self._run.series(site, kind, name, rank=self._rank) for name in _NUMBERS}
        at = np.searchsorted(columns["min"].steps, steps)
        wanted, count = set(self._steps.tolist()), 0
        for row, (step, place) in enumerate(zip(steps.tolist(), at.tolist(), strict=True)):
            if step not in wanted:
                continue
            numbers = {name: float(series.values[place]) for name, series in columns.items()}
            numbers["finite"] = numbers["count"] - numbers["nan"] - numbers["pos_inf"] - numbers["neg_inf"]
            if numbers["finite"]:
                name = f"{kind}/{site.name}"
                self._file.add_histogram(name, counts[row], numbers, step=step, time=self._time(step))
                count += 1
        return count

    def _inside(
        self, steps: np.ndarray[Any, np.dtype[np.int64]], values: np.ndarray[Any, np.dtype[np.float64]]
    ) -> Iterator[tuple[int, float]]:
        inside = np.isin(steps, self._steps)
        return zip(steps[inside].tolist(), values[inside].tolist(), strict=True)

    def _time(self, step: int) -> float:
        return self._times.get(step, self._began)


def _parse_time(text: str) -> float:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
