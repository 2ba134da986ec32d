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
from functools import partial
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
    from collections.abc import Mapping, Sequence
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
    """How one table looks on disk: columns, the order of rows in a part, encodings, columns with statistics.

    A part always has all columns. A tail leaves out the ``sparse`` ones while they hold nothing but zeros, and keeps
    the ``counts`` in 32 bits while they fit.
    """

    name: str
    schema: pa.Schema
    sort_by: tuple[str, ...]
    encodings: dict[str, str]
    searched: tuple[str, ...]
    counts: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()


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
        counts=tuple(counts),
        sparse=(*NONFINITE, "hash", "hist"),
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


def choose_schema(spec: TableSpec, columns: Mapping[str, Any], before: pa.Schema | None) -> pa.Schema:
    """Return the columns a tail needs for these rows, never fewer or narrower than those of the tail before."""
    fields = []
    types = dict(zip(before.names, before.types, strict=True)) if before is not None else {}
    for field in spec.schema:
        known = types.get(field.name)
        is_needed = field.name not in spec.sparse or _has_content(columns.get(field.name))
        if not is_needed and known is None:
            continue
        is_wide = known == field.type
        if field.name in spec.counts and not is_wide and _fits_32_bits(columns.get(field.name)):
            fields.append(field.with_type(pa.uint32()))
        else:
            fields.append(field)
    return pa.schema(fields, spec.schema.metadata)


def _has_content(column: Any) -> bool:
    return column is not None and (isinstance(column, tuple) or bool(column.any()))


def _fits_32_bits(column: Any) -> bool:
    return column is None or not len(column) or int(column.max()) < 1 << 32


def tail_header(schema: pa.Schema) -> bytes:
    """Return the bytes a tail begins with: its schema."""
    return bytes(schema.serialize())


def encode_batch(schema: pa.Schema, columns: Mapping[str, Any]) -> memoryview:
    """Return the bytes of one flush, ready to be appended to a tail, with a checksum."""
    arrays = [_to_arrow(columns.get(field.name), field, len(columns["step"])) for field in schema]
    return _message(pa.RecordBatch.from_arrays(arrays, schema=schema))


_UNSIGNED: Final = b"?" * 10


def _message(batch: pa.RecordBatch) -> memoryview:
    """Return the bytes of a batch; its checksum, over all of them, is written where the question marks stood."""
    header = batch.schema.serialize().size
    space = pa.allocate_buffer(header + pa.ipc.get_record_batch_size(batch) + 4096)
    sink = pa.FixedSizeBufferWriter(space)
    writer = pa.ipc.new_stream(sink, batch.schema)
    writer.write_batch(batch, custom_metadata={"crc": _UNSIGNED})
    end = sink.tell()  # without the end-of-stream mark that closing adds: the tail goes on
    writer.close()
    message = memoryview(space).cast("B")[header:end]
    place = _find(message, _UNSIGNED)
    message[place : place + 10] = b"%010d" % zlib.crc32(message)
    return message


def _find(message: memoryview, text: bytes) -> int:
    """Return where a text stands in the head of a message."""
    length = int.from_bytes(message[4:8], "little")
    return bytes(message[: 8 + length]).find(text)


def _is_sound(message: memoryview, note: Mapping[bytes, bytes] | None) -> bool:
    """Say whether a message is the one that was written."""
    signed = note.get(b"crc", b"") if note is not None else b""
    place = _find(message, signed)
    if len(signed) != 10 or place < 0:
        return False
    crc = zlib.crc32(message[place + 10 :], zlib.crc32(_UNSIGNED, zlib.crc32(message[:place])))
    return signed == b"%010d" % crc


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
    if isinstance(column, np.ndarray):
        column = column.astype(field.type.to_pandas_dtype(), copy=False)
    return pa.array(column, field.type)


@dataclass(frozen=True)
class TailContent:
    """What could be read of a tail: whole batches, where they begin and end, and what is damaged."""

    batches: list[pa.RecordBatch]
    start: int = 0
    end: int = 0
    damage: str = ""


_TORN = re.compile(r"Expected to (be able to )?read|bytes available|was null or length 0")


