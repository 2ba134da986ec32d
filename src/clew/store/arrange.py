"""The order of rows in a part: by site, kind, ordinal and then step, from rows that arrived step by step.

Most often every step has the same rows. Then a column is a rectangle, steps by rows, and a piece of the part is some
of its columns turned on their side: little work, and only one piece is ever held in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa

from clew.stats.built import BUILT
from clew.store.tables import distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from clew.store.tables import TableSpec

ROW_GROUP: Final = 32_768
TURNED_ROWS: Final = 8 * ROW_GROUP
MOST_CHUNKS: Final = 64
"""With more pieces than these, joining them first is cheaper than collecting each piece from all of them."""

Piece = dict[str, pa.Array]


class Arrangement(Protocol):
    """How the rows of a tail are put in the order of a part."""

    @property
    def times(self) -> int:
        """How many rows of the part stand for one value of ``arrange``."""

    def arrange(self, key: pa.ChunkedArray) -> Any:
        """Return a column that rows are sorted by in the order of the part, without what repeats in each step."""

    def find_steps(self, table: pa.Table) -> Any:
        """Return the steps that have a row, sorted."""

    def pieces(self, table: pa.Table) -> Iterator[Piece]:
        """Yield the rows of the part, piece by piece; a piece is gone when the next one is asked for."""


def find_arrangement(spec: TableSpec, table: pa.Table) -> Arrangement:
    """Return how to sort a table whose rows are in order of (step, seq)."""
    names = [name for name in reversed(spec.sort_by) if name not in ("step", "seq")]
    rectangle = _find_rectangle(spec, table, names)
    if rectangle is not None:
        return rectangle
    keys = [_sort_key(table[name]) for name in names]
    steps = table["step"].to_numpy()
    if np.any(steps[1:] < steps[:-1]):
        keys.insert(0, steps)
    return Permutation(np.lexsort(keys))


def _find_rectangle(spec: TableSpec, table: pa.Table, names: list[str]) -> Rectangle | None:
    """Return the arrangement of a table with the same rows in each step; None when it is not so."""
    first = next(chunk for chunk in table["step"].chunks if len(chunk)).to_numpy()
    rows = max(int(np.searchsorted(first, first[0], side="right")), 1)
    if any(len(chunk) % rows for chunk in table["step"].chunks):
        return None
    squares = _split(table["step"], rows)
    steps = np.concatenate([square[:, 0] for square in squares]).astype(np.int64)
    if not (steps[1:] > steps[:-1]).all() or not all((each == each[:, :1]).all() for each in squares):
        return None
    keys = []
    for name in names:
        column = table[name]
        ranks = (
            [_sort_key(column).reshape(-1, rows)] if pa.types.is_string(column.type) else _split(column, rows)
        )
        if not _repeats(ranks):
            return None
        keys.append(ranks[0][0])
    order = np.lexsort(keys)
    same = [key[order][1:] == key[order][:-1] for key in keys]
    return None if np.logical_and.reduce(same).any() else Rectangle(order, steps, spec.schema)


def _split(column: pa.ChunkedArray, rows: int) -> list[Any]:
    """Return a column of numbers as rectangles that lie one below the other, without copying any."""
    return [chunk.to_numpy().reshape(-1, rows) for chunk in column.chunks if len(chunk)]


def _repeats(rectangles: list[Any]) -> bool:
    """Say whether all rows are the same; most often the last one tells."""
    first = rectangles[0][0]
    return bool((rectangles[-1][-1] == first).all()) and all((each == first).all() for each in rectangles)


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


@dataclass(frozen=True)
class Permutation:
    """Any rows: the position in the tail of each row of the part."""

    order: Any
    times = 1

    def arrange(self, key: pa.ChunkedArray) -> Any:
        """Return a whole column in the order of the part."""
        return key.to_numpy()[self.order]

    def find_steps(self, table: pa.Table) -> Any:
        """Return the steps that have a row, sorted."""
        return distinct(table["step"].to_numpy())

    def pieces(self, table: pa.Table) -> Iterator[Piece]:
        """Yield the rows of the part, piece by piece."""
        table = table.combine_chunks()
        for start in range(0, len(self.order), ROW_GROUP):
            chosen = pa.array(self.order[start : start + ROW_GROUP])
            yield {name: _one_array(table[name].take(chosen)) for name in table.column_names}


@dataclass(frozen=True)
class Rectangle:
    """The same rows in each step: ``order`` sorts those of one step. Columns come in the types of the part."""

    order: Any
    steps: Any
    schema: pa.Schema

    @property
    def times(self) -> int:
        """How many rows of the part stand for one value of ``arrange``."""
        return len(self.steps)

    def arrange(self, key: pa.ChunkedArray) -> Any:
        """Return the part of a key that repeats in each step, in the order of the part."""
        return key.slice(0, len(self.order)).to_numpy()[self.order]

    def find_steps(self, table: pa.Table) -> Any:  # noqa: ARG002 - other arrangements have to look
        """Return the steps that have a row, sorted."""
        return self.steps

    def pieces(self, table: pa.Table) -> Iterator[Piece]:
        """Yield the rows of the part; many are turned at once, since memory is read in lines, not numbers."""
        if table["step"].num_chunks > MOST_CHUNKS:
            table = table.combine_chunks()
        series = min(max(TURNED_ROWS // self.times, 1), len(self.order))
        columns = {name: self._column(table[name], name, series) for name in table.column_names}
        for start in range(0, len(self.order), series):
            wanted = _as_slice(self.order[start : start + series])
            yield {name: take(wanted) for name, take in columns.items()}

    def _column(self, column: pa.ChunkedArray, name: str, series: int) -> Callable[[Any], pa.Array]:
        """Return how to get some columns of a rectangle, one after the other."""
        if column.null_count or not pa.types.is_primitive(column.type):
            return partial(self._take, column)
        # Each piece is written where the one before it was: fresh memory costs as much as turning.
        space = np.empty((series, self.times), self.schema.field(name).type.to_pandas_dtype())
        shape = (len(self.order), self.times)
        if name == "step":
            return partial(_fill, space, np.broadcast_to(self.steps, shape))
        rectangles = _split(column, len(self.order))
        if space.dtype.kind == "i" and _repeats(rectangles):
            return partial(_fill, space, np.broadcast_to(rectangles[0][0][:, None], shape))
        return partial(_turn, space, rectangles)

    def _take(self, column: pa.ChunkedArray, wanted: Any) -> pa.Array:
        chosen = np.arange(len(self.order))[wanted]
        places = chosen[:, None] + np.arange(self.times) * len(self.order)
        return _one_array(column.take(pa.array(places.ravel())))


def _fill(space: Any, values: Any, wanted: Any) -> pa.Array:
    chosen = values[wanted]
    filled = space[: len(chosen)]
    filled[:] = chosen
    return pa.array(filled.ravel())


def _turn(space: Any, rectangles: list[Any], wanted: Any) -> pa.Array:
    count = wanted.stop - wanted.start if isinstance(wanted, slice) else len(wanted)
    turned = space[:count]
    turn(rectangles, wanted, turned)
    return pa.array(turned.ravel())


def turn(rectangles: list[Any], wanted: Any, turned: Any) -> None:
    """Write the wanted columns of rectangles that lie one below the other as rows, counts maybe in wider numbers."""
    source = rectangles[0].dtype
    is_known = source == turned.dtype or (source == np.uint32 and turned.dtype == np.int64)
    if BUILT is None or not isinstance(wanted, slice) or not is_known:
        turn_slowly(rectangles, wanted, turned)
        return
    width = source.itemsize
    places = np.array([(each.ctypes.data + wanted.start * width, len(each)) for each in rectangles], np.int64)
    steps, rows = turned.shape[1], rectangles[0].shape[1]
    to = turned.ctypes.data
    BUILT.turn_over(width, turned.itemsize, places.ctypes.data, len(places), rows, len(turned), to, steps)


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
