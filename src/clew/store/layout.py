"""The names of everything in a run folder, and how a new folder is claimed."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Final

from clew.errors import StoreFull, UsageError

MANIFEST: Final = "run.json"
SITES: Final = "sites.json"
SUMMARY: Final = "summary.json"
FAULTS: Final = "faults.jsonl"
LOG: Final = "log.txt"
LOCK: Final = "lock"
RESERVE: Final = "reserve"

_RANK = re.compile(r"rank(\d+)")
_PART = re.compile(r"part-(\d{6,})\.parquet")
_TAIL = re.compile(r"tail-(\d{6,})\.arrows")
_UNSAFE = re.compile(r"[^\w.+=@-]+")


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder in which one rank keeps everything it writes."""
    return folder / f"rank{rank}"


def manifest_path(folder: Path, rank: int) -> Path:
    """Return the manifest of a rank: rank 0 speaks for the run, so its manifest lies at the top."""
    return (folder if rank == 0 else rank_folder(folder, rank)) / MANIFEST


def list_ranks(folder: Path) -> list[int]:
    """Return the ranks that have written into a run, in order."""
    matches = (_RANK.fullmatch(entry.name) for entry in os.scandir(folder) if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def tell_missing(folder: Path) -> str:
    """Say that the folder of rank 0 is gone, whose run.json is there; empty if it is not."""
    if not manifest_path(folder, 0).is_file() or rank_folder(folder, 0).is_dir():
        return ""
    return f"{rank_folder(folder, 0).name}/ is missing: all that rank 0 recorded was in it"


def part_path(table: Path, generation: int) -> Path:
    """Return the sealed part of a generation of a table."""
    return table / f"part-{generation:06d}.parquet"


def tail_path(table: Path, generation: int) -> Path:
    """Return the growing tail of a generation of a table."""
    return table / f"tail-{generation:06d}.arrows"


def list_parts(table: Path) -> list[int]:
    """Return the generations that have a sealed part, oldest first."""
    return _generations(table, _PART)


def list_tails(table: Path) -> list[int]:
    """Return the generations that have a tail, oldest first."""
    return _generations(table, _TAIL)


def _generations(table: Path, pattern: re.Pattern[str]) -> list[int]:
    try:
        matches = [pattern.fullmatch(entry.name) for entry in os.scandir(table)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1]) for match in matches if match)


def is_run(folder: Path) -> bool:
    """Say whether a path looks like a run: it has a manifest, or at least the folder of a rank."""
    return (folder / MANIFEST).is_file() or (folder.is_dir() and bool(list_ranks(folder)))


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; files that vanish meanwhile count nothing."""
    total = 0
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return 0
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            total += folder_bytes(Path(entry.path))
            continue
        try:
            total += entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue
    return total


def claim_folder(root: Path | str, name: str) -> Path:
    """Create a folder for a new run below ``root`` and return it; a taken name gets ``-2``, ``-3`` and so on."""
    root = Path(root)
    safe = _UNSAFE.sub("-", name).strip("-.") or "run"
    number = 1
    while True:
        folder = root / (safe if number == 1 else f"{safe}-{number}")
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            return folder
        except FileExistsError as error:
            if root.exists() and not root.is_dir():
                raise UsageError(
                    "the place for runs is a file, not a folder",
                    where=str(root),
                    next_step="choose another folder with --out",
                ) from error
            number += 1
        except OSError as error:
            raise unwritable(folder, error) from error


def is_full(error: OSError) -> bool:
    """Return whether there is no room for what was to be written."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def unwritable(path: Path, error: OSError) -> StoreFull:
    """Return the error for a run folder that cannot be created or opened for writing."""
    if is_full(error):
        advice = "make room on that disk, or choose another one with --out"
    else:
        advice = "choose a folder you may write to with --out, or change its permissions"
    return StoreFull(
        f"the run cannot be recorded: {error.strerror or error}", where=str(path), next_step=advice
    )
