"""The user's frames of a running program or of an exception, as a debugger shows them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clew.capture.frame_variables import variables_of
from clew.replay.frames import Line, is_tool_file, is_user_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType, TracebackType

RUNNER: Final = str(Path(__file__).resolve().parents[1] / "api" / "script.py")
"""Where clew runs a script: the frames outside it are not the user's."""


def live_frames(frame: FrameType | None = None) -> list[FrameType]:
    """Return the user's frames from a frame (or the caller) outwards; a library's where there are none."""
    found: list[FrameType] = []
    other: list[FrameType] = []
    frame = frame if frame is not None else sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != RUNNER:
        name = frame.f_code.co_filename
        if is_user_file(name):
            found.append(frame)
        elif not is_tool_file(name):
            other.append(frame)
        frame = frame.f_back
    return found or other


def failed_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames of an exception with the line each was at, the innermost first.

    Of torch's own only the one that was given the values that did not fit: a layer's.
    """
    trace: TracebackType | None = error.__traceback__
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    own = [number for number, pair in enumerate(found) if not is_tool_file(pair[0].f_code.co_filename)]
    telling = [number for number, pair in enumerate(found) if not is_machinery(pair[0].f_code.co_filename)]
    shown = sorted({*own, *telling[-1:]}) if own else range(len(found))
    return [found[number] for number in shown][::-1]


def is_machinery(file: str) -> bool:
    """Return whether torch merely passes calls on there: arguments have no names, a frame further out they still do."""
    return "/torch/" in file and ("/torch/nn/" not in file or file.endswith("/nn/modules/module.py"))


def line_of(frame: FrameType, number: int | None = None) -> Line:
    """Return the line a frame is at, or was at."""
    return Line(frame.f_code.co_filename, number or frame.f_lineno, frame.f_code.co_name)


def names_around(frames: Iterable[FrameType]) -> dict[str, Any]:
    """Return the names of several frames, the innermost first: where two have one, the inner one counts."""
    found: dict[str, Any] = {}
    for frame in frames:
        for name, value in (*variables_of(frame).items(), *frame.f_globals.items()):
            found.setdefault(name, value)
    return found


def names_of(frame: FrameType) -> dict[str, Any]:
    """Return the names that code at a frame could use."""
    return {**frame.f_globals, **frame.f_locals}
