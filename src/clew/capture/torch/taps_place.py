"""Where in the user's code and model a tap is: the line that called it and the module that was running."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

_HERE: Final = Path(__file__).parent
_INTERNAL: Final = (
    str(_HERE / "taps"),
    str(_HERE / "check"),
    str(_HERE.parent.parent / "api" / "taps"),
    str(Path(torch.__file__).parent) + os.sep,
    "<eval_with_key>",
)
"""Beginnings of the files whose frames are not the user's: the taps themselves, torch, and code that it made."""
WRAPPERS: Final = frozenset(
    {"DistributedDataParallel", "DataParallel", "OptimizedModule", "FullyShardedDataParallel"}
)
"""Modules around the user's model: not part of the path that the user knows."""


@dataclass(frozen=True, slots=True)
class Place:
    """A spot in the user's code: ``model.py:41``, the text of that line, the dotted path of the module."""

    source: str = ""
    code: str = ""
    site: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        line = f"{self.source}: {self.code}" if self.code else self.source
        return ", ".join(part for part in (self.site, line) if part)


class _Traced(threading.local):
    """The place of the tap that compiled code is running in this thread: the stack does not show it."""

    place: Place | None = None


_traced = _Traced()


@contextmanager
def at_place(place: Place) -> Iterator[None]:
    """Make a place the one that is found, as long as it is known."""
    before, _traced.place = _traced.place, place if place.file else None
    try:
        yield
    finally:
        _traced.place = before


def find_place(site: str | None = None) -> Place:
    """Return the place of the caller; ``site`` when it is known already."""
    if _traced.place is not None:
        return _traced.place if site is None else replace(_traced.place, site=site)
    frame = find_user_frame()
    if frame is None:
        return Place(site=site or "")
    return place_at(frame.f_code.co_filename, frame.f_lineno, name_running_module() if site is None else site)


def place_at(file: str, line: int, site: str) -> Place:
    """Return the place of a line of a file."""
    return Place(f"{shorten(file)}:{line}", linecache.getline(file, line).strip(), site, file, line)


def shorten(file: str) -> str:
    """Return a path relative to the working directory when it lies below it."""
    here = os.getcwd() + os.sep  # noqa: PTH109 - text is compared with text
    return file.removeprefix(here)


def find_user_frame() -> FrameType | None:
    """Return the innermost frame that belongs neither to the taps nor to torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def find_call() -> tuple[CodeType | None, int]:
    """Return the code object and the instruction of the user's call: what makes one call site."""
    frame = find_user_frame()
    return (None, 0) if frame is None else (frame.f_code, frame.f_lasti)


@cache
def is_internal(file: str) -> bool:
    """Return whether a file is part of the taps or of torch."""
    return file.startswith(_INTERNAL) or "torchinductor_" in file


def name_running_module() -> str:
    """Return the dotted path of the innermost module being called, ``(Net)`` for the outermost itself."""
    modules = [frame.f_locals["self"] for frame in module_frames()]
    while len(modules) > 1 and type(modules[-1]).__name__ in WRAPPERS:
        del modules[-1]
    if not modules:
        return ""
    inner, root = modules[0], modules[-1]
    path = next((name for name, module in root.named_modules() if module is inner), None)
    if path is None:
        return type(inner).__name__
    return path or f"({type(root).__name__})"


def module_frames() -> Iterator[FrameType]:
    """Yield the frames in which torch calls a module, the innermost first.

    Only these frames are asked for their locals: before Python 3.13 asking keeps every local alive until the
    function returns, which in a user's training loop would hold on to a whole graph.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            yield frame
        frame = frame.f_back


def find_root_call() -> tuple[Any, ...] | None:
    """Return the tensors given to the outermost module call and the module, or None outside of any."""
    root = None
    for frame in module_frames():
        root = frame
    if root is None:
        return None
    given = (*root.f_locals.get("args", ()), *root.f_locals.get("kwargs", {}).values())
    return (root.f_locals["self"], *(value for value in given if isinstance(value, torch.Tensor)))
