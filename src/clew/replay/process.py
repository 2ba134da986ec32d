"""A piece of work in a forked copy of this process, with an answer as plain data; the copy leaves no trace."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

from clew.capture.crash_signals import leave_none
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_SECONDS: Final = 0.3
_END: Final = b"\n"
"""Ends an answer: processes that the script has started may hold the pipe open for seconds more."""


class Child:
    """The side of the copy: silent until told otherwise, it ends with ``answer``."""

    def __init__(self, writing: int) -> None:
        self._writing = writing
        self._pid = os.getpid()
        self._terminal = [os.dup(descriptor) for descriptor in (0, 1, 2)]

    def silence(self) -> None:
        """Send what is printed from now on nowhere."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        os.close(nowhere)

    def speak(self) -> None:
        """Give the terminal back."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for descriptor, kept in enumerate(self._terminal):
            os.dup2(kept, descriptor)

    def answer(self, data: dict[str, Any]) -> NoReturn:
        """Tell the waiting process and be gone, without a word to the script; a copy of the copy tells nothing."""
        try:
            rest = json.dumps(data, default=str).encode() + _END if os.getpid() == self._pid else b""
            while rest:
                rest = rest[os.write(self._writing, rest) :]
        finally:
            os._exit(0)


def run_in_child(
    action: Callable[[Child], object],
    *,
    is_loud: bool = False,
    find_failed: Callable[[], str] | None = None,
) -> dict[str, Any]:
    """Fork, let the copy act, and return what it answered; empty when it ended without an answer.

    ``find_failed`` is asked now and then why nothing can come of it any more; the copy is ended then.
    """
    if not hasattr(os, "fork"):
        raise UsageError("this system cannot fork a process, which executing a step again needs")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        live(action, Child(writing))
    os.close(writing)
    try:
        return _listen(reading, pid, is_patient=is_loud, find_failed=find_failed)
    finally:
        os.close(reading)


def live(action: Callable[[Child], object], child: Child) -> NoReturn:
    """Act in a copy of the process until it answers, silent from the beginning."""
    try:
        # A crash here is none of the caller's: its stacks would end up in the wrong place.
        leave_none()
        child.silence()
        action(child)
    except BaseException as error:  # noqa: BLE001 - told to the process that waits
        child.answer({"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(1)


def _listen(
    reading: int, pid: int, *, is_patient: bool, find_failed: Callable[[], str] | None
) -> dict[str, Any]:
    before = signal.getsignal(signal.SIGINT)
    if is_patient:  # Ctrl-C is for the one who speaks with the copy
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    pieces = []
    try:
        while True:
            if find_failed is not None and not select.select([reading], [], [], _LOOK_SECONDS)[0]:
                if failed := find_failed():
                    os.kill(pid, signal.SIGKILL)
                    return {"error": failed}
                continue
            piece = os.read(reading, 1 << 16)
            pieces.append(piece)
            if not piece or piece.endswith(_END):
                break
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.waitpid(pid, 0)
        if is_patient:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGINT, before)
    try:
        answer = json.loads(b"".join(pieces))
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
