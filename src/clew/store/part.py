"""A sealed piece of a table: a Parquet file that any tool reads, and that answers quickly for one site.

Its rows are sorted by what one searches for. Its footer holds, besides Parquet's own statistics, the steps it has
rows of (``clew.steps``) and, for statistics of tensors, which rows belong to which site and kind (``clew.series``),
signed by ``clew.crc``.
"""

from __future__ import annotations

import base64
import os
import zlib
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clew.store.arrange import ROW_GROUP, find_arrangement
from clew.store.rows import Rows
from clew.store.tables import needed, select
from clew.store.tail import decode_tail

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from clew.store.arrange import Arrangement
    from clew.store.tables import Columns, TableSpec

MOST_RANGES: Final = 64
"""With more stretches of wanted rows than these, reading everything and choosing is quicker."""


def seal(spec: TableSpec, tail: Path, part: Path) -> int:
    """Write the rows of a finished tail as a Parquet part, sorted; returns its bytes.

    The part appears under its name only when it is whole and on disk.
    """
    temporary = part.with_name(f".{part.name}.tmp")
    try:
        with pa.memory_map(str(tail)) as source, temporary.open("wb") as file:
            _write_part(spec, _read_whole(spec, source, tail), file)
            file.flush()
            os.fsync(file.fileno())
        size = temporary.stat().st_size
        temporary.replace(part)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size


def _read_whole(spec: TableSpec, source: Any, tail: Path) -> pa.Table:
    content = decode_tail(spec, source.read_buffer())
    if content.damage or content.end != source.size():
        raise ValueError(f"{tail} is not what was written: {content.damage or 'it is cut'}")
    return pa.Table.from_batches(content.batches)


def _write_part(spec: TableSpec, table: pa.Table, file: Any) -> None:
    """Write one piece after the other, so that only one is ever held in the wide form of the part."""
    arrangement = find_arrangement(spec, table)
    schema = spec.schema.with_metadata({**spec.schema.metadata, **_describe(table, arrangement)})
    with pq.ParquetWriter(
        file,
        schema,
        compression={name: spec.codecs.get(name, "lz4") for name in schema.names},
        use_dictionary=[name for name in schema.names if name not in spec.encodings],
        column_encoding=spec.encodings,
        write_statistics=list(spec.searched),
        write_page_checksum=True,
        write_batch_size=ROW_GROUP,
    ) as writer:
        missing = [field for field in schema if field.name not in table.column_names]
        empty: dict[str, pa.Array] = {}
        for piece in arrangement.pieces(table):
            rows = len(piece["step"])
            if any(len(empty.get(field.name, ())) < rows for field in missing):
                empty = {field.name: _make_empty(field, rows) for field in missing}
            arrays = [_widen(piece.get(field.name), field, empty, rows) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), ROW_GROUP)


def write_parquet(tables: Iterable[pa.Table], path: Path) -> None:
    """Write tables of the same columns one below the other into a file for other tools."""
    writer = None
    try:
        for table in tables:
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _make_empty(field: pa.Field, rows: int) -> pa.Array:
    """Return zeros, or nulls, for a column that the tail left out."""
    return pa.nulls(rows, field.type) if field.nullable else pa.array(np.zeros(rows, np.int64))


def _widen(column: pa.Array | None, field: pa.Field, empty: Mapping[str, pa.Array], rows: int) -> pa.Array:
    """Return a column in the type of the part."""
    return empty[field.name].slice(0, rows) if column is None else column.cast(field.type)


def _describe(table: pa.Table, arrangement: Arrangement) -> dict[bytes, bytes]:
    """Return the notes for the footer of a part."""
    notes = {b"clew.steps": write_steps(arrangement.find_steps(table)).encode()}
    if "kind" in table.column_names:
        site, kind = (arrangement.arrange(table[name]) for name in ("site", "kind"))
        is_new = (site[1:] != site[:-1]) | (kind[1:] != kind[:-1])
        starts = np.concatenate(([0], np.flatnonzero(is_new) + 1))
        lengths = np.diff(np.append(starts, len(site))) * arrangement.times
        index = np.stack([site[starts], kind[starts], lengths], axis=1)
        notes[b"clew.series"] = base64.b64encode(index.astype("<i4").tobytes())
    return {**notes, b"clew.crc": _sign(notes)}


def _sign(notes: Mapping[bytes, bytes]) -> bytes:
    """Return the checksum of the notes in a footer, which Parquet itself does not protect."""
    return b"%d" % zlib.crc32(notes.get(b"clew.series", b""), zlib.crc32(notes.get(b"clew.steps", b"")))


