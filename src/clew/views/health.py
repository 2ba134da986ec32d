"""How each site of a run is doing, worst first, from a few steps: the first, the last calm one, the trouble.

A long run is not read through: the store finds the first NaN or infinity by its indexes, and whole steps are
read at three places only. What grows or dies in between and recovers is not seen here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.model.mask import is_mask
from clew.query.turn import find_turns
from clew.views.number import format_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.model.record import Site
    from clew.query import Run, Table

    Row = dict[str, Any]

NONFINITE, EXPLODING, ZERO, DEAD, ORDINARY = range(5)
GROWTH: Final = 1000.0
"""Largest magnitude over that of the first step from which a site counts as exploding, once it is above 1."""
DEAD_SHARE: Final = 0.98
"""Share of zeros in an output from which it counts as dead."""
_STEPS_OF_TROUBLE: Final = 3
_GROWING_KINDS: Final = ("output", "grad_output", "param", "grad", "update")
_LIVING_KINDS: Final = ("output", "grad_output", "grad", "update")


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong at a site: how bad, in words, and the record that shows it."""

    severity: int
    words: str
    step: int
    sequence: int
    site: str
    kind: str


@dataclass(frozen=True, slots=True)
class SiteHealth:
    """A module (or batch, or loss) with its worst trouble and the numbers of the last calm step."""

    site: Site
    trouble: Trouble | None
    output_std: float | None = None
    grad_l2: float | None = None
    param_l2: float | None = None
    update_ratio: float | None = None

    @property
    def severity(self) -> int:
        """How bad it is: ``NONFINITE`` is worst, ``ORDINARY`` is none."""
        return ORDINARY if self.trouble is None else self.trouble.severity


@dataclass(frozen=True, slots=True)
class Examination:
    """Every site that has numbers, worst first, ordinary ones in order of execution.

    ``steps`` are the steps of the numbers: the newest one, or the last before anything was NaN or infinite; where
    optimizers take turns, the newest of each.
    """

    sites: tuple[SiteHealth, ...] = ()
    steps: tuple[int, ...] = ()
    is_newest: bool = True
    kept_steps: tuple[int, ...] = ()
    """The older steps that weights were last read in which no optimizer holds: they are read when they change."""

    @property
    def first_nonfinite(self) -> Trouble | None:
        """The first NaN or infinity in order of execution."""
        return next((health.trouble for health in self.sites if health.severity == NONFINITE), None)


def examine(run: Run) -> Examination:
    """Return how the sites of a run are doing."""
    sites = {site.name: site for site in run.sites}
    by_number = {site.id: site for site in run.sites}
    tables = _read_tables(run)
    if tables is None:
        return Examination()
    first, calm, storm = tables
    worst: dict[str, Trouble] = {}
    for trouble in (
        *(() if storm is None else _find_nonfinite(storm, sites)),
        *_find_exploding(first, calm),
        *_find_lifeless(calm),
    ):
        home = _home(sites[trouble.site], by_number).name
        if home not in worst or _urgency(trouble) < _urgency(worst[home]):
            worst[home] = trouble
    steps = tuple(sorted({row["step"] for row in calm}))
    kept = _read_kept_weights(run, calm, last=max(steps, default=-1))
    numbers = _read_numbers([*calm, *kept], sites, by_number)
    found = [
        SiteHealth(sites[name], worst.get(name), **numbers.get(name, {})) for name in {**numbers, **worst}
    ]
    kept_steps = tuple(sorted({row["step"] for row in kept}))
    return Examination(tuple(sorted(found, key=_rank)), steps, is_newest=storm is None, kept_steps=kept_steps)


def _read_tables(run: Run) -> tuple[list[Row], list[Row], Table | None] | None:
    recorded = recorded_steps(run)
    if not len(recorded):
        return None
    bad = run.first_nonfinite(masks=False)
    trouble = len(recorded) if bad is None else int(np.searchsorted(recorded, bad["step"]))
    turns = [np.intersect1d(recorded, turn.steps) for turn in find_turns(run, rank=run.ranks[0])]
    calm = recorded[: max(trouble, 1)]
    newest = {int(calm[-1]), *(int(each[-1]) for steps in turns if len(each := np.intersect1d(calm, steps)))}
    oldest = {int(recorded[0]), *(int(steps[0]) for steps in turns if len(steps))}
    storm = None if bad is None else run.stats(step=slice(bad["step"], bad["step"] + _STEPS_OF_TROUBLE))
    return _read_rows(run, sorted(oldest, reverse=True)), _read_rows(run, sorted(newest)), storm


def _read_rows(run: Run, steps: list[int]) -> list[Row]:
    """Return the rows of some steps; of each site, kind and mode those of the last step that has any."""
    tables = [list(run.stats(step=step)) for step in steps]
    kept = {_series(row): step for step, rows in enumerate(tables) for row in rows}
    return [row for step, rows in enumerate(tables) for row in rows if kept[_series(row)] == step]


