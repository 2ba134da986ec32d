"""The growing end of a table: an Arrow IPC stream, one signed record batch for each flush.

What is written is never changed; a batch that a kill has cut off is recognised and left out on reading.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from clew.store.checksum import crc32
from clew.store.tables import ReadError, distinct, select, to_array

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clew.store.rows import Rows
    from clew.store.tables import Columns, TableSpec


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
        if field.name in spec.narrow and not is_wide and _fits_32_bits(columns.get(field.name)):
            fields.append(field.with_type(pa.uint32()))
        else:
            fields.append(field)
    return pa.schema(fields, spec.schema.metadata)


def _has_content(column: Any) -> bool:
    return column is not None and (isinstance(column, tuple) or bool(column.any()))


def _fits_32_bits(column: Any) -> bool:
    is_narrow = column is None or column.dtype == np.uint32 or not len(column)
    return is_narrow or 0 <= int(column.min()) <= int(column.max()) < 1 << 32


def tail_header(schema: pa.Schema) -> bytes:
    """Return the bytes a tail begins with: its schema."""
    return bytes(schema.serialize())


def encode_batch(schema: pa.Schema, columns: Mapping[str, Any]) -> memoryview:
    """Return the bytes of one flush, ready to be appended to a tail, with a checksum."""
    arrays = [to_array(columns.get(field.name), field, len(columns["step"])) for field in schema]
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
    message[place : place + 10] = b"%010d" % crc32(message)
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
    crc = crc32(message[place + 10 :], crc32(_UNSIGNED, crc32(message[:place])))
    return signed == b"%010d" % crc


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
    return select(spec, pa.Table.from_batches(batches, schema), columns, rows)


def batch_steps(batches: Sequence[pa.RecordBatch]) -> Any:
    """Return the steps that have a row in the batches, sorted."""
    return distinct(_joined_column(batches, "step"))


def batch_pairs(batches: Sequence[pa.RecordBatch]) -> set[tuple[int, int]]:
    """Return which kinds were recorded at which sites."""
    keys = _joined_column(batches, "site") * 256 + _joined_column(batches, "kind")
    is_dense = len(keys) > 0 and keys.max() < 1 << 22
    found = np.flatnonzero(np.bincount(keys)) if is_dense else np.unique(keys)
    return {divmod(key, 256) for key in found.tolist()}


def _joined_column(batches: Sequence[pa.RecordBatch], name: str) -> Any:
    return np.concatenate([np.zeros(0, np.int64), *(batch[name].to_numpy() for batch in batches)])
