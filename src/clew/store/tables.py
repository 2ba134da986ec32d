"""The tables of a run on disk: the one file that knows Arrow and Parquet.

A table grows as an Arrow IPC stream (the tail), one record batch for each flush, and is sealed into a Parquet part:
rows sorted so that one site's series is contiguous, floats byte-stream-split, integers delta- or
dictionary-encoded, with row-group statistics for the columns one searches by. Rows enter and leave as
numpy columns.
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

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
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from clew.store.rows import Rows

STORED_STATS: Final = tuple(name for name in STAT_NAMES if name not in DERIVED_STATS)
ROW_GROUP: Final = 65_536

Columns = dict[str, Any]
"""Numpy arrays by column name; columns of text, bytes or lists are Arrow arrays until a reader asks for them."""

ReadError = (pa.ArrowException, OSError, ValueError)
"""What reading a damaged file raises."""


@dataclass(frozen=True)
class TableSpec:
    """How one table looks on disk: columns, the order of rows in a part, encodings, columns with statistics."""

    name: str
    schema: pa.Schema
    sort_by: tuple[str, ...]
    encodings: dict[str, str]
    searched: tuple[str, ...]


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
    encodings |= dict.fromkeys(values, "BYTE_STREAM_SPLIT") | {"hash": "PLAIN", "hist": "PLAIN"}
    return TableSpec(
        "stats",
        pa.schema(fields, _metadata(**{"clew.kinds": ",".join(KINDS), "clew.modes": ",".join(MODES)})),
        ("site", "kind", "ordinal", "step", "seq"),
        encodings,
        ("step", "site", "kind", *NONFINITE),
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


# --- the tail ---------------------------------------------------------------------------------------------------


def tail_header(spec: TableSpec) -> bytes:
    """Return the bytes a tail begins with: its schema."""
    return bytes(spec.schema.serialize())


def encode_batch(spec: TableSpec, columns: Mapping[str, Any]) -> bytes:
    """Return the bytes of one flush, ready to be appended to a tail, with a checksum."""
    arrays = [_to_arrow(columns.get(field.name), field, len(columns["step"])) for field in spec.schema]
    return _message(spec, pa.RecordBatch.from_arrays(arrays, schema=spec.schema))


def _message(spec: TableSpec, batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, spec.schema)
    writer.write_batch(batch, custom_metadata={"crc": str(_checksum(batch))})
    end = sink.tell()  # without the end-of-stream mark that closing adds: the tail goes on
    writer.close()
    return bytes(sink.getvalue()[len(tail_header(spec)) : end])


def _checksum(batch: pa.RecordBatch) -> int:
    value = 0
    for column in batch.columns:
        for buffer in column.buffers():
            if buffer is not None:
                value = zlib.crc32(buffer, value)
    return value


def _to_arrow(column: Any, field: pa.Field, rows: int) -> pa.Array:
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
    return pa.array(column, field.type)


@dataclass(frozen=True)
class TailContent:
    """What could be read of a tail: whole batches, where the next one will begin, and what is damaged."""

    batches: list[pa.RecordBatch]
    end: int
    damage: str = ""


_TORN = re.compile(r"Expected to (be able to )?read|bytes available|was null or length 0")


def decode_tail(spec: TableSpec, data: pa.Buffer | bytes) -> TailContent:
    """Read the batches of a tail that starts with its header; a torn last batch is dropped in silence."""
    source = pa.BufferReader(data)
    batches: list[pa.RecordBatch] = []
    end, damage = 0, ""
    try:
        reader = pa.ipc.open_stream(source)
        if not reader.schema.equals(spec.schema):
            return TailContent([], 0, "its columns are not those of this format")
        end = source.tell()
        while True:
            batch, note = reader.read_next_batch_with_custom_metadata()
            if note is None or note.get(b"crc") != str(_checksum(batch)).encode():
                damage = f"the batch at byte {end} does not match its checksum"
            else:
                batches.append(batch)
            end = source.tell()
    except StopIteration:
        pass
    except ReadError as error:
        if not _TORN.search(str(error)):
            damage = f"unreadable from byte {end} on ({_first_line(error)})"
    return TailContent(batches, end, damage)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def merge_batches(spec: TableSpec, batches: Sequence[pa.RecordBatch]) -> bytes:
    """Return one batch with the rows of many: a tail of many small flushes stays quick to read."""
    table = pa.Table.from_batches(batches, spec.schema).combine_chunks()
    return b"".join(_message(spec, batch) for batch in table.to_batches())


def empty_batch(spec: TableSpec) -> pa.RecordBatch:
    """Return a batch without rows, for tables in which nothing was recorded."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in spec.schema], schema=spec.schema)