def _series(row: Row) -> tuple[Any, ...]:
    return row["rank"], row["site"], row["kind"], row["mode"]


def _read_kept_weights(run: Run, rows: list[Row], *, last: int) -> list[Row]:
    """Return the newest rows of the weights that no optimizer holds, where they are older than the others."""
    there = {row["site"] for row in rows if row["kind"] == "param"} | {
        site.name for site in run.find(kind="update")
    }
    kept = [site for site in run.find(kind="param", role="parameter") if site.name not in there]
    if not kept:
        return []
    table = run.stats(kept, "param", step=slice(None, last + 1))
    return list({(row["rank"], row["site"]): row for row in table}.values())


def recorded_steps(run: Run) -> Any:
    """Return the steps that were recorded in full; the others have scalars only."""
    marks = run.scalars("clew.recorded").get("clew.recorded")
    recorded = run.steps if marks is None else marks.steps[marks.values > 0]
    ended = np.intersect1d(recorded, run.ended_steps)
    return ended if len(ended) else recorded


def _find_nonfinite(table: Table, sites: dict[str, Site]) -> Iterator[Trouble]:
    bad = table["nan"] + table["pos_inf"] + table["neg_inf"] > 0
    for row in table.take(np.flatnonzero(bad)):
        if not is_mask(row["kind"], row, sites.get(row["site"])):
            yield _trouble(row, NONFINITE, "NaN" if row["nan"] else "inf")


def _find_exploding(first: list[Row], calm: list[Row]) -> Iterator[Trouble]:
    before = {_key(row): row["abs_max"] for row in first if row["kind"] in _GROWING_KINDS}
    for row in calm:
        start = before.get(_key(row))
        if start and row["abs_max"] > 1 and row["abs_max"] > GROWTH * start:
            yield _trouble(row, EXPLODING, f"exploding {format_number(row['abs_max'] / start)}×")


def _find_lifeless(rows: list[Row]) -> Iterator[Trouble]:
    for row in rows:
        share = row["zero"] / row["count"] if row["count"] else 0.0
        if share == 1 and row["kind"] in _LIVING_KINDS:
            yield _trouble(row, ZERO, "all zero")
        elif share >= DEAD_SHARE and row["kind"] == "output":
            yield _trouble(row, DEAD, f"dead, {100 * share:.0f} % zero")


def _trouble(row: dict[str, Any], severity: int, words: str) -> Trouble:
    return Trouble(severity, words, int(row["step"]), int(row["seq"]), row["site"], row["kind"])


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*_series(row), row["ordinal"])


def _urgency(trouble: Trouble) -> tuple[int, int, int]:
    return trouble.severity, trouble.step, trouble.sequence


def _rank(health: SiteHealth) -> tuple[int, int, int, int]:
    urgency = (ORDINARY, 0, 0) if health.trouble is None else _urgency(health.trouble)
    return (*urgency, health.site.order if health.site.order >= 0 else 1 << 30)


def _home(site: Site, by_number: dict[int, Site]) -> Site:
    """Return the module that a parameter, buffer or leaf belongs to; any other site is its own home."""
    while site.role in ("parameter", "buffer", "leaf") and site.parent in by_number:
        site = by_number[site.parent]
    return site


def _read_numbers(
    rows: list[Row], sites: dict[str, Site], by_number: dict[int, Site]
) -> dict[str, dict[str, float | None]]:
    """Return the numbers of each home; the parameters of a module count as one tensor."""
    squares: dict[str, dict[str, float]] = {}
    moved = {row["site"] for row in rows if row["kind"] == "update"}
    spread: dict[str, float] = {}
    homes = {name: _home(site, by_number).name for name, site in sites.items()}
    for row in sorted(rows, key=lambda row: row["mode"] == "eval"):  # training comes before evaluation
        home, kind = homes[row["site"]], row["kind"]
        if kind == "output":  # of several, say those of a recurrent net, the first
            spread.setdefault(home, row["std"])
        if kind in ("param", "grad", "update"):
            sums = squares.setdefault(home, {})
            sums[kind] = sums.get(kind, 0.0) + _square(row)
            if kind == "param" and row["site"] in moved:  # an update is held against what it moves
                sums["moved"] = sums.get("moved", 0.0) + _square(row)
        squares.setdefault(home, {})
    return {home: _describe(spread.get(home), sums) for home, sums in squares.items()}


def _square(row: dict[str, Any]) -> float:
    # The norm of a tensor is over its finite elements; one that has others has no norm to speak of.
    if row["nan"] or row["pos_inf"] or row["neg_inf"]:
        return float("nan")
    return float(row["l2"]) ** 2


def _describe(output_std: float | None, sums: dict[str, float]) -> dict[str, float | None]:
    norms = {kind: float(np.sqrt(value)) for kind, value in sums.items()}
    moved, update = norms.get("moved"), norms.get("update")
    return {
        "output_std": output_std,
        "grad_l2": norms.get("grad"),
        "param_l2": norms.get("param"),
        "update_ratio": update / moved if update is not None and moved else None,
    }
