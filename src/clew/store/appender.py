"""One table of one rank as it grows: a tail that takes flushes, sealed into a part when it is long enough.

Generation ``g`` of a table lives first in ``tail-g`` and then, with the same rows, in ``part-g``. The part is renamed
into place before the tail is removed, so a reader that reads the tails *before* it lists the parts, and drops
the tails that have a part, sees every row exactly once at any moment.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from clew.store import layout, tail
from clew.store.part import seal

if TYPE_CHECKING:
    from pathlib import Path

    from clew.store.tables import Columns, TableSpec

PART_BYTES: Final = 64 << 20
MERGE_AFTER: Final = 256
"""So many flushes in one tail are joined into one batch: each costs a reader some microseconds."""


class Appender:
    """Appends rows to a table. ``append`` and ``rotate`` belong to one thread, ``seal_waiting`` may have another."""

    def __init__(
        self, rank_folder: Path, spec: TableSpec, *, part_rows: int, part_bytes: int = PART_BYTES
    ) -> None:
        self.spec = spec
        self.folder = rank_folder / spec.name
        self.folder.mkdir()
        self.part_rows = part_rows
        self.part_bytes = part_bytes
        self.sealed_bytes = 0
        self._waiting: deque[tuple[int, int]] = deque()
        self._sealing = threading.Lock()
        self._schema: Any = None
        self._generation = 0
        self._descriptor = -1
        self._size = self._rows = self._batches = 0
        self._before: tuple[int, int, int] | None = None

    @property
    def tail_bytes(self) -> int:
        """Bytes of all tails, the growing one and those that wait to be sealed."""
        return self._size + sum(size for _, size in tuple(self._waiting))

    @property
    def is_waiting(self) -> bool:
        """Whether a finished tail waits to be sealed."""
        return bool(self._waiting)

    def append(self, columns: Columns) -> None:
        """Append rows as one batch; when the disk refuses, OSError goes on and no piece of the batch stays."""
        schema = tail.choose_schema(self.spec, columns, self._schema)
        if schema != self._schema:
            self.rotate()
            self._schema = schema
        data = tail.encode_batch(schema, columns)
        if self._descriptor < 0:
            path = layout.tail_path(self.folder, self._generation)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            self._write(tail.tail_header(schema))
        self._before = (self._size, self._rows, self._batches)
        self._write(data)
        self._rows += len(columns["step"])
        self._batches += 1
        if self._rows >= self.part_rows or self._size >= self.part_bytes:
            self.rotate()
        elif self._batches >= MERGE_AFTER:
            self._merge_tail()

    def take_back(self) -> None:
        """Take the last batch back, unless the tail has been ended or rewritten since: another table has no room."""
        if self._descriptor >= 0 and self._before is not None:
            self._size, self._rows, self._batches = self._before
            self._before = None
            os.ftruncate(self._descriptor, self._size)

    def _write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def rotate(self) -> None:
        """End the growing tail: it waits to be sealed and the next row starts a new generation."""
        if self._descriptor < 0:
            return
        self.release()
        self._waiting.append((self._generation, self._size))
        self._generation += 1
        self._size = self._rows = self._batches = 0
        self._before = None

    def release(self) -> None:
        """Close the growing tail's file without touching what is in it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _merge_tail(self) -> None:
        """Rewrite a tail of many small batches as one batch, in one step: a reader sees the old file or the new one."""
        path = layout.tail_path(self.folder, self._generation)
        batches = tail.decode_tail(self.spec, path.read_bytes()).batches
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            temporary.write_bytes(tail.merge_batches(batches))
            descriptor = os.open(temporary, os.O_WRONLY | os.O_APPEND)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._batches = 1
        self._before = None

    def seal_waiting(self) -> None:
        """Seal every finished tail, oldest first; what fails stays a tail and OSError goes on."""
        with self._sealing:
            while self._waiting:
                generation, _ = self._waiting[0]
                path = layout.tail_path(self.folder, generation)
                self.sealed_bytes += seal(self.spec, path, layout.part_path(self.folder, generation))
                path.unlink()
                self._waiting.popleft()
