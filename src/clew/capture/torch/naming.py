"""What the user calls a model: found once per model, by looking at the names in the frames that call it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from clew.capture.frame_variables import variables_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import FrameType

_LIBRARIES: Final = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[2]))
_MOST_FRAMES: Final = 25
_MOST_NAMES: Final = 200


class Found(NamedTuple):
    """A module that contains the called one (or is it), and the name it goes by."""

    top: torch.nn.Module
    name: str


def find_owner(module: torch.nn.Module) -> Found:
    """Return the largest model in the calling frames that the module belongs to, with the user's name for it.

    A container such as a LightningModule is never called itself: its ``self`` in the frame tells of it.
    """
    name = ""
    for frame in user_frames():
        for candidate, value in _named_values(variables_of(frame)):
            if value is module:
                name = name or candidate
            elif isinstance(value, torch.nn.Module) and _contains(value, module):
                return Found(value, "" if candidate == "self" else candidate)
    return Found(module, name)


def find_holders(parameters: Iterable[torch.Tensor]) -> list[Found]:
    """Return the models in the calling frames that hold some of the parameters, the largest ones only."""
    wanted = {id(parameter) for parameter in parameters}
    found: list[Found] = []
    for frame in user_frames():
        for name, value in _named_values(variables_of(frame)):
            if isinstance(value, torch.nn.Module) and any(id(p) in wanted for p in value.parameters()):
                found.append(Found(value, "" if name == "self" else name))
    tops = {id(one.top): one for one in reversed(found)}
    return [
        one
        for one in tops.values()
        if not any(other is not one and _contains(other.top, one.top) for other in tops.values())
    ]


def user_frames() -> Iterator[FrameType]:
    """Yield the frames of the user's code, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            frame = frame.f_back
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def source_line() -> str:
    """Return ``file:line`` of the innermost user frame."""
    for frame in user_frames():
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""


def _named_values(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names of a frame, and one level into ``self`` when it is a plain object such as a trainer."""
    yield from list(names.items())[:_MOST_NAMES]
    owner = names.get("self")
    if owner is not None and not isinstance(owner, torch.nn.Module):
        attributes = getattr(owner, "__dict__", None)
        if isinstance(attributes, dict):
            yield from list(attributes.items())[:_MOST_NAMES]


def _contains(outer: torch.nn.Module, inner: torch.nn.Module) -> bool:
    return any(module is inner for module in outer.modules())
