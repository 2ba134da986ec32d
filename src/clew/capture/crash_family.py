"""When this process has written its stacks, the processes it has started are asked for theirs: loader workers too.

A handler of Python's own for the signal would be seen by the script (launchers look whether there is one), so a thread
waits for the file to change instead: it sleeps in the kernel until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_ANSWER_SECONDS: Final = 0.1
_LONGEST_ANSWER_SECONDS: Final = 5.0
"""How long to wait for a process that was asked: on a busy machine it may have to wait for its turn."""
_MODIFIED: Final = 2
_LONGEST_EVENTS: Final = 65536


class Family:
    """Passes a request for stacks on to descendants that catch the signal, until ``stop``."""

    def __init__(self, path: Path, descriptor: int, number: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._number = number
        self._notices = -1
        self._wake = (-1, -1)
        self._thread: threading.Thread | None = None
        self._writing = threading.Lock()

    def start(self) -> None:
        """Wait for the file to change; where the system cannot tell, only this process writes stacks."""
        self._notices = _watch_file(self._path)
        if self._notices < 0:
            return
        self._wake = os.pipe()
        self._thread = threading.Thread(target=self._wait, name="clew-stacks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait no longer."""
        if self._thread is None:
            return
        # Not by closing: forked workers hold copies of this end.
        os.write(self._wake[1], b"!")
        self._thread.join()
        for descriptor in (*self._wake, self._notices):
            os.close(descriptor)
        self._thread = None

    def _wait(self) -> None:
        while True:
            ready, _, _ = select.select([self._notices, self._wake[0]], [], [])
            if self._wake[0] in ready:
                return
            with self._writing:
                self._pass_on()

    def write_apart(self, write: Callable[[], None]) -> None:
        """Let somebody else write into the file, when everybody has answered, as no new request."""
        with self._writing:
            if self._thread is not None:
                self._pass_on()
            write()
            if self._thread is not None:
                self._has_changed()

    def _pass_on(self) -> None:
        if not self._has_changed():
            return
        self._rest()
        self._ask_all()
        # What they wrote, and what is written about them, is no new request.
        self._has_changed()

    def _has_changed(self) -> bool:
        """Return whether there were notices, and forget them."""
        try:
            return bool(os.read(self._notices, _LONGEST_EVENTS))
        except BlockingIOError:
            return False

    def _ask_all(self) -> None:
        for process in list_descendants(os.getpid()):
            if catches(process, self._number):
                with contextlib.suppress(OSError):
                    os.write(self._descriptor, f"\nprocess {process}, started by {os.getpid()}:\n".encode())
                    asked = os.fstat(self._descriptor).st_size
                    os.kill(process, self._number)
                    self._let_finish(asked)

    def _let_finish(self, asked: int) -> None:
        """Wait until the file has grown and grows no more: the next one that is asked writes into it, too."""
        until, last = monotonic() + _LONGEST_ANSWER_SECONDS, asked
        while monotonic() < until and not self._rest():
            size = os.fstat(self._descriptor).st_size
            if asked < size == last:
                return
            last = size

    def _rest(self) -> bool:
        """Wait a moment; return whether it is time to stop."""
        return bool(select.select([self._wake[0]], [], [], _ANSWER_SECONDS)[0])


def list_descendants(process: int) -> list[int]:
    """Return the processes that a process, and those in turn, have started; none where that cannot be seen."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for task in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (task / "children").read_text(encoding="ascii").split())
    return [one for child in sorted(set(found)) for one in (child, *list_descendants(child))]


def catches(process: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; one that has none would be ended by it."""
    with contextlib.suppress(OSError, ValueError):
        text = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
        for line in text.splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _watch_file(path: Path) -> int:
    """Return a descriptor that can be read when a file has changed, -1 where there is no such thing."""
    try:
        library = ctypes.CDLL(None)
        notices = int(library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        if notices < 0 or library.inotify_add_watch(notices, os.fsencode(path), _MODIFIED) < 0:
            return -1
    except (OSError, AttributeError):
        return -1
    return notices
