"""Rows as a file that other tools read: CSV, JSON or Parquet, written piece by piece and whole or not at all."""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from typing import TYPE_CHECKING, Any, Final, Protocol

from clew.errors import StoreFull
from clew.render.json import to_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import TextIO

FORMATS: Final = ("csv", "json", "parquet")


class Rows(Protocol):
    """A piece of a table: its column names, its rows as dicts, and itself as Arrow."""

    @property
    def columns(self) -> list[str]:
        """The names of the columns, the same in every piece."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Give each row."""

    def to_arrow(self) -> Any:
        """Return a ``pyarrow.Table``."""


def write(pieces: Iterable[Rows], form: str, path: Path | None) -> None:
    """Write the pieces to a file, or to standard output for CSV and JSON without one."""
    if path is None:
        _WRITERS[form](pieces, sys.stdout)
        return
    # A pipe or a device, /dev/stdout among them, is written to; only a file can be put in the place of another.
    is_special = path.exists() and not path.is_file()
    temporary = path.with_name(f".{path.name}.part")
    try:
        _write_to(path if is_special else temporary, pieces, form)
        if not is_special:
            temporary.replace(path)
    except OSError as error:
        raise StoreFull(
            f"the file cannot be written: {error.strerror or error}",
            where=str(path),
            next_step="choose another -o",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_to(path: Path, pieces: Iterable[Rows], form: str) -> None:
    if form == "parquet":
        _write_parquet(pieces, path)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        _WRITERS[form](pieces, file)


def _write_csv(pieces: Iterable[Rows], file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    for number, piece in enumerate(pieces):
        if number == 0:
            writer.writerow(piece.columns)
        writer.writerows(row.values() for row in piece)


def _write_json(pieces: Iterable[Rows], file: TextIO) -> None:
    """Write one list with one row on each line: whole it is JSON, and line tools can cut it."""
    separator = "[\n"
    for piece in pieces:
        for row in piece:
            file.write(separator + json.dumps(to_plain(row), ensure_ascii=False, allow_nan=False))
            separator = ",\n"
    file.write("[]\n" if separator == "[\n" else "\n]\n")


def _write_parquet(pieces: Iterable[Rows], path: Path) -> None:
    from clew.store.part import write_parquet

    write_parquet((piece.to_arrow() for piece in pieces), path)


_WRITERS: Final = {"csv": _write_csv, "json": _write_json}