def write_steps(steps: Any) -> str:
    """Return sorted steps as runs ``first:stop:stride`` joined by commas."""
    gaps = np.diff(steps)
    changes = np.append(np.flatnonzero(gaps[1:] != gaps[:-1]) + 1, len(gaps))
    runs: list[str] = []
    start = 0
    while start < len(steps):
        stride = int(gaps[start]) if start < len(gaps) else 1
        end = int(changes[np.searchsorted(changes, start, side="right")]) if start < len(gaps) else start
        runs.append(f"{steps[start]}:{steps[end] + 1}:{stride}")
        start = end + 1
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
        if known.get(b"clew.crc") != _sign(known):
            raise ValueError("its notes do not match their checksum")
        self.steps = read_steps(known[b"clew.steps"].decode())
        self.series = known.get(b"clew.series", b"")
        """Which rows belong to which site and kind, as written; equal in most parts of a run."""
        self._groups = [self.metadata.row_group(index) for index in range(self.metadata.num_row_groups)]
        self._places = {name: index for index, name in enumerate(self.metadata.schema.names)}
        flat = [field.name for field in spec.schema if not pa.types.is_list(field.type)]
        if not self._places.keys() >= set(flat):
            raise ValueError("its columns are not those of this format")

    def read(self, columns: Sequence[str], rows: Rows) -> Columns | None:
        """Return columns of the wanted rows as numpy arrays, or None when there can be none."""
        if not len(self.steps) or not rows.overlaps(int(self.steps[0]), int(self.steps[-1])):
            return None
        ranges = self._ranges(rows)
        groups = [index for index in self._touched(ranges) if not rows.excludes(partial(self._bounds, index))]
        if not groups:
            return None
        if ranges is None:
            return select(self.spec, self._read_groups(groups, needed(columns, rows)), columns, rows)
        # The index has chosen site and kind: these columns need not be read, only what is left to decide.
        rest = replace(rows, site=None, kind=None)
        table = self._read_groups(groups, needed(columns, rest))
        return select(self.spec, self._slice(table, groups, ranges), columns, rest)

    def _read_groups(self, groups: list[int], columns: list[str]) -> pa.Table:
        text = [field.name for field in self.spec.schema if pa.types.is_string(field.type)]
        with pq.ParquetFile(
            self.path,
            metadata=self.metadata,
            read_dictionary=text,
            page_checksum_verification=True,
            pre_buffer=False,
        ) as file:
            return file.read_row_groups(groups, columns=columns, use_threads=False)

    @cached_property
    def _edges(self) -> list[int]:
        """The first row of each row group, and the number of all rows."""
        return list(accumulate((group.num_rows for group in self._groups), initial=0))

    def _ranges(self, rows: Rows) -> list[tuple[int, int]] | None:
        """Return the stretches of rows that have the wanted sites and kinds, None when the index does not help."""
        if not self.series or (rows.site is None and rows.kind is None):
            return None
        index = read_index(self.series)
        ends = np.cumsum(index[:, 2], dtype=np.int64)
        mask = Rows(site=rows.site, kind=rows.kind).mask({"site": index[:, 0], "kind": index[:, 1]})
        wanted = np.flatnonzero(np.asarray(mask))
        breaks = np.flatnonzero(np.diff(wanted) != 1) + 1
        runs = [run for run in np.split(wanted, breaks) if len(run)]
        if len(runs) > MOST_RANGES:
            return None
        return [(int(ends[run[0]] - index[run[0], 2]), int(ends[run[-1]])) for run in runs]

    def _touched(self, ranges: list[tuple[int, int]] | None) -> list[int]:
        """Return the row groups that hold any row of the ranges."""
        bounds = enumerate(zip(self._edges, self._edges[1:], strict=False))
        if ranges is None:
            return [index for index, _ in bounds]
        return [
            index
            for index, (first, stop) in bounds
            if any(start < stop and first < end for start, end in ranges)
        ]

    def _slice(self, table: pa.Table, groups: list[int], ranges: list[tuple[int, int]]) -> pa.Table:
        """Return the rows of the ranges from a table of some row groups."""
        pieces, offset = [], 0
        for group in groups:
            first, stop = self._edges[group], self._edges[group + 1]
            for start, end in ranges:
                low, high = max(start, first), min(end, stop)
                if low < high:
                    pieces.append(table.slice(offset + low - first, high - low))
            offset += stop - first
        return pa.concat_tables(pieces)

    def _bounds(self, group: int, column: str) -> tuple[Any, Any] | None:
        """Return the smallest and largest value of a column in a row group, None when they were not kept."""
        if column not in self.spec.searched:
            return None
        statistics = self._groups[group].column(self._places[column]).statistics
        return (statistics.min, statistics.max) if statistics is not None and statistics.has_min_max else None


def read_index(series: bytes) -> Any:
    """Return rows of site, kind and number of rows, in the order of the part, from ``Part.series``."""
    return np.frombuffer(base64.b64decode(series), "<i4").reshape(-1, 3)


def read_pairs(series: bytes) -> set[tuple[int, int]]:
    """Return which kinds were recorded at which sites from ``Part.series``."""
    return {(site, kind) for site, kind, _ in read_index(series).tolist()}
