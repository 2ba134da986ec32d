"""What the user's program keeps in variables from step to step, by frame, as a snapshot holds it."""

from __future__ import annotations

import functools
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
_PARTS_OF_A_TYPE: Final = vars(type)["__dict__"]
_NAME_OF_A_TYPE: Final = vars(type)["__qualname__"]
"""Ways to read a class without asking its metaclass."""


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
    when one that was found has ended or code that yields is referred to more or less often than before: each living
    generator does so.
    """

    def __init__(self) -> None:
        self._codes: list[CodeType] = []
        self._references: dict[int, int] = {}
        self._living: list[weakref.ref[Generator]] = []

    def find(self, frames: list[FrameType]) -> list[FrameType]:
        """Return their frames, given those that are running."""
        named = _list_yielding(frames)
        known = (reference() for reference in self._living)
        living = [each for each in known if each is not None and each.gi_frame is not None]
        if len(living) < len(self._living) or self._count_references(named) != self._references:
            living, self._codes = _search(frames) if named else ([], [])
            self._living = [weakref.ref(each) for each in living]
            self._references = self._count_references(named)
        waiting = [each.gi_frame for each in living if not each.gi_running]
        return [frame for frame in waiting if frame is not None][:_MOST_SUSPENDED]

    def _count_references(self, named: list[CodeType]) -> dict[int, int]:
        return {id(code): sys.getrefcount(code) for code in [*named, *self._codes]}


def _search(frames: list[FrameType]) -> tuple[list[Generator], list[CodeType]]:
    """Return the living generators of the user, and all code of his that yields, by whatever name."""
    things = gc.get_objects()
    is_of_user = functools.cache(_is_file_of_user)
    living = [each for each in list_of_type(things, GeneratorType) if is_of_user(each.gi_code.co_filename)]
    codes = [each.__code__ for each in list_of_type(things, FunctionType)]
    codes = [code for code in codes if is_of_user(code.co_filename)] + [frame.f_code for frame in frames]
    return [each for each in living if each.gi_frame is not None], _keep_yielding(codes)


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
    """Return the code of the functions that yield: in the modules of some frames and in what these have imported.

    Expressions that yield are soon used up as a rule: they alone are no reason to search.
    """
    spaces = {id(frame.f_globals): frame.f_globals for frame in frames}
    # type(), not isinstance: a proxy may answer for its target, and loading that would be our doing.
    things = [thing for space in spaces.values() for thing in list(space.values())]
    imported = [vars(thing) for thing in things if type(thing) is ModuleType]
    spaces |= {id(space): space for space in imported if _is_file_of_user(space.get("__file__"))}
    things = [thing for space in spaces.values() for thing in list(space.values())]
    things += _list_parts(things)
    things += [thing.__func__ for thing in things if type(thing) in (staticmethod, classmethod)]
    things += [vars(thing).get("__wrapped__") for thing in things if type(thing) is FunctionType]
    codes = [thing.__code__ for thing in things if type(thing) is FunctionType]
    yielding = _keep_yielding([code for code in codes if _is_of_user(code)])
    return [code for code in yielding if code.co_name != "<genexpr>"]


def _list_parts(things: list[Any]) -> list[Any]:
    """Return what the classes among some things hold, and the classes among that."""
    kinds = [thing for thing in things if issubclass(type(thing), type)]
    parts = [part for kind in kinds for part in list(_PARTS_OF_A_TYPE.__get__(kind).values())]
    # Within a class, only one that is written there: others would lead through all of torch.
    prefixes = tuple(f"{_NAME_OF_A_TYPE.__get__(kind)}." for kind in kinds)
    inner = [part for part in parts if type(part) is type and part.__qualname__.startswith(prefixes)]
    return parts + (_list_parts(inner) if inner else [])


def _keep_yielding(codes: list[CodeType]) -> list[CodeType]:
    """Return the code that yields among some, and inside it."""
    found = {id(inner): inner for code in codes for inner in _list_inner(code)}
    return [code for code in found.values() if code.co_flags & _YIELDS]


def _list_inner(code: CodeType) -> list[CodeType]:
    """Return some code and that of the functions inside it."""
    inner = [part for part in code.co_consts if type(part) is CodeType]
    return [code, *(deeper for part in inner for deeper in _list_inner(part))]


def _is_file_of_user(file: object) -> bool:
    return type(file) is str and not is_library(file) and not file.startswith(_TOOLS)
