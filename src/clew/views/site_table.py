"""The statistics of chosen sites, kinds and steps, as a table, and as curves where there are few of them."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.errors import UsageError, suggest
from clew.model.schema import COUNT_STATS, STAT_NAMES
from clew.views.block import Block, Cell, Column, Heading, Page, Table
from clew.views.curve import thin
from clew.views.health import recorded_steps
from clew.views.number import format_integer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clew.query import Run
    from clew.query import Table as Rows

DEFAULT_STATS: Final = ("count", "nan", "inf", "zero", "min", "max", "mean", "std", "l2")
"""``inf`` is the sum of both infinities: in a table one looks for trouble, and for its sign afterwards."""
MOST_ROWS: Final = 50
MOST_CURVES: Final = 4
_KEYS: Final = ("rank", "step", "site", "kind", "ordinal", "mode")
_MOST_NAMES: Final = 8
_DROPS: Final = {"count": 8, "zero": 7, "std": 6, "min": 5, "max": 4, "mean": 3, "inf": 2, "nan": 1}
_TROUBLE: Final = ("nan", "inf", "pos_inf", "neg_inf")


def make_page(
    run: Run,
    *,
    site: str | None = None,
    kind: Sequence[str] | None = None,
    step: Any = None,
    rank: int | None = None,
    stats: Sequence[str] | None = None,
    limit: int = MOST_ROWS,
) -> Page:
    """Return the rows that fit; without ``step`` those of the newest step, and curves over all when there are few.

    Of a site that has none there, those of the newest step that it has any in.

    ``limit`` rows are shown, the newest ones; 0 shows all.
    """
    shown = tuple(stats or DEFAULT_STATS)
    _check_stats(shown)
    blocks: list[Block] = [Heading(f"run {run.name}", 1)]
    if stats and step is None:
        blocks += _draw_curves(run, run.stats(site, kind, rank=rank, columns=_sources(shown)), shown)
    rows = run.stats(site, kind, step="latest" if step is None else step, rank=rank, columns=_sources(shown))
    if step is None and site is not None and not len(rows):  # a frozen weight is not read at every step
        steps = run.stats(site, kind, rank=rank, columns=["count"])["step"]
        newest = int(steps[-1]) if len(steps) else None
        rows = run.stats(site, kind, step=newest, rank=rank, columns=_sources(shown))
    empty = "" if len(rows) else _say_empty(run, site, kind)
    blocks.append(_make_table(run, rows, shown, limit=limit, empty=empty))
    return Page(f"statistics of run {run.name}", tuple(blocks))


def _check_stats(stats: Sequence[str]) -> None:
    known = (*STAT_NAMES, "inf")
    for stat in stats:
        if stat not in known:
            raise UsageError(
                f"unknown stat '{stat}'", next_step=suggest(stat, known) or f"stats: {', '.join(known)}"
            )


def _sources(stats: Sequence[str]) -> list[str]:
    found = [name for stat in stats for name in (("pos_inf", "neg_inf") if stat == "inf" else (stat,))]
    return list(dict.fromkeys(found))


def _values(rows: Rows, stat: str) -> Any:
    return rows["pos_inf"] + rows["neg_inf"] if stat == "inf" else rows[stat]


def _draw_curves(run: Run, rows: Rows, stats: Sequence[str]) -> list[Block]:
    """Return one curve for each series, or none where there are too many or too short ones."""
    keys = np.stack([rows.codes(name) for name in ("rank", "site", "kind", "ordinal", "mode")])
    series, which = np.unique(keys, axis=1, return_inverse=True)
    count = series.shape[1] * len(stats)
    if not count or count > MOST_CURVES:
        return []
    blocks: list[Block] = []
    for number in range(series.shape[1]):
        chosen = rows.take(np.flatnonzero(which.reshape(-1) == number))
        name = " ".join(_name_series(run, chosen.row(0)))
        blocks += [
            thin(f"{name} {stat}", chosen["step"].tolist(), _values(chosen, stat).tolist()) for stat in stats
        ]
    return blocks


def _name_series(run: Run, row: dict[str, Any]) -> list[str]:
    name = [row["site"], row["kind"]]
    name += [f"call {row['ordinal']}"] if row["ordinal"] else []
    name += ["in evaluation"] if row["mode"] == "eval" else []
    return name + ([f"rank {row['rank']}"] if len(run.ranks) > 1 else [])


def _make_table(run: Run, rows: Rows, stats: Sequence[str], *, limit: int, empty: str) -> Table:
    total = len(rows)
    if limit and total > limit:
        rows = rows.take(np.arange(total - limit, total))
    keys = [key for key in _KEYS if _is_telling(rows, key)]
    columns = [Column(key, _TITLES.get(key, key), _key_format(key), flexible=key == "site") for key in keys]
    columns += [
        Column(stat, stat, "integer" if stat in (*COUNT_STATS, "inf") else "number", drop=_DROPS.get(stat, 0))
        for stat in stats
    ]
    lists = [rows[key].tolist() for key in keys] + [_values(rows, stat).tolist() for stat in stats]
    names = [*keys, *stats]
    cells = tuple(
        tuple(Cell(value, _tone(name, value)) for name, value in zip(names, row, strict=True))
        for row in zip(*lists, strict=True)
    )
    return Table(tuple(columns), cells, empty=empty, note=_note(run, total, len(rows)))


_TITLES: Final = {"ordinal": "call"}


def _is_telling(rows: Rows, key: str) -> bool:
    """Whether a key tells rows apart; step, site and kind always say what a row is."""
    return key in ("step", "site", "kind") or bool(rows.codes(key).any())


def _key_format(key: str) -> str:
    return "integer" if key in ("step", "rank", "ordinal") else "text"


def _tone(name: str, value: Any) -> str:
    if name in _TROUBLE:
        return "bad" if value else "quiet"
    return "bad" if isinstance(value, float) and not np.isfinite(value) else "plain"


def _say_empty(run: Run, site: str | None, kind: Sequence[str] | None) -> str:
    """Say what there would be: other kinds, parts of an output, or other steps than those asked for."""
    full = recorded_steps(run)
    if not len(full):
        return "no statistics were recorded"
    first, last = int(full[0]), int(full[-1])
    if not len(run.stats(site, kind, step=last, columns=["count"])):
        parts = _join_some([each.name for each in run.sites if each.name.startswith(f"{site}[")])
        if parts:
            return f"no statistics fit; what {site} gives has parts: {parts}"
        kinds = _join_some(run.stats(site, step=last, columns=["count"])["kind"].tolist())
        if kinds and kind:
            return f"no statistics fit; at step {format_integer(last)} there are these kinds: {kinds}"
    return (
        f"no statistics fit; the run has {format_integer(len(full))} steps with statistics, from step "
        f"{format_integer(first)} to {format_integer(last)}"
    )


def _join_some(names: list[str]) -> str:
    """Return the different names, the first few of very many."""
    found = list(dict.fromkeys(names))
    more = [f"and {len(found) - _MOST_NAMES} more"] if len(found) > _MOST_NAMES else []
    return ", ".join([*found[:_MOST_NAMES], *more])


def _note(run: Run, total: int, shown: int) -> str:
    if shown == total:
        return ""
    return (
        f"the last {format_integer(shown)} of {format_integer(total)} rows; --limit 0 shows all, "
        f"clew export {shlex.quote(run.name)} writes them"
    )
