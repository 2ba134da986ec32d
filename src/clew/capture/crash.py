"""Stacks of all threads when a process crashes, hangs or is asked: written by Python's faulthandler into the run."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TextIO

from clew.capture.crash_family import Family
from clew.capture.crash_native import write_native_stacks
from clew.capture.crash_signals import FatalSignals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FILE: Final = "crash.txt"
_SIGNAL: Final = getattr(signal, "SIGUSR1", None)


class CrashWatch:
    """Has fatal signals, SIGUSR1 and a missing end of a step leave stacks in a file, until ``stop``.

    A faulthandler that is on already is the script's own, and one that the script switches on later takes over: both
    are left alone. So is a handler of the script's for SIGUSR1.
    """

    def __init__(self, folder: Path, *, hang_seconds: float | None, tell: Callable[[str], None]) -> None:
        self.path = folder / FILE
        self._hang_seconds = hang_seconds
        self._tell = tell
        self._file: TextIO | None = None
        self._pid = os.getpid()
        self._empty_bytes = 0
        self._signals: FatalSignals | None = None
        self.number: int | None = None
        """The signal that asks for stacks, None where it is the script's own."""
        self._family: Family | None = None
        self._enable: Any = None
        self._last_step = monotonic()
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def is_on(self) -> bool:
        """Whether stacks can be written."""
        return self._file is not None

    def start(self) -> None:
        """Begin to watch; where the file cannot be written, nothing is watched."""
        try:
            # Processes that load data open it, too: each writes at the end.
            self._file = self.path.open("a", encoding="utf-8")
        except OSError:
            return
        is_theirs = faulthandler.is_enabled()
        self._signals = FatalSignals(self._file)
        self._signals.start()
        self._empty_bytes = os.fstat(self._file.fileno()).st_size
        if not is_theirs:
            self._enable = faulthandler.enable
            faulthandler.enable = self._give_way
        if _SIGNAL is not None and self._signals.is_active and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            faulthandler.register(_SIGNAL, self._file, all_threads=True, chain=False)
            self.number = _SIGNAL
            self._family = Family(self.path, self._file.fileno(), _SIGNAL)
            self._family.start()
        if self._hang_seconds is not None:
            self._arm()
            self._watcher = threading.Thread(target=self._watch, name="clew-hang", daemon=True)
            self._watcher.start()

    def end_step(self) -> None:
        """A step has ended: the time until the next one counts anew."""
        if self._hang_seconds is not None and self._file is not None:
            now = monotonic()
            # Setting the alarm anew starts a thread: often enough is a few times before it would go off.
            if now - self._last_step > self._hang_seconds / 8:
                self._arm()
            self._last_step = now

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """The training is stopped on purpose: that is no hang."""
        if self._hang_seconds is None or self._file is None:
            yield
            return
        faulthandler.cancel_dump_traceback_later()
        self._last_step = float("inf")
        try:
            yield
        finally:
            self._last_step = monotonic()
            self._arm()

    def stop(self) -> None:
        """Leave everything as it was found; the file stays if something was written."""
        if self._file is None or os.getpid() != self._pid:
            return
        self._stopping.set()
        if self._watcher is not None:
            faulthandler.cancel_dump_traceback_later()
            self._watcher.join()
        if self._enable is not None and faulthandler.enable == self._give_way:
            faulthandler.enable = self._enable
        if self._signals is not None:
            self._signals.stop()
        if self._family is not None:
            self._family.stop()
        if self.number is not None and signal.getsignal(self.number) is signal.SIG_DFL:
            faulthandler.unregister(self.number)
        self._file.close()
        self._file = None
        with contextlib.suppress(OSError):
            if self.path.stat().st_size <= self._empty_bytes:
                self.path.unlink()

    def _give_way(self, *args: Any, **kwargs: Any) -> None:
        """The script switches faulthandler on itself: from now on it is the script's."""
        if self._signals is not None:
            self._signals.give_way()
        self._enable(*args, **kwargs)

    def _arm(self) -> None:
        assert self._hang_seconds is not None
        assert self._file is not None
        # A thread of C: it writes even when the hanging code does not let Python run.
        faulthandler.dump_traceback_later(self._hang_seconds, file=self._file)

    def _watch(self) -> None:
        """Say that no step has ended, once for each time that happens."""
        assert self._hang_seconds is not None
        told_of = -1.0
        while not self._stopping.wait(min(self._hang_seconds / 4, 1.0)):
            last = self._last_step
            if monotonic() - last > self._hang_seconds and last != told_of:
                told_of = last
                self._write_native()
                self._tell(
                    f"clew: no step has ended for {self._hang_seconds:g} s; what each thread is doing: {self.path}"
                )

    def _write_native(self) -> None:
        if self._file is None:
            return
        write = functools.partial(write_native_stacks, os.getpid(), self._file.fileno())
        if self._family is not None:
            self._family.write_apart(write)
        else:
            write()
