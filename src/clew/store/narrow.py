"""Statistics as they are stored: a column each, counts in 32 bits where they fit, other numbers as float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.model.schema import COUNT_STATS, STAT_INDEX, STAT_NAMES
from clew.stats.built import BUILT
from clew.store.tables import STORED_STATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from clew.store.tables import Columns

    Rows = NDArray[np.float64]

_COUNTS: Final = tuple(name for name in STORED_STATS if name in COUNT_STATS)
_NUMBERS: Final = tuple(name for name in STORED_STATS if name not in COUNT_STATS)
_KINDS: Final = bytes(1 if name in _COUNTS else 2 if name in _NUMBERS else 0 for name in STAT_NAMES)
_FEW_ROWS: Final = 128
"""Where pieces have fewer rows than these, asking each for its place takes longer than copying it."""
_LARGEST_COUNT: Final = (1 << 32) - 1
_LARGEST: Final = float(np.finfo(np.float32).max)
_SMALLEST: Final = float(np.finfo(np.float32).smallest_subnormal)


def turn(pieces: Sequence[Rows]) -> Columns:
    """Return a column for each stored statistic of some pieces of rows; None where all counts are zero."""
    if len(pieces) > 1 and sum(map(len, pieces)) < _FEW_ROWS * len(pieces):
        pieces = [np.concatenate(pieces)]
    if BUILT is None or not all(map(_is_plain, pieces)):
        return turn_slowly(pieces)
    places = np.array([(rows.ctypes.data, len(rows)) for rows in pieces], np.int64)
    total = int(places[:, 1].sum())
    counts, numbers = np.empty((len(_COUNTS), total), np.uint32), np.empty((len(_NUMBERS), total), np.float32)
    largest = np.zeros(len(_COUNTS))
    targets = (array.ctypes.data for array in (counts, numbers, largest))
    BUILT.turn_rows(places.ctypes.data, len(places), _KINDS, *targets, total)
    columns: Columns = dict(zip(_NUMBERS, numbers, strict=True))
    for name, column, most in zip(_COUNTS, counts, largest.tolist(), strict=True):
        is_wide = most > _LARGEST_COUNT
        columns[name] = _count(_join(pieces, name)) if is_wide else column if most else None
    return columns


def turn_slowly(pieces: Sequence[Rows]) -> Columns:
    """Do the same where there is no kernel, and as its twin."""
    columns: Columns = {}
    for name in STORED_STATS:
        values = _join(pieces, name)
        columns[name] = _count(values) if name in COUNT_STATS else narrow(values)
    return columns


def _is_plain(rows: Rows) -> bool:
    flags = rows.flags
    is_whole = rows.dtype == np.float64 and rows.shape[1] == len(STAT_NAMES)
    return is_whole and flags.c_contiguous and flags.aligned


def _join(pieces: Sequence[Rows], name: str) -> NDArray[np.float64]:
    return np.concatenate([rows[:, STAT_INDEX[name]] for rows in pieces])


def _count(values: NDArray[np.float64]) -> NDArray[Any] | None:
    """Return counts as integers, of 32 bits if they fit, and nothing where all of them are zero."""
    # A row that a fault has left without numbers has none of anything.
    counts = np.where(values > 0, values, 0)
    largest = counts.max(initial=0)
    if largest == 0:
        return None
    return counts.astype(np.uint32 if largest <= _LARGEST_COUNT else np.int64)


def narrow(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return float32 of the same kind: what is finite stays finite, and what is not zero stays not zero."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        small = values.astype(np.float32)
    suspects = np.flatnonzero((small == 0) | np.isinf(small))
    exact = values[suspects]
    fixed = np.where(np.isfinite(exact) & (exact != 0), np.copysign(_limits(exact), exact), exact)
    small[suspects] = fixed
    return small


def _limits(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest float32 for large magnitudes and the smallest one for small ones."""
    return np.where(np.abs(values) > 1, _LARGEST, _SMALLEST)
