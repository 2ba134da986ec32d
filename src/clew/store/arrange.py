"""The order of rows in a part: by site, kind, ordinal and then step, from rows that arrived step by step.

Most often every step has the same rows. Then a column is a rectangle, steps by rows, and a piece of the part is some
of its columns turned on their side: little work, and only one piece is ever held in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa

from clew.stats.built import BUILT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.store.tables import TableSpec

ROW_GROUP: Final = 32_768
TURNED_ROWS: Final = 8 * ROW_GROUP
MOST_CHUNKS: Final = 64
"""With more pieces than these, joining them first is cheaper than collecting each piece from all of them."""

Piece = dict[str, pa.Array]


class Arrangement(Protocol):
    """How the rows of a tail are put in the order of a part."""

    def pieces(self, table: pa.Table) -> Iterator[Piece]:
        """Yield the rows of the part, piece by piece."""

    def arrange(self, column: Any) -> Any:
        """Return one whole column in the order of the part."""


def find_arrangement(spec: TableSpec, table: pa.Table) -> Arrangement:
    """Return how to sort a table whose rows are in order of (step, seq)."""
    keys = [_sort_key(table[name]) for name in reversed(spec.sort_by) if name not in ("step", "seq")]
    steps = table["step"].to_numpy()
    rows = int(np.searchsorted(steps, steps[0], side="right"))
    if all(_repeats(key, rows) for key in keys) and _is_rectangle(steps, rows):
        order = np.lexsort([key[:rows] for key in keys])
        same = [key[:rows][order][1:] == key[:rows][order][:-1] for key in keys]
        if not np.logical_and.reduce(same).any():
            return Rectangle(order, len(table) // rows)
    if np.any(steps[1:] < steps[:-1]):
        keys.insert(0, steps)
    return Permutation(np.lexsort(keys))


def _sort_key(column: pa.ChunkedArray) -> Any:
    """Return a column as integers, of 16 bits where they fit: numpy sorts those by radix, many times faster."""
    if pa.types.is_string(column.type):
        encoded = column.combine_chunks().dictionary_encode()
        ranks = np.argsort(np.argsort(encoded.dictionary.to_numpy(zero_copy_only=False)))
        values = ranks[encoded.indices.to_numpy()]
    else:
        values = column.to_numpy()
    fits = values.min() >= 0 and values.max() < 65_536
    return values.astype(np.uint16) if fits else values


def _repeats(key: Any, rows: int) -> bool:
    """Say whether a column holds the same ``rows`` values again and again."""
    return len(key) % rows == 0 and bool((key.reshape(-1, rows) == key[:rows]).all())


def _is_rectangle(steps: Any, rows: int) -> bool:
    """Say whether each step has exactly ``rows`` rows and the steps go up."""
    square = steps.reshape(-1, rows)
    return bool((square == square[:, :1]).all() and (square[1:, 0] > square[:-1, 0]).all())


@dataclass(frozen=True)
class Permutation:
    """Any rows: the position in the tail of each row of the part."""

    order: Any

    def arrange(self, column: Any) -> Any:
        """Return one whole column in the order of the part."""
        return column[self.order]

    def pieces(self, table: pa.Table) -> Iterator[Piece]:
        """Yield the rows of the part, piece by piece."""
        table = table.combine_chunks()
        for start in range(0, len(self.order), ROW_GROUP):
            chosen = pa.array(self.order[start : start + ROW_GROUP])
            yield {name: _one_array(table[name].take(chosen)) for name in table.column_names}


@dataclass(frozen=True)
class Rectangle:
    """The same rows in each step: ``order`` sorts those of one step, ``steps`` counts the steps."""

    order: Any
    steps: int

    def arrange(self, column: Any) -> Any:
        """Return one whole column in the order of the part."""
        return column.reshape(self.steps, -1).T[self.order].ravel()

    def pieces(self, table: pa.Table) -> Iterator[Piece]:
        """Yield the rows of the part; many are turned at once, since memory is read in lines, not numbers."""
        if table["step"].num_chunks > MOST_CHUNKS:
            table = table.combine_chunks()
        series = max(TURNED_ROWS // self.steps, 1)
        for start in range(0, len(self.order), series):
            chosen = self.order[start : start + series]
            yield {name: self._turn(table[name], chosen) for name in table.column_names}

    def _turn(self, column: pa.ChunkedArray, chosen: Any) -> pa.Array:
        """Return some columns of the rectangle, one after the other."""
        rows = len(self.order)
        if column.null_count or not pa.types.is_primitive(column.type):
            places = chosen[:, None] + np.arange(self.steps) * rows
            return _one_array(column.take(pa.array(places.ravel())))
        turned = np.empty((len(chosen), self.steps), column.type.to_pandas_dtype())
        turn([chunk.to_numpy().reshape(-1, rows) for chunk in column.chunks], _as_slice(chosen), turned)
        return pa.array(turned.ravel())


def turn(rectangles: list[Any], wanted: Any, turned: Any) -> None:
    """Write the wanted columns of rectangles that lie one below the other as rows."""
    if BUILT is None or not isinstance(wanted, slice):
        turn_slowly(rectangles, wanted, turned)
        return
    width = turned.itemsize
    places = np.array([(each.ctypes.data + wanted.start * width, len(each)) for each in rectangles], np.int64)
    steps, rows = turned.shape[1], rectangles[0].shape[1]
    BUILT.turn_over(width, places.ctypes.data, len(places), rows, len(turned), turned.ctypes.data, steps)


def turn_slowly(rectangles: list[Any], wanted: Any, turned: Any) -> None:
    """Do the same where there is no kernel, and as its twin."""
    first = 0
    for each in rectangles:
        turned[:, first : first + len(each)] = each[:, wanted].T
        first += len(each)


def _as_slice(chosen: Any) -> Any:
    """Return neighbouring positions as a slice, which copies nothing."""
    is_run = chosen[-1] - chosen[0] + 1 == len(chosen) and bool((np.diff(chosen) == 1).all())
    return slice(int(chosen[0]), int(chosen[-1]) + 1) if is_run else chosen


def _one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
