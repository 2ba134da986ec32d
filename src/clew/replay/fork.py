"""Copies of the process: an action runs in one, silent and without a trace, and its answer comes back as plain data."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clew.capture.process_copy import fall_silent, write_all

if TYPE_CHECKING:
    from collections.abc import Callable


class Answer(NamedTuple):
    """What came back from a copy: its value, or why there is none."""

    value: Any = None
    trouble: str = ""


def run_forked(action: Callable[[], Any], *, seconds: float) -> Answer:
    """Run an action in a copy of the process and return what it gave, as JSON has it; the copy leaves no trace."""
    rest_openmp()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _serve(action, writing)
    os.close(writing)
    deadline = time.monotonic() + seconds
    try:
        text = _read_all(reading, deadline=deadline)
    finally:
        os.close(reading)
        _bury(child)
    try:
        answer = json.loads(text)
    except ValueError:
        late = time.monotonic() >= deadline
        return Answer(None, f"no answer within {seconds:.0f} s" if late else "it ended without an answer")
    return Answer(answer.get("value"), answer.get("trouble", ""))


def _serve(action: Callable[[], Any], writing: int) -> None:
    """Live in the copy: silent, without signal handlers of the script, and gone at the end whatever happens."""
    try:
        fall_silent()
        try:
            answer = {"value": action()}
        except BaseException as error:  # noqa: BLE001 - told to the parent, which goes on
            answer = {"trouble": f"{type(error).__name__}: {error}"}
        write_all(writing, json.dumps(answer, default=str).encode())
    finally:
        os._exit(0)


def _read_all(descriptor: int, *, deadline: float) -> str:
    pieces = []
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([descriptor], [], [], left)
        piece = os.read(descriptor, 1 << 16) if ready else b""
        if not piece:
            break
        pieces.append(piece)
    return b"".join(pieces).decode("utf-8", errors="replace")


def _bury(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def rest_openmp() -> None:
    """Send OpenMP's threads home before a fork: the copy would wait for threads that it does not have."""
    for library in _openmp_libraries():
        try:
            ctypes.CDLL(library).omp_pause_resource_all(2)
        except (OSError, AttributeError):
            continue


def _openmp_libraries() -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    files: dict[str, Any] = {
        line.split()[-1]: None for line in maps.splitlines() if "omp" in line.rpartition("/")[2]
    }
    return [file for file in files if ".so" in file]
