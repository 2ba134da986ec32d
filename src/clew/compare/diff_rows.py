"""The rows of two runs that stand for one tensor, as columns side by side, and how far they are apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.compare.diff_parts import join_parts
from clew.compare.tolerance import MAX_ERROR_FACTOR
from clew.model.schema import KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clew.compare.diff_sides import Sides
    from clew.query import Run, Table

KEYS: Final = ("step", "rank", "kind", "ordinal", "mode")
STATS: Final = (
    "count",
    "nan",
    "pos_inf",
    "neg_inf",
    "zero",
    "min",
    "max",
    "mean",
    "std",
    "abs_mean",
    "abs_max",
    "l2",
)

Columns = dict[str, "NDArray[Any]"]


@dataclass(slots=True)
class Rows:
    """Rows that both runs have, and in ``lone_a`` and ``lone_b`` those of steps of both that only one has.

    Columns: ``step rank kind ordinal mode pair seq seq_b hash_a hash_b``; ``a`` and ``b`` hold statistics if asked.
    """

    columns: Columns
    lone_a: Columns
    lone_b: Columns
    a: Columns = field(default_factory=dict)
    b: Columns = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def of_rank(self, rank: int) -> Rows:
        """Return the rows of one rank: only they have one order of execution."""
        chosen = self.columns["rank"] == rank
        lone = [_take(each, each["rank"] == rank) for each in (self.lone_a, self.lone_b)]
        return Rows(
            _take(self.columns, chosen), lone[0], lone[1], _take(self.a, chosen), _take(self.b, chosen)
        )

    def is_kind(self, *kinds: str) -> NDArray[np.bool_]:
        """Return which rows are of one of the kinds."""
        return np.isin(self.columns["kind"], [KINDS.index(kind) for kind in kinds])


def _take(columns: Columns, rows: NDArray[np.bool_]) -> Columns:
    return {name: column[rows] for name, column in columns.items()}


def match_rows(sides: Sides, *, step: int | None = None, with_stats: bool = False) -> Rows:
    """Return the rows of both runs side by side, in the order of the first."""
    wanted = ("hash", *(STATS if with_stats else ()))
    a = join_parts(_read(sides.a, sides.pair_of_a, step, wanted), sides.pairs, side="a")
    b = join_parts(_read(sides.b, sides.pair_of_b, step, wanted), sides.pairs, side="b")
    if sides.is_by_hand:
        # Arrays have no mode: they stand for whatever the other run did.
        a["mode"], b["mode"] = np.zeros_like(a["mode"]), np.zeros_like(b["mode"])
    key_a, key_b = _key(a, len(sides.pairs)), _key(b, len(sides.pairs))
    rows_a, rows_b = _meet(key_a, key_b)
    columns = {name: a[name][rows_a] for name in (*KEYS, "pair", "seq", "site")}
    columns |= {"seq_b": b["seq"][rows_b], "hash_a": a["hash"][rows_a], "hash_b": b["hash"][rows_b]}
    return Rows(
        columns,
        _lone(a, rows_a, b),
        _lone(b, rows_b, a),
        {name: a[name][rows_a] for name in STATS} if with_stats else {},
        {name: b[name][rows_b] for name in STATS} if with_stats else {},
    )


def _read(run: Run, pair_of: NDArray[np.int64], step: int | None, wanted: tuple[str, ...]) -> Columns:
    table: Table = run.stats(step=step, columns=wanted)
    found = {name: table.codes(name) for name in (*KEYS, "seq", "site", *wanted)}
    found["pair"] = pair_of[found["site"]] if len(pair_of) else found["site"]
    return found


def _key(rows: Columns, pairs: int) -> NDArray[np.int64]:
    """Return one number per row: step, rank, pair, kind, ordinal and mode side by side; -1 for no pair."""
    key = rows["step"].astype(np.int64)
    for name, size in (("rank", 1 << 10), ("pair", pairs + 1), ("kind", 16), ("ordinal", 64), ("mode", 2)):
        key = key * size + rows[name]
    return np.where(rows["pair"] < 0, -1, key)


def _meet(a: NDArray[np.int64], b: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row numbers of equal keys, in the order of the first side."""
    if len(a) == len(b) and np.array_equal(a, b) and (not len(a) or a.min() >= 0):
        every = np.arange(len(a))
        return every, every
    known_a, known_b = np.flatnonzero(a >= 0), np.flatnonzero(b >= 0)
    _, first, second = np.intersect1d(a[known_a], b[known_b], return_indices=True)
    rows_a, rows_b = known_a[first], known_b[second]
    order = np.argsort(rows_a)
    return rows_a[order], rows_b[order]


def _lone(rows: Columns, taken: NDArray[np.int64], other: Columns) -> Columns:
    """Return the rows without a partner, of steps and kinds that the other side has too."""
    alone = np.ones(len(rows["step"]), bool)
    alone[taken] = False
    alone &= np.isin(rows["step"], np.unique(other["step"])) & np.isin(rows["kind"], np.unique(other["kind"]))
    return {name: rows[name][alone] for name in (*KEYS, "seq", "site", "pair", "hash")}


def relative_errors(rows: Rows) -> NDArray[np.float64]:
    """Return how far the statistics of each row are apart, relative to the size of the tensor.

    Means are measured against the typical magnitude of an element, so that one near zero makes no large error;
    extremes against the largest magnitude. Other counts of elements, NaNs or infinities are infinitely far.
    """
    a, b = rows.a, rows.b
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        finite = np.maximum(a["count"] - a["nan"] - a["pos_inf"] - a["neg_inf"], 1)
        root = np.sqrt(finite.astype(np.float64))
        typical = np.fmax.reduce([a["abs_mean"], b["abs_mean"], a["l2"] / root, b["l2"] / root])
        largest = np.fmax(a["abs_max"], b["abs_max"])
        errors = [_ratio(a[name] - b[name], typical) for name in ("mean", "std", "abs_mean")]
        errors.append(_ratio((a["l2"] - b["l2"]) / root, typical))
        errors += [_ratio(a[name] - b[name], largest) / MAX_ERROR_FACTOR for name in ("min", "max")]
    worst: NDArray[np.float64] = np.fmax.reduce(errors)
    for name in ("count", "nan", "pos_inf", "neg_inf"):
        worst = np.where(a[name] != b[name], np.inf, worst)
    return np.nan_to_num(worst, nan=0.0, posinf=np.inf)


def _ratio(difference: NDArray[np.float64], size: NDArray[np.float64]) -> NDArray[np.float64]:
    distance = np.abs(difference)
    result: NDArray[np.float64] = np.where(distance > 0, distance / size, 0.0)
    return result