def select_rows(batches: Sequence[pa.RecordBatch], columns: Sequence[str], rows: Rows) -> Columns:
    """Return columns of the wanted rows of a tail as numpy arrays."""
    return _select(pa.Table.from_batches(batches).select(_needed(columns, rows)), columns, rows)


# --- the sealed part --------------------------------------------------------------------------------------------


def seal(spec: TableSpec, tail: Path, part: Path) -> int:
    """Write the rows of a finished tail as a Parquet part, sorted; returns its bytes.

    The part appears under its name only when it is whole and on disk.
    """
    with pa.memory_map(str(tail)) as source:
        content = decode_tail(spec, source.read_buffer())
        if content.damage or content.end != source.size():
            raise ValueError(f"{tail} is not what was written: {content.damage or 'it is cut'}")
        table = _sorted_table(spec, content.batches)
        del content
    temporary = part.with_name(f".{part.name}.tmp")
    try:
        with temporary.open("wb") as file:
            _write_parquet(spec, table, file)
            file.flush()
            os.fsync(file.fileno())
        size = temporary.stat().st_size
        temporary.replace(part)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size


def _write_parquet(spec: TableSpec, table: pa.Table, file: Any) -> None:
    plain = [name for name in table.column_names if name not in spec.encodings]
    pq.write_table(
        table,
        file,
        row_group_size=ROW_GROUP,
        compression="zstd",
        compression_level=1,
        use_dictionary=plain,
        column_encoding=spec.encodings,
        write_statistics=list(spec.searched),
        write_page_checksum=True,
    )


def _sorted_table(spec: TableSpec, batches: list[pa.RecordBatch]) -> pa.Table:
    table = pa.Table.from_batches(batches, spec.schema)
    order = _order(spec, table)
    arrays = []
    for field, column in zip(spec.schema, table.columns, strict=True):
        if pa.types.is_primitive(field.type) and not field.nullable:
            values = np.concatenate([chunk.to_numpy() for chunk in column.chunks])
            arrays.append(pa.array(values[order]))
        elif column.null_count == len(column):
            arrays.append(pa.nulls(len(column), field.type))
        else:
            arrays.append(column.combine_chunks().take(pa.array(order)))
    return pa.Table.from_arrays(arrays, schema=spec.schema.with_metadata(_part_metadata(spec, batches)))


def _part_metadata(spec: TableSpec, batches: list[pa.RecordBatch]) -> dict[bytes, bytes]:
    """Return what a reader wants to know of a part without reading its columns."""
    metadata = {**spec.schema.metadata, b"clew.steps": write_steps(batch_steps(batches)).encode()}
    if "kind" in spec.schema.names:
        metadata[b"clew.recorded"] = ",".join(
            f"{site}:{kind}" for site, kind in batch_pairs(batches)
        ).encode()
    return metadata


def batch_steps(batches: Sequence[pa.RecordBatch]) -> Any:
    """Return the steps that have a row in the batches, sorted."""
    found = [np.unique(batch["step"].to_numpy()) for batch in batches]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)


def batch_pairs(batches: Sequence[pa.RecordBatch]) -> list[tuple[int, int]]:
    """Return which kinds were recorded at which sites, sorted."""
    found = [np.zeros(0, np.int64)]
    found += [
        np.unique(batch["site"].to_numpy().astype(np.int64) * 256 + batch["kind"].to_numpy())
        for batch in batches
    ]
    return [divmod(pair, 256) for pair in np.unique(np.concatenate(found)).tolist()]


def _order(spec: TableSpec, table: pa.Table) -> Any:
    """Return the permutation that sorts by the keys; rows arrive in order of (step, seq), so the sort is stable."""
    keys = [_sort_key(table[name]) for name in reversed(spec.sort_by) if name not in ("step", "seq")]
    steps = table["step"].to_numpy()
    if np.any(np.diff(steps) < 0):
        keys.insert(0, steps)
    return np.lexsort(keys)


