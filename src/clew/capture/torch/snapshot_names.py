"""What the user's loop keeps in variables: counters and small tensors, by frame, as a snapshot holds them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.frame_variables import is_function, variables_of
from clew.capture.torch import snapshot_state as states
from clew.capture.torch.probe_events import is_library

if TYPE_CHECKING:
    from types import FrameType

_NUMBERS: Final = (bool, int, float)
_MOST_NAMES: Final = 200
_LARGEST_BYTES: Final = 256_000
_MOST_BYTES: Final = 2_000_000
_TOOLS: Final = (sys.prefix + os.sep, sys.base_prefix + os.sep, "<")
"""Where files lie that nobody calls a library, such as the program that started this one."""


def user_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the user's own files, the innermost first."""
    found = []
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_library(name) and not name.startswith(_TOOLS):
            found.append(frame)
        frame = frame.f_back
    return found


def pack_names(
    registry: Any, tensors: dict[str, torch.Tensor], *, with_tensors: bool
) -> list[dict[str, Any]]:
    """Return the plain numbers and small tensors in the variables of the user's frames, by file and function."""
    left = _MOST_BYTES if with_tensors else 0
    found = []
    for index, frame in enumerate(user_frames(sys._getframe(1))):
        names: dict[str, Any] = {}
        for name, value in _list_variables(frame):
            size = 1 if type(value) in _NUMBERS else _size_of(value, registry)
            if size == 1 or 0 < size <= min(left, _LARGEST_BYTES):
                left -= size
                names[name] = states.pack(value, f"{index}.{name}", tensors)
        file = Path(frame.f_code.co_filename).name
        found.append({"file": file, "function": frame.f_code.co_name, "names": names})
    return found


def _list_variables(frame: FrameType) -> list[tuple[str, Any]]:
    local = variables_of(frame)
    found = [(name, value) for name, value in local.items() if not name.startswith("__")][:_MOST_NAMES]
    if type(local) is dict and is_function(frame):
        local.clear()  # a copy that Python keeps with the frame: it would hold on to what the user deletes
    return found


def _size_of(value: Any, registry: Any) -> int:
    """Return the bytes of a tensor, or of a short list or tuple of tensors; 0 for everything else."""
    if type(value) in (list, tuple) and 0 < len(value) <= 8:
        sizes = [_size_of(part, registry) for part in value]
        return sum(sizes) if all(sizes) else 0
    if type(value) is not torch.Tensor or registry.owns(value):
        return 0
    return value.numel() * value.element_size() if states.is_storable(value) else 0
