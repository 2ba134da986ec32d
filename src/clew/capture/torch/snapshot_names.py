"""What the user's program keeps in variables from step to step, by frame, as a snapshot holds it."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from types import FunctionType, GeneratorType
from typing import TYPE_CHECKING, Any, Final

from clew.capture.torch.probe_events import is_library
from clew.capture.torch.snapshot_values import Packer
from clew.stats.built import BUILT

if TYPE_CHECKING:
    from types import CodeType, FrameType

    import torch

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


def suspended_frames(frames: list[FrameType]) -> list[FrameType]:
    """Return the frames of the user's generators that wait for their next turn; a ``for`` keeps its own to itself.

    The whole memory is searched for them, so only where the program has functions that yield.
    """
    if not any(_has_generators(frame.f_globals) for frame in frames):
        return []
    living = list_of_type(gc.get_objects(), GeneratorType)
    waiting = [each.gi_frame for each in living if each.gi_frame is not None and not each.gi_running]
    return [frame for frame in waiting if _is_of_user(frame.f_code)][:_MOST_SUSPENDED]


def list_of_type_slowly(things: list[Any], kind: type) -> list[Any]:
    """Return the things that are of this very type."""
    return [thing for thing in things if type(thing) is kind]


list_of_type = list_of_type_slowly if BUILT is None else BUILT.list_of_type


def describe_place(frame: FrameType) -> tuple[str, str]:
    """Return the file and the function of a frame, which are the same in every process."""
    return Path(frame.f_code.co_filename).name, frame.f_code.co_name


def pack_names(
    registry: Any, tensors: dict[str, torch.Tensor], *, with_tensors: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what can be kept of the variables of the user's frames, by file and function, and what is left out."""
    packer = Packer(registry, tensors, with_data=with_tensors)
    running = user_frames(sys._getframe(1))
    found = []
    for index, frame in enumerate([*running, *suspended_frames(running)]):
        file, function = describe_place(frame)
        names = packer.pack_frame(frame, str(index))
        found.append({"file": file, "function": function, "names": names})
    return found, packer.left_out


def _is_of_user(code: CodeType) -> bool:
    return not is_library(code.co_filename) and not code.co_filename.startswith(_TOOLS)


def _has_generators(names: dict[str, Any]) -> bool:
    """Return whether a module has functions that yield, or classes with such methods."""
    things = list(names.values())
    # type(), not isinstance: a proxy may answer for its target, and loading that would be our doing.
    kinds = [thing for thing in things if issubclass(type(thing), type)]
    inner = [part for kind in kinds for part in vars(kind).values()]
    return any(
        type(part) is FunctionType and bool(part.__code__.co_flags & _YIELDS) for part in [*things, *inner]
    )