def _sort_key(column: pa.ChunkedArray) -> Any:
    """Return a column as integers, of 16 bits where they fit: numpy sorts those by radix, many times faster."""
    if pa.types.is_string(column.type):
        encoded = column.combine_chunks().dictionary_encode()
        ranks = np.argsort(np.argsort(encoded.dictionary.to_numpy(zero_copy_only=False)))
        values = ranks[encoded.indices.to_numpy()]
    else:
        values = column.to_numpy()
    fits = len(values) == 0 or (values.min() >= 0 and values.max() < 65_536)
    return values.astype(np.uint16) if fits else values


def write_steps(steps: Any) -> str:
    """Return sorted steps as runs ``first:stop:stride`` joined by commas."""
    runs: list[str] = []
    start = 0
    while start < len(steps):
        stride = int(steps[start + 1] - steps[start]) if start + 1 < len(steps) else 1
        breaks = np.flatnonzero(np.diff(steps[start:]) != stride)
        end = start + int(breaks[0]) + 1 if len(breaks) else len(steps)
        runs.append(f"{steps[start]}:{steps[end - 1] + 1}:{stride}")
        start = end
    return ",".join(runs)


def read_steps(text: str) -> Any:
    """Return the steps of ``write_steps``."""
    runs = [np.arange(*map(int, run.split(":")), dtype=np.int64) for run in text.split(",") if run]
    return np.concatenate(runs) if runs else np.zeros(0, np.int64)


class Part:
    """A sealed part: its footer is read once, its columns when asked."""

    def __init__(self, spec: TableSpec, path: Path) -> None:
        self.spec = spec
        self.path = path
        self.metadata = pq.read_metadata(path)
        known = self.metadata.metadata or {}
        if b"clew.steps" not in known:
            raise ValueError("it has no list of steps")
        self.steps = read_steps(known[b"clew.steps"].decode())
        self._recorded = known.get(b"clew.recorded", b"").decode()
        self._bounds: list[dict[str, tuple[Any, Any]]] | None = None

    def read(self, columns: Sequence[str], rows: Rows) -> Columns | None:
        """Return columns of the wanted rows as numpy arrays, or None when there can be none."""
        if not len(self.steps) or not rows.overlaps(int(self.steps[0]), int(self.steps[-1])):
            return None
        wanted = [index for index, bounds in enumerate(self.bounds) if not rows.excludes(bounds)]
        if not wanted:
            return None
        text = [field.name for field in self.spec.schema if pa.types.is_string(field.type)]
        with pq.ParquetFile(
            self.path, metadata=self.metadata, read_dictionary=text, page_checksum_verification=True
        ) as file:
            table = file.read_row_groups(wanted, columns=_needed(columns, rows), use_threads=False)
        return _select(table, columns, rows)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Which kinds were recorded at which sites."""
        pairs = (pair.split(":") for pair in self._recorded.split(",") if pair)
        return [(int(site), int(kind)) for site, kind in pairs]

    @property
    def bounds(self) -> list[dict[str, tuple[Any, Any]]]:
        """Smallest and largest value of the searched columns, for each row group."""
        if self._bounds is None:
            names = self.metadata.schema.names
            places = [(names.index(name), name) for name in self.spec.searched]
            groups = (self.metadata.row_group(index) for index in range(self.metadata.num_row_groups))
            self._bounds = [dict(_column_bounds(group, places)) for group in groups]
        return self._bounds


def _column_bounds(group: Any, places: list[tuple[int, str]]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for index, name in places:
        statistics = group.column(index).statistics
        if statistics is not None and statistics.has_min_max:
            yield name, (statistics.min, statistics.max)


# --- from Arrow to numpy ----------------------------------------------------------------------------------------


def _needed(columns: Sequence[str], rows: Rows) -> list[str]:
    return list(dict.fromkeys([*columns, *rows.columns]))


def _select(table: pa.Table, columns: Sequence[str], rows: Rows) -> Columns:
    mask = rows.mask({name: _to_numpy(table[name]) for name in rows.columns})
    if mask is not None:
        wanted = np.flatnonzero(mask)
        is_run = len(wanted) and wanted[-1] - wanted[0] + 1 == len(wanted)
        # One site's rows are contiguous in a part: a slice copies nothing.
        table = table.slice(wanted[0], len(wanted)) if is_run else table.take(pa.array(wanted))
    return {name: _to_numpy(table[name]) for name in columns}


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


def write_parquet(columns: Mapping[str, Any], path: Path) -> None:
    """Write columns as one Parquet file for other tools."""
    pq.write_table(arrow_table(columns), path, compression="zstd")
