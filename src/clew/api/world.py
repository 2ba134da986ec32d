"""The ranks of a run started again on this machine, so that a step of one of them is executed with all of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Final

from clew.replay.process import Child, live

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.query import Run

MOST_RANKS: Final = 8
_GRACE_SECONDS: Final = 5.0
"""How long a rank may go on when another one has failed: it may be about to say the same."""
_DIE_WITH_PARENT: Final = 1
FAILED: Final = 3
"""How a rank ends whose script has raised an exception."""


def find_obstacle(run: Run) -> str:
    """Return why the ranks of a run cannot be started again, nothing where they can."""
    size = run.info.world_size
    if size > MOST_RANKS:
        return f"the run has {size} ranks, and no more than {MOST_RANKS} are started again on one machine"
    if size > 1 and run.ranks != list(range(size)):
        return f"of the {size} ranks only {', '.join(map(str, run.ranks))} wrote into the run"
    return ""


class World:
    """The ranks beside the one that is looked at; each is a copy of this process. Ends with its ``with`` block."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._port = _find_port() if size > 1 else 0
        self._living: dict[int, int] = {}
        self._failed: tuple[float, str] | None = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for pid in self._living.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def describe(self, rank: int) -> dict[str, str]:
        """Return what a launcher would tell a rank; empty for a run without ranks."""
        if self._size <= 1:
            return {}
        mine, all_of_us = str(rank), str(self._size)
        return {
            "RANK": mine, "LOCAL_RANK": mine, "WORLD_SIZE": all_of_us, "LOCAL_WORLD_SIZE": all_of_us,
            "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port),
        }  # fmt: skip

    def start(self, rank: int, action: Callable[[Child], object]) -> None:
        """Start a copy of this process that acts as a rank until it is ended."""
        pid = os.fork()
        if pid:
            self._living[rank] = pid
            return
        _end_with_parent()
        live(action, Child(os.open(os.devnull, os.O_WRONLY)))

    def find_failed(self) -> str:
        """Return which rank has failed some time ago: who waits for it waits in vain."""
        for rank, pid in list(self._living.items()):
            gone, status = _look_after(pid)
            if gone:
                del self._living[rank]
                if os.waitstatus_to_exitcode(status) > 0 and self._failed is None:
                    self._failed = time.monotonic(), f"rank {rank} failed when it was started again"
        if self._failed is None or time.monotonic() - self._failed[0] < _GRACE_SECONDS:
            return ""
        return self._failed[1]

    def end(self) -> None:
        """End the other ranks: what is left to do needs none of them."""
        for pid in self._living.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _look_after(pid: int) -> tuple[bool, int]:
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True, 0
    return bool(found), status


def _find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _end_with_parent() -> None:
    """A rank that nobody waits for would wait for the others for half an hour."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
