"""The rows of a step as watchpoints see them: statistics by name, the previous step's, and shares of a range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.model.schema import HIST_LOW_EXPONENT, HIST_MAGNITUDES, KIND_INDEX, STAT_INDEX, STAT_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from clew.model.record import Scalar, StepRecord

    Column = NDArray[np.float64]

DERIVED: Final = {
    "inf": "infinities of both signs",
    "nonfinite": "NaN and infinities",
    "zero_percentage": "elements that are zero, in per cent",
    "range": "max - min",
    "rms": "root of the mean square",
    "update_ratio": "mean of |update| over mean of |weight| (kinds param and update)",
}
"""Numbers that follow from the recorded statistics, and what they are."""

WORDS: Final = (*STAT_NAMES, *DERIVED)

SCALAR_WORDS: Final = ("value", "nonfinite")
"""What can be asked of a number of a step, such as the loss or the learning rate."""


class StepRows:
    """One recorded step. Columns have one value for each row; what is not known is NaN."""

    def __init__(
        self,
        record: StepRecord,
        before: StepRows | None = None,
        *,
        histogram: Callable[[int], NDArray[Any] | None] | None = None,
    ) -> None:
        self.step = record.step
        self.sites = record.sites
        self.kinds = record.kinds
        self.ordinals = record.ordinals
        self.modes = record.modes
        self.values = record.values
        self._hists = record.hists
        self._histogram = histogram
        self._before = before
        self._columns: dict[str, Column] = {}
        self.wanted: NDArray[np.intp] = np.arange(len(record))
        """The rows that are asked for: what takes a loop is computed for these alone."""

    def __len__(self) -> int:
        return len(self.sites)

    def column(self, name: str) -> Column:
        """Return a statistic, a derived number, or ``prev.`` with one of them."""
        known = self._columns.get(name)
        if known is None:
            known = self._columns[name] = self._compute(name)
        return known

    def _compute(self, name: str) -> Column:
        if name.startswith("prev."):
            return self._previous(name.removeprefix("prev."))
        if name in STAT_INDEX:
            column: Column = self.values[:, STAT_INDEX[name]]
            return column
        return _DERIVATIONS[name](self)

    @property
    def is_bad(self) -> NDArray[np.bool_]:
        """Which rows hold a NaN or an infinity."""
        return self.column("nonfinite") > 0

    @property
    def has_previous(self) -> NDArray[np.bool_]:
        """Which rows have a row of the same site, kind, mode and ordinal in the recorded step before."""
        return self._match()[0] >= 0

    def _previous(self, name: str) -> Column:
        rows, before = self._match()
        result = np.full(len(self), np.nan)
        if before is not None and len(before):
            known = rows >= 0
            result[known] = before.column(name)[rows[known]]
        return result

    def _match(self) -> tuple[NDArray[np.intp], StepRows | None]:
        """Return for each row its number in the step before, -1 where there is none."""
        before = self._before
        if before is None:
            return np.full(len(self), -1), None
        if before.sites is self.sites and before.kinds is self.kinds:
            return np.arange(len(self)), before
        numbers = {key: row for row, key in enumerate(before._keys())}
        return np.array([numbers.get(key, -1) for key in self._keys()], np.intp), before

    def _keys(self) -> list[tuple[int, ...]]:
        columns = (self.sites, self.kinds, self.modes, self.ordinals)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def forget_previous(self) -> None:
        """Let the step before go, so that steps do not hold each other."""
        self._before = None

    def partner(self, kind: str) -> NDArray[np.intp]:
        """Return for each row the row of the same site with another kind, -1 where there is none."""
        number = KIND_INDEX[kind]
        at = {int(self.sites[row]): row for row in np.flatnonzero(self.kinds == number).tolist()}
        return np.array([at.get(site, -1) for site in self.sites.tolist()], np.intp)

    def share_between(self, low: float, high: float) -> Column:
        """Return how many per cent of the elements lie in a closed range, from the histograms; NaN without one."""
        shares = np.full(len(self), np.nan)
        for row in self.wanted.tolist():
            counts = self._find_histogram(row)
            total = float(self.column("count")[row])
            if counts is not None and total:
                zero = float(self.column("zero")[row])
                shares[row] = 100 * _count_between(np.asarray(counts, np.float64), zero, low, high) / total
        return shares

    def _find_histogram(self, row: int) -> NDArray[Any] | None:
        if self._hists is not None:
            found: NDArray[Any] = self._hists[row]
            return found
        return None if self._histogram is None else self._histogram(row)


class ScalarRows:
    """The numbers of a step (loss, lr, times …) as rows; one that was not there in the step before is NaN there."""

    def __init__(self, scalars: Sequence[Scalar], before: Mapping[tuple[str, int], float]) -> None:
        self.scalars = scalars
        self._value = np.array([scalar.value for scalar in scalars], np.float64)
        self._previous = np.array([before.get((each.name, each.ordinal), np.nan) for each in scalars])

    def __len__(self) -> int:
        return len(self.scalars)

    @property
    def is_bad(self) -> NDArray[np.bool_]:
        """Which numbers are NaN or infinite."""
        bad: NDArray[np.bool_] = ~np.isfinite(self._value)
        return bad

    @property
    def has_previous(self) -> NDArray[np.bool_]:
        """Which numbers were there in the step before."""
        known: NDArray[np.bool_] = ~np.isnan(self._previous)
        return known

    def column(self, name: str) -> Column:
        """Return the values, those of the step before, or 1 where they are not finite."""
        values = self._previous if name.startswith("prev.") else self._value
        if name.endswith("nonfinite"):
            return (~np.isfinite(values)).astype(np.float64)
        return values


def _ratio_of_update(rows: StepRows) -> Column:
    """Return mean |update| / (mean |weight| + 1e-9) at rows of kind param or update."""
    magnitude = rows.column("abs_mean")
    update, weight = rows.partner("update"), rows.partner("param")
    both = (update >= 0) & (weight >= 0)
    result = np.full(len(rows), np.nan)
    result[both] = magnitude[update[both]] / (magnitude[weight[both]] + 1e-9)
    return result


_DERIVATIONS: Final[dict[str, Callable[[StepRows], Column]]] = {
    "inf": lambda rows: rows.column("pos_inf") + rows.column("neg_inf"),
    "nonfinite": lambda rows: rows.column("nan") + rows.column("inf"),
    "zero_percentage": lambda rows: 100 * rows.column("zero") / np.maximum(rows.column("count"), 1),
    "range": lambda rows: rows.column("max") - rows.column("min"),
    "rms": lambda rows: rows.column("l2") / np.sqrt(np.maximum(rows.column("count"), 1)),
    "update_ratio": _ratio_of_update,
}

_EDGES: Final = 2.0 ** (HIST_LOW_EXPONENT + np.arange(HIST_MAGNITUDES - 1))
"""Upper edges of all bins of magnitudes but the last."""


def _count_between(counts: Column, zero: float, low: float, high: float) -> float:
    """Return how many elements lie in ``[low, high]``; inside a bin they are taken to be spread evenly."""
    if low > high:
        return 0.0
    positive, negative = counts[:HIST_MAGNITUDES], counts[HIST_MAGNITUDES:]
    inside = _magnitudes_between(positive, max(low, 0.0), high) if high > 0 else 0.0
    inside += _magnitudes_between(negative, max(-high, 0.0), -low) if low < 0 else 0.0
    return inside + (zero if low <= 0 <= high else 0.0)


def _magnitudes_between(counts: Column, low: float, high: float) -> float:
    return _magnitudes_up_to(counts, high) - (_magnitudes_up_to(counts, low) if low > 0 else 0.0)


def _magnitudes_up_to(counts: Column, magnitude: float) -> float:
    bin = int(np.searchsorted(_EDGES, magnitude, side="right"))
    below = float(counts[:bin].sum())
    if bin >= len(_EDGES):
        # The last bin has no upper end.
        return below if magnitude < np.inf else below + float(counts[bin])
    start = _EDGES[bin - 1] if bin else 0.0
    return below + float(counts[bin]) * float((magnitude - start) / (_EDGES[bin] - start))
