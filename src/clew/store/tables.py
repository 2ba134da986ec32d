"""The tables of a run on disk: their columns, and the way between Arrow and numpy.

A table grows as an Arrow IPC stream (the tail), one record batch for each flush, and is sealed into a Parquet part:
rows sorted so that one site's series is contiguous, floats byte-stream-split, integers delta- or
dictionary-encoded, with row-group statistics for the columns one searches by. Rows enter and leave as
numpy columns. Only this file, ``tail`` and ``part`` know Arrow and Parquet.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clew.model.schema import (
    COUNT_STATS,
    DERIVED_STATS,
    FORMAT_VERSION,
    KINDS,
    MODES,
    STAT_NAMES,
    VALUE_STATS,
)
from clew.store.rows import NONFINITE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clew.store.rows import Rows

STORED_STATS: Final = tuple(name for name in STAT_NAMES if name not in DERIVED_STATS)

Columns = dict[str, Any]
"""Numpy arrays by column name; columns of text, bytes or lists are Arrow arrays until a reader asks for them."""

ReadError = (pa.ArrowException, OSError, ValueError)
"""What reading a damaged file raises."""


@dataclass(frozen=True)
class TableSpec:
    """How one table looks on disk: columns, the order of rows in a part, encodings, columns with statistics.

    A part always has all columns. A tail leaves out the ``sparse`` ones while they hold nothing but zeros, and keeps
    the ``narrow`` ones in 32 bits while they fit.
    """

    name: str
    schema: pa.Schema
    sort_by: tuple[str, ...]
    encodings: dict[str, str]
    searched: tuple[str, ...]
    narrow: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    codecs: dict[str, str] = dataclasses.field(default_factory=dict)
    """Compression of a column where it is not lz4, which is nearly as small as zstd here and half the work."""


def _metadata(**extra: str) -> dict[bytes, bytes]:
    text = {"clew.format": str(FORMAT_VERSION), **extra}
    return {key.encode(): value.encode() for key, value in text.items()}


def _stats_spec() -> TableSpec:
    counts = [name for name in COUNT_STATS if name in STORED_STATS]
    values = [name for name in VALUE_STATS if name in STORED_STATS]
    keys = [("step", pa.int64()), ("seq", pa.int32()), ("site", pa.int32()), ("kind", pa.int8())]
    keys += [("ordinal", pa.int16()), ("mode", pa.int8())]
    fields = [pa.field(name, kind, nullable=False) for name, kind in keys]
    fields += [pa.field(name, pa.int64(), nullable=False) for name in counts]
    fields += [pa.field(name, pa.float32(), nullable=False) for name in values]
    fields += [pa.field("hash", pa.uint64()), pa.field("hist", pa.binary())]
    encodings = dict.fromkeys(["step", "seq", "zero", "negative"], "DELTA_BINARY_PACKED")
    encodings |= dict.fromkeys(values, "BYTE_STREAM_SPLIT")
    # In a part these columns are long runs of one number: lz4 alone makes them small, for less work than a dictionary.
    constant = ["site", "kind", "ordinal", "mode", "count", *NONFINITE]
    encodings |= dict.fromkeys([*constant, "hash", "hist"], "PLAIN")
    return TableSpec(
        "stats",
        pa.schema(fields, _metadata(**{"clew.kinds": ",".join(KINDS), "clew.modes": ",".join(MODES)})),
        ("site", "kind", "ordinal", "step", "seq"),
        encodings,
        ("step", "site", "kind", *NONFINITE),
        narrow=("step", *counts),
        sparse=(*NONFINITE, "hash", "hist"),
        codecs={"zero": "none", "negative": "none", "hash": "none", "hist": "zstd"},
    )


STATS: Final = _stats_spec()

SCALARS: Final = TableSpec(
    "scalars",
    pa.schema(
        [
            pa.field("step", pa.int64(), nullable=False),
            pa.field("name", pa.string(), nullable=False),
            pa.field("ordinal", pa.int16(), nullable=False),
            pa.field("value", pa.float64(), nullable=False),
        ],
        _metadata(),
    ),
    ("name", "ordinal", "step"),
    {"step": "DELTA_BINARY_PACKED", "value": "BYTE_STREAM_SPLIT"},
    ("step", "name"),
)

BATCHES: Final = TableSpec(
    "batches",
    pa.schema(
        [
            pa.field("step", pa.int64(), nullable=False),
            pa.field("seq", pa.int32(), nullable=False),
            pa.field("leaf", pa.string(), nullable=False),
            pa.field("ordinal", pa.int16(), nullable=False),
            pa.field("mode", pa.int8(), nullable=False),
            pa.field("shape", pa.list_(pa.int64()), nullable=False),
            pa.field("dtype", pa.string(), nullable=False),
            pa.field("fingerprint", pa.uint64(), nullable=False),
            pa.field("loader", pa.string(), nullable=False),
            pa.field("position", pa.int64(), nullable=False),
            pa.field("indices", pa.list_(pa.int64()), nullable=False),
        ],
        _metadata(**{"clew.modes": ",".join(MODES)}),
    ),
    ("leaf", "ordinal", "step", "seq"),
    {"step": "DELTA_BINARY_PACKED", "seq": "DELTA_BINARY_PACKED", "position": "DELTA_BINARY_PACKED"},
    ("step", "leaf"),
)

TABLES: Final = (STATS, SCALARS, BATCHES)


def to_array(column: Any, field: pa.Field, rows: int) -> pa.Array:
    """Return a column as Arrow: numpy, a list, packed bytes (offsets and data), or nothing at all."""
    if column is None:
        is_bytes = pa.types.is_binary(field.type)
        column = (
            (np.zeros(rows + 1, np.int32), b"") if is_bytes else np.zeros(rows, field.type.to_pandas_dtype())
        )
    if isinstance(column, tuple):  # offsets and bytes; an empty row is a missing one
        offsets, data = column
        present = np.diff(offsets) > 0
        bitmap = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
        buffers = [bitmap, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
        return pa.Array.from_buffers(field.type, rows, buffers)
    if field.nullable:  # zero stands for a missing hash
        return pa.array(column, field.type, mask=column == 0)
    if isinstance(column, np.ndarray):
        column = column.astype(field.type.to_pandas_dtype(), copy=False)
    return pa.array(column, field.type)


def needed(columns: Sequence[str], rows: Rows) -> list[str]:
    """Return the columns to read for an answer: those asked for and those that decide about a row."""
    return list(dict.fromkeys([*columns, *rows.columns]))


def select(spec: TableSpec, table: pa.Table, columns: Sequence[str], rows: Rows) -> Columns:
    """Return columns of the wanted rows of an Arrow table as numpy."""
    mask = rows.mask({name: _column(spec, table, name) for name in rows.columns})
    if mask is None:
        return {name: _column(spec, table, name) for name in columns}
    wanted = np.flatnonzero(mask)
    if len(wanted) and wanted[-1] - wanted[0] + 1 == len(wanted):
        # One site's rows are contiguous in a part: a slice copies nothing.
        table = table.slice(wanted[0], len(wanted))
        return {name: _column(spec, table, name) for name in columns}
    return {name: _taken(spec, table, name, wanted) for name in columns}


def _taken(spec: TableSpec, table: pa.Table, name: str, wanted: Any) -> Any:
    """Return some rows of a column as numpy."""
    if not pa.types.is_binary(spec.schema.field(name).type):
        return _column(spec, table, name)[wanted]
    if name in table.column_names:
        return _to_numpy(table[name].take(pa.array(wanted)))
    return np.zeros(len(wanted) + 1, np.int64), np.zeros(0, np.uint8)


def _column(spec: TableSpec, table: pa.Table, name: str) -> Any:
    """Return a column as numpy, zeros where a tail left it out."""
    field = spec.schema.field(name)
    if name in table.column_names:
        values = _to_numpy(table[name])
        return values.astype(np.int64) if name in spec.narrow else values
    if pa.types.is_binary(field.type):
        return np.zeros(len(table) + 1, np.int64), np.zeros(0, np.uint8)
    return np.zeros(len(table), field.type.to_pandas_dtype())


def _to_numpy(column: pa.ChunkedArray) -> Any:
    if pa.types.is_binary(column.type):
        return _offsets_and_bytes(column)
    if pa.types.is_list(column.type):
        lists = np.empty(len(column), object)
        lists[:] = [tuple(row) for row in column.to_pylist()]
        return lists
    if pa.types.is_string(column.type) or pa.types.is_dictionary(column.type):
        encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        encoded = encoded.unify_dictionaries().combine_chunks()
        if isinstance(encoded, pa.ChunkedArray):
            return np.zeros(0, object)
        return encoded.dictionary.to_numpy(zero_copy_only=False)[encoded.indices.to_numpy()]
    if column.null_count:
        column = pc.fill_null(column, 0)
    return column.to_numpy()


def _offsets_and_bytes(column: pa.ChunkedArray) -> tuple[Any, Any]:
    offsets, pieces, total = [np.zeros(1, np.int64)], [np.zeros(0, np.uint8)], 0
    for chunk in column.chunks:
        _, raw_offsets, raw = chunk.buffers()
        ends = np.frombuffer(raw_offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1].astype(
            np.int64
        )
        pieces.append(np.frombuffer(raw, np.uint8)[ends[0] : ends[-1]] if raw else pieces[0])
        offsets.append(ends[1:] - ends[0] + total)
        total = int(offsets[-1][-1]) if len(chunk) else total
    return np.concatenate(offsets), np.concatenate(pieces)


def arrow_table(columns: Mapping[str, Any]) -> pa.Table:
    """Return numpy columns, or pairs of codes and names, as an Arrow table."""
    arrays = {
        name: pa.DictionaryArray.from_arrays(pa.array(column[0]), pa.array(list(column[1]), pa.string()))
        if isinstance(column, tuple)
        else pa.array(column)
        for name, column in columns.items()
    }
    return pa.table(arrays)


def distinct(values: Any) -> Any:
    """Return the values without repetition, sorted; quick where equal values stand together."""
    is_new = np.ones(len(values), bool)
    is_new[1:] = values[1:] != values[:-1]
    return np.unique(values[is_new])
