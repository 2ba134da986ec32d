"""Run.json: what ran, in which format, and whether it is still being recorded, complete or died."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from clew.errors import RunTooNew
from clew.model.record import RunInfo
from clew.model.schema import FORMAT_VERSION
from clew.store import layout, typed

STATES: Final = ("recording", "complete", "died")
UNKNOWN: Final = "unknown"
"""The state of a run whose run.json is missing or unreadable: how it ended is not known, and not guessed."""


@dataclass(slots=True)
class Process:
    """Who writes a rank: enough to tell a living writer from a dead one, and a run from a copy of it."""

    pid: int = 0
    started: str = ""
    host: str = ""
    boot: str = ""
    lock: str = ""


@dataclass(slots=True)
class Manifest:
    """The content of run.json."""

    info: RunInfo
    format: int = FORMAT_VERSION
    process: Process = field(default_factory=Process)
    stopped: str = ""
    """Why nothing more was recorded, if so."""
    limited: str = ""
    """Why only scalars were, if so."""


def write_atomic(path: Path, text: str, *, sync: bool = False) -> None:
    """Replace a small file in one step: a reader sees the old text or the new one, never a piece."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write run.json of the rank the manifest belongs to."""
    content = {
        "format": manifest.format,
        **asdict(manifest.info),
        "process": asdict(manifest.process),
        "stopped": manifest.stopped,
        "limited": manifest.limited,
    }
    path = layout.manifest_path(folder, manifest.info.rank)
    write_atomic(path, json.dumps(content, indent=1, default=str) + "\n", sync=True)


def read_manifest(folder: Path, rank: int) -> Manifest:
    """Read run.json of a rank; raises OSError, ValueError or TypeError when it is missing or damaged."""
    path = layout.manifest_path(folder, rank)
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise TypeError("no format version")
    if content["format"] > FORMAT_VERSION:
        raise RunTooNew(
            f"the run has format {content['format']}, this clew reads up to format {FORMAT_VERSION}",
            where=str(path),
            next_step="install a newer clew: pip install --upgrade clew",
        )
    return Manifest(
        info=typed.make(RunInfo, {"name": folder.name, **content, "rank": rank}),
        format=content["format"],
        process=typed.make(Process, content.get("process", {})),
        stopped=str(content.get("stopped", "")),
        limited=str(content.get("limited", "")),
    )


def acquire_lock(folder: Path, rank: int) -> int | None:
    """Take the lock that says a living process writes this rank; None when another one holds it.

    The lock ends with the process, however it ends, so it tells ``recording`` from ``died`` without guessing.
    """
    path = layout.rank_folder(folder, rank) / layout.LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass  # a file system without locks: the process id decides instead
    return descriptor


def describe_process(folder: Path, rank: int) -> Process:
    """Return the identity of this process as the writer of a rank."""
    return Process(
        pid=os.getpid(),
        started=_process_start(os.getpid()),
        host=socket.gethostname(),
        boot=_boot_id(),
        lock=_file_identity(layout.rank_folder(folder, rank) / layout.LOCK),
    )


def resolve_state(folder: Path, manifest: Manifest) -> str:
    """Return the true state: a run still marked as recording whose writer is gone has died.

    It is unknown where the manifest does not say.
    """
    path = layout.rank_folder(folder, manifest.info.rank) / layout.LOCK
    if manifest.info.state not in STATES:
        return "recording" if _is_locked(path) else UNKNOWN
    if manifest.info.state != "recording":
        return manifest.info.state
    process = manifest.process
    held = _is_locked(path)
    if held:
        return "recording"
    if process.host == socket.gethostname() or (process.boot and process.boot == _boot_id()):
        if held is None and process.boot == _boot_id():
            alive = process.started and process.started == _process_start(process.pid)
            return "recording" if alive else "died"
        return "died"
    # Another machine: its lock may not be visible here. A copy of the folder has no writer at all.
    is_original = bool(process.lock) and process.lock == _file_identity(path)
    return "recording" if is_original else "died"


def _is_locked(path: Path) -> bool | None:
    """Say whether somebody holds the lock; None when the file system knows no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def _file_identity(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_ino}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """Return the start time of a process in the kernel's own clock: with the pid it names a process for good."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]
