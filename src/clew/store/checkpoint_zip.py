"""Zip archives, as torch and numpy write them: where each entry lies, checked before it is believed."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from clew.errors import CheckpointBroken
from clew.store.checkpoint_bytes import DeflatedBytes, FileBytes

if TYPE_CHECKING:
    from pathlib import Path

_LOCAL_HEADER: Final = struct.Struct("<4s5H3I2H")
_ENCRYPTED: Final = 1


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One entry: its name, the place of its bytes in the file, and whether they are compressed."""

    name: str
    offset: int
    packed_size: int
    size: int
    is_deflated: bool

    def source(self, path: Path, *, skip: int = 0) -> FileBytes | DeflatedBytes:
        """Return the bytes of the entry after the first ``skip``."""
        if self.is_deflated:
            return DeflatedBytes(path, self.offset, self.packed_size, self.size - skip, skip)
        return FileBytes(path, self.offset + skip, self.size - skip)


def read_directory(path: Path, *, start: int = 0, length: int | None = None) -> dict[str, ZipEntry]:
    """Return the entries of an archive that fills ``length`` bytes of a file from ``start``."""
    try:
        with path.open("rb") as file:
            window = _Window(file, start, length)
            with zipfile.ZipFile(window) as archive:
                infos = archive.infolist()
            entries = [_locate(file, info, start) for info in infos]
    except OSError as error:
        raise CheckpointBroken(f"cannot read the file: {error.strerror or error}", where=str(path)) from None
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        raise _broken(str(error) or "the zip directory cannot be read", path) from None
    _check(entries, path, end=start + window.length)
    return {entry.name: entry for entry in entries}


def _locate(file: io.BufferedReader, info: zipfile.ZipInfo, start: int) -> ZipEntry:
    """Find the data of an entry behind its local header, whose padding only the header itself knows."""
    if info.flag_bits & _ENCRYPTED:
        raise ValueError(f"'{info.filename}' is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"'{info.filename}' is packed with method {info.compress_type}")
    if info.filename.startswith("/") or ".." in info.filename.split("/"):
        raise ValueError(f"the entry name '{info.filename}' leads outside the archive")
    header = start + info.header_offset
    file.seek(header)
    fields = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if fields[0] != b"PK\x03\x04":
        raise ValueError(f"the entry '{info.filename}' is not where the directory says")
    offset = header + _LOCAL_HEADER.size + fields[9] + fields[10]
    deflated = info.compress_type == zipfile.ZIP_DEFLATED
    if not deflated and info.file_size != info.compress_size:
        raise ValueError(f"the entry '{info.filename}' has two sizes")
    return ZipEntry(info.filename, offset, info.compress_size, info.file_size, deflated)


def _check(entries: list[ZipEntry], path: Path, *, end: int) -> None:
    """Refuse entries beyond the end, over each other (few bytes that unpack to terabytes), or of one name."""
    before, previous = 0, ""
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.packed_size)):
        if entry.offset + entry.packed_size > end:
            raise _broken(f"the entry '{entry.name}' goes beyond the end", path)
        if entry.packed_size and entry.offset < before:
            raise _broken(f"the entries '{previous}' and '{entry.name}' overlap", path)
        before, previous = max(before, entry.offset + entry.packed_size), entry.name
    if len({entry.name for entry in entries}) != len(entries):
        raise _broken("two entries have one name", path)


def _broken(what: str, path: Path) -> CheckpointBroken:
    return CheckpointBroken(
        f"the zip archive is damaged or cut off: {what}"[:300],
        where=str(path),
        next_step="copy, download or save it again",
    )


class _Window(io.RawIOBase):
    """A stretch of a file that zipfile takes for a whole one."""

    def __init__(self, file: io.BufferedReader, start: int, length: int | None) -> None:
        file.seek(0, io.SEEK_END)
        available = file.tell() - start
        self.file, self.start = file, start
        self.length = available if length is None else length
        if not 0 <= self.length <= available or start < 0:
            raise ValueError("it is shorter than declared")
        self.position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        if origin + offset < 0:
            raise OSError("it is too short")  # what zipfile expects of a file
        self.position = origin + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        self.file.seek(self.start + self.position)
        piece = self.file.read(max(0, min(len(buffer), self.length - self.position)))
        buffer[: len(piece)] = piece
        self.position += len(piece)
        return len(piece)