def decode_tail(spec: TableSpec, data: pa.Buffer | bytes) -> TailContent:
    """Read the batches of a tail that starts with its header; a torn last batch is dropped in silence."""
    source = pa.BufferReader(data)
    view = memoryview(data).cast("B")
    batches: list[pa.RecordBatch] = []
    start, end, damage = 0, 0, ""
    try:
        reader = pa.ipc.open_stream(source)
        if not set(reader.schema.names) <= set(spec.schema.names):
            return TailContent([], damage="its columns are not those of this format")
        start = end = source.tell()
        while True:
            batch, note = reader.read_next_batch_with_custom_metadata()
            start_of_batch, end = end, source.tell()
            if _is_sound(view[start_of_batch:end], note):
                batches.append(batch)
            else:
                damage = f"the batch at byte {start_of_batch} does not match its checksum"
    except StopIteration:
        pass
    except ReadError as error:
        if not _TORN.search(str(error)):
            damage = f"unreadable from byte {end} on ({_first_line(error)})"
    return TailContent(batches, start, end, damage)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def merge_batches(batches: Sequence[pa.RecordBatch]) -> bytes:
    """Return a tail with the rows of many batches in one: a tail of many small flushes stays quick to read."""
    merged = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return b"".join([tail_header(batches[0].schema), *(_message(batch) for batch in merged)])


def select_rows(
    spec: TableSpec, batches: Sequence[pa.RecordBatch], columns: Sequence[str], rows: Rows
) -> Columns:
    """Return columns of the wanted rows of a tail as numpy arrays; without batches, columns of no rows."""
    schema = batches[0].schema if batches else spec.schema
    return _select(spec, pa.Table.from_batches(batches, schema), columns, rows)


# --- the sealed part --------------------------------------------------------------------------------------------


def seal(spec: TableSpec, tail: Path, part: Path) -> int:
    """Write the rows of a finished tail as a Parquet part, sorted; returns its bytes.

    The part appears under its name only when it is whole and on disk.
    """
    columns, notes = _read_sorted(spec, tail)
    temporary = part.with_name(f".{part.name}.tmp")
    try:
        with temporary.open("wb") as file:
            _write_part(spec, columns, file, notes=notes)
            file.flush()
            os.fsync(file.fileno())
        size = temporary.stat().st_size
        temporary.replace(part)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size


def _read_sorted(spec: TableSpec, tail: Path) -> tuple[dict[str, pa.Array], dict[bytes, bytes]]:
    """Return the columns a tail has in the order of a part, and what a reader wants to know without reading them."""
    with pa.memory_map(str(tail)) as source:
        content = decode_tail(spec, source.read_buffer())
        if content.damage or content.end != source.size():
            raise ValueError(f"{tail} is not what was written: {content.damage or 'it is cut'}")
        table = pa.Table.from_batches(content.batches)
        order = _order(spec, table)
        scratch = np.empty(len(order), np.int64)
        notes = {b"clew.steps": write_steps(batch_steps(content.batches)).encode()}
        if "kind" in table.column_names:
            pairs = sorted(batch_pairs(content.batches))
            notes[b"clew.recorded"] = ",".join(f"{site}:{kind}" for site, kind in pairs).encode()
        notes[b"clew.crc"] = _notes_checksum(notes)
        return {name: _sorted_column(table[name], order, scratch) for name in table.column_names}, notes


def _notes_checksum(notes: Mapping[bytes, bytes]) -> bytes:
    """Return the checksum of the notes in a part's footer, which Parquet itself does not protect."""
    return b"%d" % zlib.crc32(notes.get(b"clew.recorded", b""), zlib.crc32(notes.get(b"clew.steps", b"")))


def _sorted_column(column: pa.ChunkedArray, order: Any, scratch: Any) -> pa.Array:
    if column.null_count or not pa.types.is_primitive(column.type):
        return column.combine_chunks().take(pa.array(order))
    # Chunks are joined in memory that is used again for each column: fresh pages cost more than the copy.
    pieces = [chunk.to_numpy() for chunk in column.chunks]
    joined = np.concatenate(pieces, out=scratch.view(pieces[0].dtype)[: len(order)])
    return pa.array(joined[order])


