"""Values that a program keeps from one step to the next, as plain data: numbers, small tensors, generators, objects.

Only what is small is kept: a replay buffer of a million transitions is named as left out instead.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.frame_variables import is_function, variables_of
from clew.capture.torch import snapshot_state as states
from clew.capture.torch.probe_events import is_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

NUMBERS: Final = (bool, int, float)
_WORDS: Final = (str, type(None))
_SEQUENCES: Final[dict[type, str]] = {list: "items", tuple: "tuple", deque: "deque"}
_MOST_NAMES: Final = 200
_MOST_PARTS: Final = 256
_MOST_VALUES: Final = 4000
_DEEPEST: Final = 4
_LARGEST_BYTES: Final = 256_000
_MOST_BYTES: Final = 2_000_000
_MOST_LEFT_OUT: Final = 6


class Packer:
    """Turns variables into plain data within bounds; tensors go into ``tensors``, each once.

    ``with_data``: tensors, arrays and containers are kept as well; numbers and generators always are.
    """

    def __init__(self, registry: Any, tensors: dict[str, torch.Tensor], *, with_data: bool) -> None:
        self.left_out: list[str] = []
        """What was too large to be kept, by the names it has in the program."""
        self._registry = registry
        self._tensors = tensors
        self._with_data = with_data
        self._bytes_left = _MOST_BYTES
        self._values_left = _MOST_VALUES
        self._seen: dict[int, tuple[Any] | None] = {}

    def pack_frame(self, frame: FrameType, place: str) -> dict[str, Any]:
        """Return the variables of a frame that can be kept, by name."""
        found = {}
        for name, value in list_variables(frame):
            data = self.pack(value, f"{place}.{name}")
            if data is not None:
                found[name] = data[0]
        return found

    def pack(self, value: Any, place: str, depth: int = 0) -> tuple[Any] | None:
        """Return a value as data in a tuple of one, None for one that is not kept."""
        kind = type(value)
        if kind in NUMBERS:
            return (states.pack(value, place, self._tensors),)
        if kind in _WORDS and depth:
            return (value,)
        if self._values_left <= 0 or depth > _DEEPEST:
            return None
        self._values_left -= 1
        if kind in _SEQUENCES or kind is dict:
            return self._pack_container(value, place, depth) if self._with_data else None
        if id(value) in self._seen:
            return self._seen[id(value)]
        pack = self._find_way(kind)
        data = pack(value, place, depth) if pack is not None else None
        self._seen[id(value)] = data
        return data

    def _find_way(self, kind: type) -> Callable[[Any, str, int], tuple[Any] | None] | None:
        numpy: Any = sys.modules.get("numpy")
        if issubclass(kind, torch.Tensor):
            return self._pack_tensor if self._with_data and kind is torch.Tensor else None
        if kind is torch.Generator:
            return self._pack_generator
        if issubclass(kind, random.Random):
            return lambda value, *_: ({"random": _listed(value.getstate())},)
        if numpy is not None and kind is numpy.random.Generator:
            return lambda value, *_: ({"numpy_random": _listed(value.bit_generator.state)},)
        if numpy is not None and kind is numpy.random.RandomState:
            return lambda value, *_: ({"numpy_state": _listed(value.get_state(legacy=False))},)
        if numpy is not None and kind is numpy.ndarray:
            return self._pack_array if self._with_data else None
        if kind is GeneratorType:
            return self._pack_suspended
        return self._pack_object if _is_of_user(kind) else None

    def _pack_tensor(self, value: torch.Tensor, place: str, _: int) -> tuple[Any] | None:
        if self._registry.owns(value) or not states.is_storable(value):
            return None
        if not self._has_room(value.numel() * value.element_size(), place):
            return None
        return (states.pack(value, place, self._tensors),)

    def _pack_array(self, value: Any, place: str, _: int) -> tuple[Any] | None:
        if value.dtype.kind not in "fiub" or not self._has_room(value.nbytes, place):
            return None
        try:
            tensor = torch.from_numpy(value.copy())
        except TypeError:  # an element type that torch does not know
            return None
        return ({"array": states.pack(tensor, place, self._tensors)},)

    def _pack_generator(self, value: torch.Generator, place: str, _: int) -> tuple[Any] | None:
        if value.device.type != "cpu" or value is torch.default_generator:
            return None
        return ({"generator": states.pack(value.get_state(), place, self._tensors)},)

    def _pack_suspended(self, value: Any, place: str, _: int) -> tuple[Any] | None:
        """A generator that waits: its variables are those of its frame."""
        if value.gi_frame is None or value.gi_running or is_library(value.gi_code.co_filename):
            return None
        return ({"suspended": self.pack_frame(value.gi_frame, place)},)

    def _pack_container(self, value: Any, place: str, depth: int) -> tuple[Any] | None:
        if len(value) > _MOST_PARTS:
            self._leave_out(place)
            return None
        if isinstance(value, dict):
            kept = ((key, self.pack(part, f"{place}[{key!r}]", depth + 1)) for key, part in value.items()
                    if type(key) in (str, int))  # fmt: skip
            entries = [[key, data[0]] for key, data in kept if data is not None]
            return ({"entries": entries},) if entries else None
        parts = [self.pack(part, f"{place}[{index}]", depth + 1) for index, part in enumerate(value)]
        kept_parts = [part[0] for part in parts if part is not None]
        # Half a list would be worse than none.
        return ({_SEQUENCES[type(value)]: kept_parts},) if len(kept_parts) == len(parts) else None

    def _pack_object(self, value: Any, place: str, depth: int) -> tuple[Any] | None:
        self._seen[id(value)] = None  # it may hold itself
        attributes = {}
        for name, part in list(vars(value).items())[:_MOST_NAMES]:
            data = self.pack(part, f"{place}.{name}", depth + 1)
            if data is not None:
                attributes[name] = data[0]
        return ({"attributes": attributes},) if attributes else None

    def _has_room(self, size: int, place: str) -> bool:
        if size > min(self._bytes_left, _LARGEST_BYTES):
            self._leave_out(place)
            return False
        self._bytes_left -= size
        return True

    def _leave_out(self, place: str) -> None:
        if len(self.left_out) < _MOST_LEFT_OUT:
            self.left_out.append(place.partition(".")[2])


def list_variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a frame by name, those of Python itself left out."""
    local = variables_of(frame)
    found = [(name, value) for name, value in local.items() if not name.startswith("__")][:_MOST_NAMES]
    if type(local) is dict and is_function(frame):
        local.clear()  # a copy that Python keeps with the frame: it would hold on to what the user deletes
    yield from found


def _is_of_user(kind: type) -> bool:
    """Return whether a class is the user's own, and its objects hold their state in plain attributes."""
    if issubclass(kind, (torch.nn.Module, torch.optim.Optimizer, type, BaseException)):
        return False
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    is_main = kind.__module__ == "__main__"
    return hasattr(kind, "__dictoffset__") and bool(kind.__dictoffset__) and (
        is_main or (file is not None and not is_library(file) and not file.startswith(sys.prefix))
    )  # fmt: skip


def _listed(value: Any) -> Any:
    """Return the state of a generator as data that fits JSON: tuples and arrays become marked lists."""
    if isinstance(value, dict):
        return {key: _listed(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return {"tuple": [_listed(part) for part in value]}
    if hasattr(value, "tolist"):
        return {"words": value.tolist()}
    return value
