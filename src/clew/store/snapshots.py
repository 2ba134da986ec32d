"""Snapshots of a rank: the state before a step as safetensors and JSON, and the batches of the steps after it.

A snapshot appears under its name when it is complete; what a killed process left half-written is never read. The oldest
go first when there are too many or too many bytes, and batches go with the snapshot that they start from.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from clew.errors import CheckpointBroken
from clew.store.layout import folder_bytes, is_full
from clew.store.manifest import write_atomic
from clew.store.tensors import read_tensors, write_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Arrays = tuple[Mapping[str, NDArray[Any]], Mapping[str, str]]
    """Tensors of one file as numpy arrays, and the true element types of those that numpy does not know."""

FOLDER: Final = "snapshots"
STATE: Final = "state.json"
MOST_SNAPSHOTS: Final = 3
"""Snapshots that are kept when nobody asked for more: two to jump from, one that is being left behind."""

_SNAPSHOT: Final = re.compile(r"step-(\d{6,})")
_BATCHES: Final = re.compile(r"batches-(\d{6,})-(\d{6,})\.safetensors")


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot in a run folder: the state before ``step`` began."""

    step: int
    path: Path
    size_bytes: int

    def read_state(self) -> dict[str, Any]:
        """Return what is not a tensor: names, numbers, what was left out."""
        state = _read_json(self.path / STATE)
        if not isinstance(state.get("step"), int):
            raise CheckpointBroken("the snapshot's state cannot be read", where=str(self.path / STATE))
        return state


@dataclass(frozen=True, slots=True)
class StoredBatches:
    """A file with the batches of some steps in a row."""

    first: int
    last: int
    path: Path
    size_bytes: int

    def read_steps(self) -> list[dict[str, Any]]:
        """Return what each step was given, as plain data that names tensors of the file."""
        try:
            data = json.loads(read_tensors(self.path).metadata.get("clew", ""))
        except ValueError as error:
            raise CheckpointBroken("the batches cannot be read", where=str(self.path)) from error
        return [step for step in data if isinstance(step, dict)] if isinstance(data, list) else []


def list_snapshots(rank_folder: Path) -> list[StoredSnapshot]:
    """Return the complete snapshots of a rank, oldest first."""
    return sorted(
        (
            StoredSnapshot(int(found[1]), path, folder_bytes(path))
            for path in _entries(rank_folder / FOLDER)
            if (found := _SNAPSHOT.fullmatch(path.name)) and (path / STATE).is_file()
        ),
        key=lambda each: each.step,
    )


def list_unfinished(rank_folder: Path) -> list[int]:
    """Return the steps of snapshots that a process was writing when it was ended, which are never read."""
    names = (path.stem for path in _entries(rank_folder / FOLDER) if path.suffix == ".partial")
    return sorted(int(found[1]) for name in names if (found := _SNAPSHOT.fullmatch(name)))


def list_batches(rank_folder: Path) -> list[StoredBatches]:
    """Return the files of batches of a rank, oldest first."""
    return sorted(
        (
            StoredBatches(int(found[1]), int(found[2]), path, path.stat().st_size)
            for path in _entries(rank_folder / FOLDER)
            if (found := _BATCHES.fullmatch(path.name))
        ),
        key=lambda each: each.first,
    )


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointBroken(f"the file cannot be read ({error})", where=str(path)) from None
    return data if isinstance(data, dict) else {}


# ------------------------------------------------------------------------ writing


