"""Stops at source lines, through Python's own tracing; files without a breakpoint are not traced."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from clew.replay.frames import is_user_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from clew.replay.breakpoint import Breakpoint


class LineStop:
    """Calls ``hit`` with a breakpoint and the frame that is about to execute its line."""

    def __init__(
        self,
        hit: Callable[[Breakpoint, FrameType], None],
        arrive: Callable[[FrameType], None],
        *,
        tell: Callable[[str], None],
    ) -> None:
        self._hit = hit
        self._arrive = arrive
        self._tell = tell
        self._points: list[Breakpoint] = []
        self._files: dict[str, dict[int, list[Breakpoint]]] = {}
        self._is_on = False
        self._was_refused = False
        self._next: FrameType | None = None

    def add(self, point: Breakpoint) -> None:
        """Stop at one more line."""
        self._points.append(point)
        self._files.clear()
        if not self._is_on:
            self._start()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and self._is_on:
            if self._lines_of(frame.f_code.co_filename):
                frame.f_trace = self._trace_line
            frame = frame.f_back

    def go_to_next(self, frame: FrameType) -> bool:
        """Call ``arrive`` at the next line of a function, or of whoever called it; return whether that can be."""
        if not self._is_on:
            self._start()
        if self._is_on:
            self._next = frame
            frame.f_trace = self._trace_line
        return self._is_on

    def wait_no_more(self) -> None:
        """Something else came before the next line."""
        self._next = None
        if not self._points:
            self.stop()

    def stop(self) -> None:
        """Take Python's tracing away again."""
        self._points.clear()
        self._files.clear()
        self._next = None
        if self._is_on and sys.gettrace() == self._trace_call:
            sys.settrace(None)
            threading.settrace(None)
        self._is_on = False

    def _start(self) -> None:
        if sys.gettrace() is not None:
            if not self._was_refused:
                self._was_refused = True
                self._tell("clew: another debugger traces this program; breakpoints on lines are off")
            return
        self._is_on = True
        sys.settrace(self._trace_call)
        threading.settrace(self._trace_call)

    def _lines_of(self, file: str) -> dict[int, list[Breakpoint]]:
        lines = self._files.get(file)
        if lines is None:
            lines = self._files[file] = {}
            for point in self._points:
                if point.matches(file):
                    lines.setdefault(point.number, []).append(point)
        return lines

    def _trace_call(self, frame: FrameType, _: str, __: Any) -> Any:
        return self._trace_line if self._lines_of(frame.f_code.co_filename) else None

    def _trace_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if self._next is frame and event == "return":
            self._next = _find_caller(frame)
            if self._next is not None:
                self._next.f_trace = self._trace_line
        elif self._next is frame and event == "line":
            self.wait_no_more()
            self._arrive(frame)
        elif event == "line":
            for point in self._lines_of(frame.f_code.co_filename).get(frame.f_lineno, ()):
                self._hit(point, frame)
        return self._trace_line


def _find_caller(frame: FrameType) -> FrameType | None:
    caller = frame.f_back
    while caller is not None and not is_user_file(caller.f_code.co_filename):
        caller = caller.f_back
    return caller
