"""Rows of several sites that are one on the other side, made one: statistics of a whole follow from those of its parts.

Counts, sums and extremes do not depend on how the parts lie in the whole; for that reason they cannot tell it either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from clew.compare.align import Pair

    Columns = dict[str, NDArray[Any]]

_KEYS = ("step", "rank", "pair", "kind", "ordinal", "mode")
_ADDED = ("count", "nan", "pos_inf", "neg_inf", "zero")


def join_parts(rows: Columns, pairs: Sequence[Pair], *, side: str) -> Columns:
    """Return the rows of a side with those of parts joined; where one of the parts has no row, none is compared."""
    sizes = np.array([len(pair.parts) if pair.parts_in == side else 0 for pair in pairs] + [0])
    wanted = np.flatnonzero(sizes[rows["pair"]])
    if not len(wanted):
        return rows
    order = wanted[np.lexsort([rows[name][wanted] for name in reversed(_KEYS)])]
    is_new = np.any([np.diff(rows[name][order], prepend=-1) != 0 for name in _KEYS], axis=0)
    starts = np.flatnonzero(is_new)
    counts = np.diff(np.append(starts, len(order)))
    is_whole = counts == sizes[rows["pair"][order[starts]]]
    rows["pair"] = rows["pair"].copy()
    rows["pair"][order[np.repeat(~is_whole, counts)]] = -1
    order, starts = order[np.repeat(is_whole, counts)], np.cumsum(counts[is_whole]) - counts[is_whole]
    joined = _join({name: column[order] for name, column in rows.items()}, starts) if len(order) else {}
    kept = np.ones(len(rows["pair"]), bool)
    kept[order] = False
    return {
        name: np.concatenate([column[kept], joined[name]]) if joined else column[kept]
        for name, column in rows.items()
    }


def _join(rows: Columns, starts: NDArray[np.int64]) -> Columns:
    """Return one row for each group of rows, which begin at ``starts``."""
    found = {name: column[starts] for name, column in rows.items()}
    # All parts are there when the last of them is.
    found["seq"] = np.maximum.reduceat(rows["seq"], starts)
    found["hash"] = np.zeros_like(found["hash"])
    if "mean" in rows:
        found |= _join_statistics(rows, starts)
    return found


def _join_statistics(rows: Columns, starts: NDArray[np.int64]) -> Columns:
    found: Columns = {name: np.add.reduceat(rows[name], starts) for name in _ADDED}
    finite = (rows["count"] - rows["nan"] - rows["pos_inf"] - rows["neg_inf"]).astype(np.float64)
    numbers = {name: np.asarray(rows[name], np.float64) for name in ("mean", "std", "abs_mean", "l2")}
    total = np.maximum(np.add.reduceat(finite, starts), 1.0)

    def average(values: NDArray[np.float64]) -> NDArray[np.float64]:
        weighted: NDArray[np.float64] = np.add.reduceat(np.where(finite > 0, values * finite, 0.0), starts)
        return weighted / total

    found["mean"] = average(numbers["mean"])
    found["abs_mean"] = average(numbers["abs_mean"])
    lengths = np.diff(np.append(starts, len(finite)))
    away = numbers["mean"] - np.repeat(found["mean"], lengths)
    found["std"] = np.sqrt(average(numbers["std"] ** 2 + away**2))
    found["l2"] = np.sqrt(np.add.reduceat(np.where(finite > 0, numbers["l2"] ** 2, 0.0), starts))
    found["min"] = np.fmin.reduceat(rows["min"], starts)
    found["max"], found["abs_max"] = (np.fmax.reduceat(rows[name], starts) for name in ("max", "abs_max"))
    return found