class SnapshotFolder:
    """Writes the snapshots of one rank and holds their limits."""

    def __init__(self, rank_folder: Path, *, limit_bytes: int, keep_batches: int) -> None:
        self._rank_folder = rank_folder
        self._folder = rank_folder / FOLDER
        self._limit = limit_bytes
        self._keep_batches = keep_batches

    def write_snapshot(self, step: int, files: Mapping[str, Arrays], state: dict[str, Any]) -> None:
        """Write the state before a step; an earlier one of the same step gives way."""
        final = self._folder / f"step-{step:06d}"
        partial = final.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            for name, (arrays, dtypes) in files.items():
                write_tensors(partial / f"{name}.safetensors", arrays, dtypes=dtypes)
            write_atomic(partial / STATE, json.dumps({"step": step, **state}))
        except OSError:
            shutil.rmtree(
                partial, ignore_errors=True
            )  # on a full disk it takes the room of what matters more
            raise
        _remove(final)
        partial.rename(final)
        self._make_room()

    def write_batches(self, steps: list[dict[str, Any]], tensors: Arrays) -> None:
        """Write what some steps in a row were given."""
        self._folder.mkdir(parents=True, exist_ok=True)
        first, last = steps[0]["step"], steps[-1]["step"]
        write_tensors(
            self._folder / f"batches-{first:06d}-{last:06d}.safetensors",
            tensors[0],
            dtypes=tensors[1],
            metadata={"clew": json.dumps(steps)},
        )
        self._make_room()

    def _make_room(self) -> None:
        """Remove the oldest: snapshots over the number, batches before the oldest snapshot, then by bytes."""
        snapshots, batches = list_snapshots(self._rank_folder), list_batches(self._rank_folder)
        asked = {each.step for each in snapshots if _is_asked(each)}
        while len([each for each in snapshots if each.step not in asked]) > MOST_SNAPSHOTS:
            oldest = next(each for each in snapshots if each.step not in asked)
            snapshots.remove(oldest)
            _remove(oldest.path)
        oldest_step = snapshots[0].step if snapshots else 0
        newest = batches[-1].last if batches else 0
        for each in batches.copy():
            if each.last < max(oldest_step, newest - self._keep_batches + 1):
                batches.remove(each)
                each.path.unlink(missing_ok=True)
        self._hold_limit(snapshots, batches)

    def _hold_limit(self, snapshots: list[StoredSnapshot], batches: list[StoredBatches]) -> None:
        everything: list[StoredSnapshot | StoredBatches] = [*snapshots, *batches]
        everything.sort(key=lambda each: each.step if isinstance(each, StoredSnapshot) else each.first)
        used = sum(each.size_bytes for each in everything)
        for each in everything:
            if used <= self._limit:
                return
            used -= each.size_bytes
            if isinstance(each, StoredSnapshot):
                _remove(each.path)
            else:
                each.path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Remove a snapshot: first its name, so that half of one is never taken for a whole."""
    gone = path.with_suffix(".gone")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _is_asked(snapshot: StoredSnapshot) -> bool:
    with contextlib.suppress(CheckpointBroken):
        return bool(snapshot.read_state().get("reason"))
    return False


class SnapshotWriter:
    """A thread that writes what it is given, in order; a fault stops the writing and is told once."""

    def __init__(self, folder: SnapshotFolder, *, tell: Callable[[str], None]) -> None:
        self.folder = folder
        self.cpu_seconds = 0.0
        """What the thread has spent so far: on a busy machine the training pays for it."""
        self.stopped = ""
        self._tell = tell
        self._jobs: deque[Callable[[SnapshotFolder], None]] = deque()
        self._gate = threading.Condition()
        self._is_busy = self._is_closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be written."""
        return self._is_busy or bool(self._jobs)

    def submit(self, job: Callable[[SnapshotFolder], None]) -> None:
        """Have a job done by the thread, which is started for the first one."""
        if self._is_closed or self.stopped or os.getpid() != self._pid:
            return
        with self._gate:
            self._jobs.append(job)
            self._gate.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="clew-snapshot", daemon=True)
            self._thread.start()

    def stop(self, reason: str) -> None:
        """Write nothing more, not even what is waiting: the record has come to its end before the training."""
        self.stopped = self.stopped or f"no more snapshots: {reason}"

    def wait(self) -> None:
        """Return when all that was submitted is written."""
        if os.getpid() == self._pid and self._thread is not None:
            with self._gate:
                self._gate.wait_for(lambda: not self.is_busy)

    def close(self) -> None:
        """Write what is waiting and end the thread."""
        if os.getpid() != self._pid:
            return
        with self._gate:
            self._is_closed = True
            self._gate.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._gate:
                self._gate.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._is_busy = True
            before = time.thread_time()
            try:
                if not self.stopped:
                    job(self.folder)
            except Exception as error:  # noqa: BLE001 - a fault of clew or of the disk must not reach the training
                if not self.stopped:
                    self.stop(_say(error))
                    self._tell(f"clew: {self.stopped}")
            self.cpu_seconds += time.thread_time() - before
            with self._gate:
                self._is_busy = False
                self._gate.notify_all()


def _say(error: Exception) -> str:
    is_no_room = isinstance(error, OSError) and is_full(error)
    return "the disk is full" if is_no_room else f"{type(error).__name__}: {error}"
