"""Lines of the user's code: which one is being executed, and what stands there."""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

_OURS: Final = str(Path(__file__).resolve().parents[1])
_PACKAGES: Final = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of source: file, number, and the function it is in."""

    file: str
    number: int
    function: str = ""

    @property
    def text(self) -> str:
        """What stands on the line, without its indentation."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def find_user_line() -> Line | None:
    """Return the innermost line outside torch and clew; the user's own before an installed library's."""
    frame: FrameType | None = sys._getframe(1)
    library: Line | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_file(name):
            return Line(name, frame.f_lineno, frame.f_code.co_name)
        if library is None and not is_tool_file(name):
            library = Line(name, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return library


def is_inside_optimizer() -> bool:
    """Return whether the optimizer itself is at work, and not a closure that it was given."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/optim/" in name:
            return True
        if not is_tool_file(name):
            return False
        frame = frame.f_back
    return False


def is_user_file(name: str) -> bool:
    """Return whether a file is the user's: not ours, not Python's, not an installed package's."""
    return not (
        name.startswith((_OURS, sys.base_prefix + "/lib", "<frozen", "<string"))
        or any(part in name for part in _PACKAGES)
    )


def is_tool_file(name: str) -> bool:
    """Return whether a file belongs to torch, to Python or to clew, where nobody looks for the cause."""
    return name.startswith((_OURS, sys.base_prefix + "/lib", "<frozen")) or "/torch/" in name


def name_in_frames(thing: object) -> str:
    """Return what the user calls an object, as ``w`` or ``weights['w']``; nothing where no name of theirs has it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            for name, value in frame.f_locals.items():
                if value is thing:
                    return name
                parts = (
                    value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
                )
                for key, part in parts:
                    if part is thing:
                        return f"{name}[{key!r}]"
        frame = frame.f_back
    return ""
