"""The sink that writes the run folder: the training thread only hands records over, a thread of its own writes.

Every ``flush_seconds`` the pending steps are appended to the tails; long tails are sealed by a second thread that lives
only while there is something to seal. A full disk, a reached quota or any other fault stops recording, says so
once, and never reaches the training.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import threading
import time
import traceback
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clew.errors import UsageError
from clew.logs import room_log
from clew.model.record import Fault, RunInfo, Site, StepRecord, Stretch
from clew.store import columns, layout, tables
from clew.store.appender import PART_BYTES, Appender
from clew.store.manifest import (
    STATES,
    Manifest,
    acquire_lock,
    describe_process,
    write_atomic,
    write_manifest,
)
from clew.store.summary import Summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PENDING_BYTES: Final = 16 << 20
RESERVE_BYTES: Final = 128 << 10
SITES_SECONDS: Final = 10.0
OTHERS_SECONDS: Final = 5.0
QUOTA_PORTIONS: Final = 32
SEAL_FACTOR: Final = 1.5
"""While a tail is sealed it and its part lie on disk together; a part is less than half of its tail."""


class Writer:
    """Writes one rank of a run. ``notice`` is called at most once, with a sentence for the person who trains."""

    def __init__(
        self,
        folder: Path | str,
        info: RunInfo,
        *,
        flush_seconds: float = 1.0,
        quota_bytes: int | None = None,
        part_rows: int = 1_000_000,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.rank_folder = layout.rank_folder(self.folder, info.rank)
        self.stopped = ""
        self.limited = ""
        """Why only numbers of steps are recorded any more, if so."""
        self.on_stop: Callable[[str], None] | None = None
        """Called with the reason when nothing more is recorded, from any thread: others write into the folder too."""
        self.before_flush: Callable[[], None] | None = None
        """Called by the writing thread before it writes: whoever holds records back hands them over now."""
        self.cpu_seconds = 0.0
        """What the threads have spent so far: on a busy machine the training pays for it."""
        self._info = replace(info, state="recording")
        self._flush_seconds = max(flush_seconds, 0.001)
        self._quota = quota_bytes
        self._notice = notice
        self._pid = os.getpid()
        self._sites: dict[int, Site] = {}
        self._sites_new = self._sites_changed = self._info_changed = False
        self._sites_written = 0.0
        self._pending: list[StepRecord | Stretch] = []
        self._pending_bytes = 0
        self.summary = Summary()
        """What of the training is on record so far."""
        self._other_bytes, self._others_seen = 0, 0.0
        self._is_closed = False
        self._gate = threading.Condition()
        self._io = threading.RLock()
        self._sealer: threading.Thread | None = None
        self._open(part_rows)
        self._flusher = threading.Thread(target=self._flush_in_turn, name="clew-flush", daemon=True)
        self._flusher.start()
        _living.add(self)
        atexit.register(self._close_at_exit)

    # --- opening ---

    def _open(self, part_rows: int) -> None:
        self._lock = -1
        is_new = not self.rank_folder.exists()
        try:
            self.rank_folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_folder()
            part_bytes = PART_BYTES if self._quota is None else min(PART_BYTES, max(self._quota // 8, 1))
            self._tables = {
                spec.name: Appender(self.rank_folder, spec, part_rows=part_rows, part_bytes=part_bytes)
                for spec in tables.TABLES
            }
            (self.rank_folder / layout.RESERVE).write_bytes(bytes(RESERVE_BYTES))
            self._manifest = Manifest(self._info, process=describe_process(self.folder, self._info.rank))
            write_manifest(self.folder, self._manifest)
        except OSError as error:
            if self._lock >= 0:
                os.close(self._lock)
            if is_new:
                # Half a folder would be taken for a run that died.
                shutil.rmtree(self.rank_folder, ignore_errors=True)
            raise layout.unwritable(self.folder, error) from error

    def _take_folder(self) -> int:
        lock = acquire_lock(self.folder, self._info.rank)
        if lock is not None and not layout.manifest_path(self.folder, self._info.rank).exists():
            return lock
        if lock is not None:
            os.close(lock)
        verb = "is being recorded" if lock is None else "was recorded"
        raise UsageError(
            f"another run {verb} in this folder",
            where=str(self.rank_folder),
            next_step="give the new run another --name or --out; clew never writes over a run",
        )

    # --- the sink ---

    @property
    def _is_foreign(self) -> bool:
        """Whether this is a forked child: the run belongs to the parent, the child must not touch it."""
        return os.getpid() != self._pid

    def add_sites(self, sites: Iterable[Site]) -> None:
        """Take new sites, or newer versions of known ones; they reach the disk before any row that names them."""
        if self._is_foreign or self._is_closed:
            return
        with self._gate:
            for site in sites:
                known = self._sites.get(site.id)
                if known == site:
                    continue
                self._sites_new |= known is None
                self._sites_changed = True
                self._sites[site.id] = site

    def put(self, record: StepRecord) -> None:
        """Take the record of one finished step; waits only when the disk is far behind."""
        self._take(record)

    @property
    def takes_stretches(self) -> bool:
        """Whether many steps can come at once."""
        return True

    def put_stretch(self, stretch: Stretch) -> None:
        """Take steps in a row."""
        self._take(stretch)

    def _take(self, record: StepRecord | Stretch) -> None:
        if self._is_foreign or self.stopped or self._is_closed:
            return
        with self._gate:
            self._pending.append(record)
            self._pending_bytes += columns.record_bytes(record)
            if self._pending_bytes < PENDING_BYTES:
                return
            self._gate.notify_all()
            # The thread that writes hands over, too, what others hold back: nobody else would empty this.
            may_wait = threading.current_thread() is not self._flusher
            while may_wait and self._is_far_behind():
                self._gate.wait()

    def _is_far_behind(self) -> bool:
        return self._pending_bytes >= 2 * PENDING_BYTES and not self.stopped and not self._is_closed

    def update_info(self, info: RunInfo) -> None:
        """Take provenance that became known after the start; it is written with the next flush."""
        if self._is_foreign or self._is_closed:
            return
        with self._gate:
            self._info = replace(info, state="recording", rank=self._info.rank)
            self._info_changed = True

    def flush(self) -> None:
        """Write everything that was put so far; returns when a reader can see it."""
        if not self._is_foreign and not self._is_closed:
            self._flush()

    def log(self, text: str) -> None:
        """Append a line to the rank's log."""
        if self._is_foreign or self._is_closed:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):
            self._append_text(layout.LOG, f"{stamp} {text}\n")

    def close(self, state: str, exit_code: int | None = None) -> None:
        """Flush, seal and end the run as ``complete`` or ``died``; joins both threads and gives the folder free."""
        if self._is_foreign or self._is_closed:
            return
        if state not in STATES[1:]:
            raise UsageError(f"a run ends as complete or died, not as '{state}'")
        _log.info("%s ends: %s", self.rank_folder, state)
        self._flush()
        with self._gate:
            self._is_closed = True
            self._gate.notify_all()
        self._flusher.join()
        atexit.unregister(self._close_at_exit)
        _living.discard(self)
        if self._sealer is not None:
            self._sealer.join()
        self._end(state, exit_code)
        for table in self._tables.values():
            table.release()
        os.close(self._lock)

    def _end(self, state: str, exit_code: int | None) -> None:
        for table in self._tables.values():
            self._attempt(table.rotate)
            self._attempt(table.seal_waiting)
        (self.rank_folder / layout.RESERVE).unlink(missing_ok=True)
        self._sites_new = self._sites_changed
        self._attempt(self._write_sites)
        self._attempt(self._write_summary)
        ended = self._info.ended or time.strftime("%Y-%m-%dT%H:%M:%S%z")
        code = self._info.exit_code if exit_code is None else exit_code
        info = replace(self._info, state=state, exit_code=code, ended=ended)
        self._attempt(lambda: write_manifest(self.folder, self._complete_manifest(info)))
        with contextlib.suppress(OSError):
            (self.rank_folder / layout.LOCK).unlink(missing_ok=True)

    def _complete_manifest(self, info: RunInfo) -> Manifest:
        return replace(self._manifest, info=info, stopped=self.stopped, limited=self.limited)

    def _close_at_exit(self) -> None:
        self.close("died")

    # --- flushing ---

    def _flush_in_turn(self) -> None:
        while True:
            with self._gate:
                self._gate.wait_for(self._is_urgent, self._flush_seconds)
                if self._is_closed:
                    return
            before = time.thread_time()
            if self.before_flush is not None:
                self.before_flush()
            self._flush()
            self.cpu_seconds += time.thread_time() - before

    def _is_urgent(self) -> bool:
        return self._is_closed or self._pending_bytes >= PENDING_BYTES

    def _flush(self) -> None:
        with self._io:
            with self._gate:
                records, self._pending = self._pending, []
                self._pending_bytes = 0
                self._gate.notify_all()
            if records:
                _log.debug("writing %d records to %s", len(records), self.rank_folder)
            self._attempt(lambda: self._write(records))

    def _write(self, records: list[StepRecord | Stretch]) -> None:
        self._write_sites()
        if self._info_changed:
            self._info_changed = False
            self._manifest = self._complete_manifest(self._info)
            write_manifest(self.folder, self._manifest)
        if not records or self.stopped:
            return
        whole = (record for record in records if isinstance(record, StepRecord))
        self._write_faults([fault for record in whole for fault in record.faults])
        for some in self._portion(records):
            self._append(some)
        self._write_summary()
        self._start_sealing()

    def _append(self, records: list[StepRecord | Stretch]) -> None:
        """Append records, as many of the first ones as there is room for."""
        if self.stopped:
            return
        try:
            self._append_whole(records)
        except OSError:
            parts = records if len(records) > 1 else columns.divide(records[0])
            if len(parts) == 1:
                raise
            half = len(parts) // 2
            self._append(parts[:half])
            self._append(parts[half:])
            return
        self.summary.add(records, with_rows=not self.limited)
        self._hold_quota()

    def _append_whole(self, records: list[StepRecord | Stretch]) -> None:
        """Append records to all tables; where one has no room, none of them has any of it."""
        grown: list[Appender] = []
        try:
            for name, rows in columns.columns_of(records).items():
                if not len(rows["step"]) or (name == "stats" and self.limited):
                    continue
                is_unmarked = name == "scalars" and self.limited
                self._tables[name].append(columns.unmark(rows) if is_unmarked else rows)
                grown.append(self._tables[name])
        except OSError:
            for table in grown:
                table.take_back()
            raise

    def _portion(self, records: list[StepRecord | Stretch]) -> list[list[StepRecord | Stretch]]:
        """Return the records in portions that each are small against the quota, which is looked at after each."""
        most = None if self._quota is None else self._quota // QUOTA_PORTIONS
        if most is None or sum(map(columns.record_bytes, records)) <= most:
            return [records]
        portions: list[list[StepRecord | Stretch]] = [[]]
        size = 0
        for record in columns.divide_large(records, most):
            size += columns.record_bytes(record)
            if size > most and portions[-1]:
                portions.append([])
                size = columns.record_bytes(record)
            portions[-1].append(record)
        return portions

    def _write_sites(self) -> None:
        now = time.monotonic()
        with self._gate:
            is_due = self._sites_new or (self._sites_changed and now - self._sites_written > SITES_SECONDS)
            if not is_due:
                return
            sites = sorted(self._sites.values(), key=lambda site: site.id)
            self._sites_new = self._sites_changed = False
        content = {"sites": [asdict(site) for site in sites]}
        write_atomic(self.rank_folder / layout.SITES, json.dumps(content, default=str))
        self._sites_written = now

    def _write_summary(self) -> None:
        write_atomic(self.rank_folder / layout.SUMMARY, json.dumps(asdict(self.summary)))

    def _write_faults(self, faults: list[Fault]) -> None:
        if faults:
            self._append_text(layout.FAULTS, "".join(json.dumps(asdict(fault)) + "\n" for fault in faults))

    def _append_text(self, name: str, text: str) -> None:
        path = self.rank_folder / name
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, text.encode("utf-8", "replace"))
        finally:
            os.close(descriptor)

    # --- sealing ---

    def _start_sealing(self) -> None:
        if not any(table.is_waiting for table in self._tables.values()):
            return
        if self._sealer is None or not self._sealer.is_alive():
            self._sealer = threading.Thread(target=self._seal, name="clew-seal", daemon=True)
            self._sealer.start()

    def _seal(self) -> None:
        _log.debug("sealing what is waiting in %s", self.rank_folder)
        before = time.thread_time()
        for table in self._tables.values():
            self._attempt(table.seal_waiting)
        if threading.current_thread() is self._sealer:
            self.cpu_seconds += time.thread_time() - before

    # --- limits and faults ---

    def _hold_quota(self) -> None:
        """Stop the statistics shortly before the quota and everything at the quota: the loss curve is cheap."""
        if self._quota is None:
            return
        used = self._measure_use(self._quota)
        if used >= 0.9 * self._quota and any(table.is_waiting for table in self._tables.values()):
            self._seal()  # which makes room
            used = self._measure_use(self._quota)
        much = f"the quota of {self._quota:,} bytes is"
        if used >= self._quota:
            self._stop(f"{much} used up: nothing more is recorded {self._say_since()}; {_LESS}")
        elif used >= 0.9 * self._quota and not self.limited:
            self.limited = (
                f"{much} nearly used up: only scalars are recorded from now on, {self._say_since()}; {_LESS}"
            )
            self._info_changed = True
            self._tell(self.limited)

    def _say_since(self) -> str:
        step = self.summary.last_step
        return f"after step {step:,}" if step >= 0 else "from the first step on"

    def _measure_use(self, quota: int) -> float:
        own = sum(table.sealed_bytes + SEAL_FACTOR * table.tail_bytes for table in self._tables.values())
        # Snapshots come in one piece: where that could matter, each look counts them anew.
        return own + self._measure_others(is_old_enough=own < quota / 2)

    def _measure_others(self, *, is_old_enough: bool) -> int:
        """Return the bytes that others keep in the rank's folder, looked at now and then."""
        now = time.monotonic()
        seconds = OTHERS_SECONDS if is_old_enough else self._flush_seconds / 2
        if not self._others_seen or now - self._others_seen > seconds:
            tables_bytes = sum(layout.folder_bytes(table.folder) for table in self._tables.values())
            self._other_bytes = max(layout.folder_bytes(self.rank_folder) - tables_bytes, RESERVE_BYTES)
            self._others_seen = now
        return self._other_bytes

    def _attempt(self, action: Callable[[], None]) -> None:
        """Run a piece of writing; whatever goes wrong stops the recording instead of the training."""
        try:
            action()
        except OSError as error:
            self._stop(
                f"{_say_trouble(error)}: nothing more is recorded {self._say_since()}; what was written stays "
                "readable; make room there, or record elsewhere with --out"
            )
        except Exception as error:  # noqa: BLE001 - a fault of clew must never reach the training
            what = (
                f"clew failed to write the record ({type(error).__name__}: {error}): nothing more is recorded"
            )
            self._stop(what, traceback.format_exc())

    def _stop(self, reason: str, trace: str = "") -> None:
        with self._gate:
            if self.stopped:
                return
            self.stopped = reason
            self._pending, self._pending_bytes = [], 0
            self._info_changed = True  # the next flush, or the end, writes why
            self._gate.notify_all()
        with contextlib.suppress(OSError):
            (self.rank_folder / layout.RESERVE).unlink(missing_ok=True)
        if trace:  # a full disk and a quota are no faults of clew
            with contextlib.suppress(OSError):
                self._write_faults([Fault(self.summary.last_step, "store", reason, trace)])
        if self.on_stop is not None:
            with contextlib.suppress(Exception):
                self.on_stop(reason)
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        _log.warning("%s: %s", self.rank_folder, reason)
        self.log(reason)
        if self._notice is not None:
            notice, self._notice = self._notice, None
            with contextlib.suppress(Exception):
                notice(f"{reason} ({self.folder})")

    def _disown(self) -> None:
        """In a forked child: give up the inherited lock and files, so that they end with the parent."""
        with contextlib.suppress(OSError):
            os.close(self._lock)
        for table in self._tables.values():
            with contextlib.suppress(OSError):
                table.release()


_log = room_log("store")
_LESS: Final = "allow more with --quota, or record less with --every or --sites"
_living: weakref.WeakSet[Writer] = weakref.WeakSet()


def _say_trouble(error: OSError) -> str:
    return (
        "the disk is full"
        if layout.is_full(error)
        else f"the run folder cannot be written ({error.strerror})"
    )


def _disown_all() -> None:
    for writer in list(_living):
        writer._disown()


os.register_at_fork(after_in_child=_disown_all)
