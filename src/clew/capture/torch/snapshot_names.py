"""What the user's program keeps in variables from step to step, by frame, as a snapshot holds it."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from pathlib import Path
from types import CodeType, FunctionType, GeneratorType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from clew.capture.torch.probe_events import is_library
from clew.capture.torch.snapshot_values import Packer
from clew.stats.built import BUILT

if TYPE_CHECKING:
    from types import FrameType

    import torch

    Generator = GeneratorType[Any, Any, Any]

_TOOLS: Final = (sys.prefix + os.sep, sys.base_prefix + os.sep, "<")
"""Where files lie that nobody calls a library, such as the program that started this one."""
_YIELDS: Final = 0x20
_MOST_SUSPENDED: Final = 16


def user_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the user's own files, the innermost first."""
    found = []
    while frame is not None:
        if _is_of_user(frame.f_code):
            found.append(frame)
        frame = frame.f_back
    return found


class Suspended:
    """Finds the user's generators that wait for their next turn; a ``for`` keeps its own to itself.

    The whole memory has to be searched for them, so only where the program has functions that yield, and again only
    when the code of one of them is referred to more or less often than before: each living generator does so.
    """

    def __init__(self) -> None:
        self._references: dict[int, int] = {}
        self._living: list[weakref.ref[Generator]] = []

    def find(self, frames: list[FrameType]) -> list[FrameType]:
        """Return their frames, given those that are running."""
        yielding = _list_yielding(frames)
        living = [each for each in (reference() for reference in self._living) if each is not None]
        if len(living) < len(self._living) or _count_references(yielding, living) != self._references:
            living = _search_generators() if yielding else []
            self._living = [weakref.ref(each) for each in living]
            self._references = _count_references(yielding, living)
        waiting = [each.gi_frame for each in living if not each.gi_running]
        return [frame for frame in waiting if frame is not None][:_MOST_SUSPENDED]


def _count_references(yielding: list[CodeType], living: list[Generator]) -> dict[int, int]:
    """Return how often each piece of code is referred to, by its identity."""
    return {id(code): sys.getrefcount(code) for code in [*yielding, *(each.gi_code for each in living)]}


def _search_generators() -> list[Generator]:
    return [each for each in list_of_type(gc.get_objects(), GeneratorType) if _is_of_user(each.gi_code)]


def list_of_type_slowly(things: list[Any], kind: type) -> list[Any]:
    """Return the things that are of this very type."""
    return [thing for thing in things if type(thing) is kind]


list_of_type = list_of_type_slowly if BUILT is None else BUILT.list_of_type


def describe_place(frame: FrameType) -> tuple[str, str]:
    """Return the file and the function of a frame, which are the same in every process."""
    return Path(frame.f_code.co_filename).name, frame.f_code.co_name


def pack_names(
    suspended: Suspended, registry: Any, tensors: dict[str, torch.Tensor], *, with_tensors: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what can be kept of the variables of the user's frames, by file and function, and what is left out."""
    packer = Packer(registry, tensors, with_data=with_tensors)
    running = user_frames(sys._getframe(1))
    found = []
    for index, frame in enumerate([*running, *suspended.find(running)]):
        file, function = describe_place(frame)
        names = packer.pack_frame(frame, str(index))
        found.append({"file": file, "function": function, "names": names})
    return found, packer.left_out


def _is_of_user(code: CodeType) -> bool:
    return _is_file_of_user(code.co_filename)


def _list_yielding(frames: list[FrameType]) -> list[CodeType]:
    """Return the code of the functions that yield: in the modules of some frames and in what these have imported."""
    spaces = {id(frame.f_globals): frame.f_globals for frame in frames}
    # type(), not isinstance: a proxy may answer for its target, and loading that would be our doing.
    things = [thing for space in spaces.values() for thing in list(space.values())]
    imported = [vars(thing) for thing in things if type(thing) is ModuleType]
    spaces |= {id(space): space for space in imported if _is_file_of_user(space.get("__file__"))}
    things = [thing for space in spaces.values() for thing in list(space.values())]
    kinds = [thing for thing in things if issubclass(type(thing), type)]
    things += [part for kind in kinds for part in vars(kind).values()]
    things += [vars(thing).get("__wrapped__") for thing in things if type(thing) is FunctionType]
    functions = [thing.__code__ for thing in things if type(thing) is FunctionType]
    found = {id(code): code for function in functions for code in _list_inner(function)}
    return [code for code in found.values() if code.co_flags & _YIELDS and _is_of_user(code)]


def _list_inner(code: CodeType) -> list[CodeType]:
    """Return some code and that of the functions inside it, without generator expressions: these are soon used up."""
    inner = [part for part in code.co_consts if type(part) is CodeType and part.co_name != "<genexpr>"]
    return [code, *(deeper for part in inner for deeper in _list_inner(part))]


def _is_file_of_user(file: object) -> bool:
    return type(file) is str and not is_library(file) and not file.startswith(_TOOLS)
