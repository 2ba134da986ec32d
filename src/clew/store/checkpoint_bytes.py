"""Where the bytes of a stored tensor lie, and how they come in blocks of bounded size.

Plain reads into one reused buffer, not memory maps: a file that shrinks under a map kills a process that is not
prepared for it, and the pages of a map count as memory until the system takes them back.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from clew.errors import CheckpointBroken

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from pathlib import Path

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_DEFLATED_READ: Final = 1 << 16


class ByteSource(Protocol):
    """A stretch of bytes that can be read from the start as often as wanted."""

    @property
    def size(self) -> int:
        """Number of bytes."""

    def blocks(self, limit: int) -> Iterator[Bytes]:
        """Yield all bytes in order, ``limit`` at a time; each block is valid until the next is asked for."""


@dataclass(frozen=True, slots=True)
class FileBytes:
    """Bytes that lie in a file as they are."""

    path: Path
    offset: int
    size: int

    def open(self) -> FileIO:
        """Open the file for reading without a buffer."""
        try:
            return self.path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointBroken(f"cannot open the file: {error.strerror}", where=str(self.path)) from None

    def blocks(self, limit: int) -> Iterator[Bytes]:
        """Yield the bytes through one buffer of at most ``limit`` bytes."""
        buffer: Bytes = np.empty(min(limit, self.size), dtype=np.uint8)
        with self.open() as file:
            file.seek(self.offset)
            for start in range(0, self.size, limit):
                view = buffer[: min(limit, self.size - start)]
                _fill(file, view.data, self.path)
                yield view


@dataclass(frozen=True, slots=True)
class DeflatedBytes:
    """Bytes inside a compressed zip entry, after the first ``skip`` of them."""

    path: Path
    offset: int
    packed_size: int
    size: int
    skip: int = 0

    def blocks(self, limit: int) -> Iterator[Bytes]:
        """Yield the bytes while inflating; never more than the promised size."""
        yield from regroup(self._inflate(), size=limit, total=self.size, where=str(self.path))

    def _inflate(self) -> Iterator[Bytes]:
        inflater = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
        skip = self.skip
        for packed in FileBytes(self.path, self.offset, self.packed_size).blocks(_DEFLATED_READ):
            waiting: Any = packed
            while len(waiting):
                try:
                    plain = inflater.decompress(waiting, 1 << 20)
                except zlib.error as error:
                    raise CheckpointBroken(
                        f"the compressed data is damaged: {error}", where=str(self.path)
                    ) from None
                waiting = inflater.unconsumed_tail
                yield np.frombuffer(plain, dtype=np.uint8)[skip:]
                skip = max(0, skip - len(plain))
        yield np.frombuffer(inflater.flush(), dtype=np.uint8)[skip:]


@dataclass(frozen=True, slots=True, eq=False)
class MemoryBytes:
    """Bytes that are already in memory."""

    data: Bytes

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.data.size

    def blocks(self, limit: int) -> Iterator[Bytes]:
        """Yield views of the bytes."""
        for start in range(0, self.size, limit):
            yield self.data[start : start + limit]


def read_all(source: ByteSource) -> Bytes:
    """Return all bytes of a source as one array of its own."""
    whole: Bytes = np.empty(source.size, dtype=np.uint8)
    start = 0
    for block in source.blocks(1 << 24):
        whole[start : start + block.size] = block
        start += block.size
    return whole


def regroup(pieces: Iterator[NDArray[Any]], *, size: int, total: int, where: str) -> Iterator[NDArray[Any]]:
    """Yield flat pieces again as blocks of ``size`` elements, ``total`` in all; fewer or more is an error."""
    block: NDArray[Any] | None = None
    filled = given = 0
    for piece in pieces:
        given += piece.size
        if given > total:
            break
        while piece.size:
            if block is None:
                block = np.empty(min(size, total), dtype=piece.dtype)
            taken = min(piece.size, len(block) - filled)
            block[filled : filled + taken] = piece[:taken]
            filled, piece = filled + taken, piece[taken:]  # noqa: PLW2901 - what is left of it
            if filled == len(block):
                yield block
                filled = 0
    if given != total:
        raise CheckpointBroken(
            f"{'more' if given > total else 'less'} data than the {total:,} elements it declares", where=where
        )
    if block is not None and filled:
        yield block[:filled]


def cut_off(path: Path) -> CheckpointBroken:
    """Return the error of a file that was cut since its header was read."""
    return CheckpointBroken(
        "the file ends before the data its header declares",
        where=str(path),
        next_step="copy or save it again; a writer may still be at work",
    )


def unreadable(path: Path, error: OSError) -> CheckpointBroken:
    """Return the error of a file that the system cannot read."""
    return CheckpointBroken(f"cannot read the file: {error.strerror}", where=str(path))


def _fill(file: FileIO, view: memoryview, path: Path) -> None:
    """Read until the view is full; the file may have been cut since its header was read."""
    while view:
        try:
            count = file.readinto(view)
        except OSError as error:
            raise unreadable(path, error) from None
        if not count:
            raise cut_off(path)
        view = view[count:]