def _write_part(
    spec: TableSpec, columns: dict[str, pa.Array], file: Any, *, notes: dict[bytes, bytes]
) -> None:
    """Write one row group after the other, so that only one is ever held in the wide form of the part."""
    schema = spec.schema.with_metadata({**spec.schema.metadata, **notes})
    with pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name in schema.names if name not in spec.encodings],
        column_encoding=spec.encodings,
        write_statistics=list(spec.searched),
        write_page_checksum=True,
    ) as writer:
        for start in range(0, len(columns["step"]), ROW_GROUP):
            group = {name: column.slice(start, ROW_GROUP) for name, column in columns.items()}
            arrays = [_widen(group.get(field.name), field, len(group["step"])) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _widen(column: pa.Array | None, field: pa.Field, rows: int) -> pa.Array:
    """Return a column in the type of the part, zeros or nulls where the tail left it out."""
    if column is not None:
        return column.cast(field.type)
    return pa.nulls(rows, field.type) if field.nullable else pa.array(np.zeros(rows, np.int64))


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


def _distinct(values: Any) -> Any:
    """Return the values without repetition, sorted; quick where equal values stand together."""
    is_new = np.ones(len(values), bool)
    is_new[1:] = values[1:] != values[:-1]
    return np.unique(values[is_new])


def batch_steps(batches: Sequence[pa.RecordBatch]) -> Any:
    """Return the steps that have a row in the batches, sorted."""
    return _distinct(_joined_column(batches, "step"))


def batch_pairs(batches: Sequence[pa.RecordBatch]) -> set[tuple[int, int]]:
    """Return which kinds were recorded at which sites."""
    keys = _joined_column(batches, "site") * 256 + _joined_column(batches, "kind")
    is_dense = len(keys) > 0 and keys.max() < 1 << 22
    distinct = np.flatnonzero(np.bincount(keys)) if is_dense else np.unique(keys)
    return {divmod(key, 256) for key in distinct.tolist()}


def _joined_column(batches: Sequence[pa.RecordBatch], name: str) -> Any:
    return np.concatenate([np.zeros(0, np.int64), *(batch[name].to_numpy() for batch in batches)])


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
        if known.get(b"clew.crc") != _notes_checksum(known):
            raise ValueError("its list of steps does not match its checksum")
        self.steps = read_steps(known[b"clew.steps"].decode())
        self.recorded = known.get(b"clew.recorded", b"").decode()
        """Which kinds were recorded at which sites, as ``site:kind`` joined by commas."""
        self._groups = [self.metadata.row_group(index) for index in range(self.metadata.num_row_groups)]
        self._places = {name: index for index, name in enumerate(self.metadata.schema.names)}

    def read(self, columns: Sequence[str], rows: Rows) -> Columns | None:
        """Return columns of the wanted rows as numpy arrays, or None when there can be none."""
        if not len(self.steps) or not rows.overlaps(int(self.steps[0]), int(self.steps[-1])):
            return None
        wanted = [
            index
            for index, group in enumerate(self._groups)
            if not rows.excludes(partial(self._bounds, group))
        ]
        if not wanted:
            return None
        text = [field.name for field in self.spec.schema if pa.types.is_string(field.type)]
        with pq.ParquetFile(
            self.path,
            metadata=self.metadata,
            read_dictionary=text,
            page_checksum_verification=True,
            pre_buffer=False,
        ) as file:
            table = file.read_row_groups(wanted, columns=_needed(columns, rows), use_threads=False)
        return _select(self.spec, table, columns, rows)

    def _bounds(self, group: Any, column: str) -> tuple[Any, Any] | None:
        """Return the smallest and largest value of a column in a row group, None when they were not kept."""
        if column not in self.spec.searched:
            return None
        statistics = group.column(self._places[column]).statistics
        return (statistics.min, statistics.max) if statistics is not None and statistics.has_min_max else None


def read_pairs(recorded: str) -> set[tuple[int, int]]:
    """Return the pairs of site and kind of ``Part.recorded``."""
    pairs = (pair.split(":") for pair in recorded.split(",") if pair)
    return {(int(site), int(kind)) for site, kind in pairs}


# --- from Arrow to numpy ----------------------------------------------------------------------------------------


def _needed(columns: Sequence[str], rows: Rows) -> list[str]:
    return list(dict.fromkeys([*columns, *rows.columns]))


def _select(spec: TableSpec, table: pa.Table, columns: Sequence[str], rows: Rows) -> Columns:
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
        return values.astype(np.int64) if name in spec.counts else values
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
