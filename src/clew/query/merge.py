"""Statistics of several tensors as those of one, step by step: the merge law over whole columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clew.model.schema import COUNT_STATS, DERIVED_STATS, STAT_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

STORED: tuple[str, ...] = tuple(name for name in STAT_NAMES if name not in DERIVED_STATS)


def derive(columns: Mapping[str, NDArray[Any]], stat: str) -> NDArray[Any]:
    """Return a statistic from the stored ones: counts as integers, values as float64."""
    if stat == "positive":
        rest = columns["nan"] + columns["zero"] + columns["negative"]
        found: NDArray[Any] = columns["count"] - rest
    elif stat == "abs_max":
        found = np.maximum(np.abs(columns["min"]), np.abs(columns["max"]))
    else:
        found = columns[stat]
    return found if found.dtype.kind == "i" else found.astype(np.float64)


def sources_of(stat: str) -> tuple[str, ...]:
    """Return the stored statistics from which one is derived."""
    derived = {"positive": ("count", "nan", "zero", "negative"), "abs_max": ("min", "max")}
    return derived.get(stat, (stat,))


def merge_by_step(columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return one row for each step from rows of the stored statistics with a ``step`` column.

    The same law as ``clew.stats.reference.merge``; rows without a finite element add their counts only.
    """
    order = np.argsort(columns["step"], kind="stable")
    steps, starts = np.unique(columns["step"][order], return_index=True)
    c = {name: columns[name][order].astype(np.float64) for name in STORED}
    finite = c["count"] - c["nan"] - c["pos_inf"] - c["neg_inf"]
    n = _sum(finite, starts)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean = _sum(_weighted(c["mean"], finite), starts) / n
        gap = c["mean"] - np.repeat(mean, np.diff(np.append(starts, len(order))))
        merged = {
            "min": np.fmin.reduceat(c["min"], starts) if len(order) else c["min"],
            "max": np.fmax.reduceat(c["max"], starts) if len(order) else c["max"],
            "mean": mean,
            "std": np.sqrt(_sum(_weighted(c["std"] ** 2 + gap**2, finite), starts) / n),
            "abs_mean": _sum(_weighted(c["abs_mean"], finite), starts) / n,
            "l2": np.where(n > 0, np.sqrt(_sum(np.where(finite > 0, c["l2"] ** 2, 0.0), starts)), np.nan),
        }
    counts: dict[str, NDArray[Any]] = {name: _sum(c[name], starts) for name in COUNT_STATS if name in STORED}
    return {"step": steps, **counts, **merged}


def _weighted(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(weights > 0, values * weights, 0.0)


def _sum(values: NDArray[np.float64], starts: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.add.reduceat(values, starts) if len(values) else values
