"""Recorded variables back in the frames of a script that is executed again."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from clew.replay.turns import Turns

if TYPE_CHECKING:
    from types import FrameType

    import torch


def restore_names(saved: list[dict[str, Any]], tensors: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Put recorded variables back into the frames of the script, and its loops to the turns they tell.

    Return the tensors that were exchanged: the new one by the identity of the old one.
    """
    from clew.capture.torch.snapshot_names import Suspended, describe_place, user_frames

    running = user_frames(sys._getframe(1))
    frames = [*running, *Suspended().find(running)]
    renewal = Renewal(tensors)
    for kept in saved:
        place = (kept["file"], kept["function"])
        frame = next((each for each in frames if describe_place(each) == place), None)
        if frame is None:
            continue
        frames.remove(frame)
        local = frame.f_locals
        values = {
            name: renewal.renew(local[name], data) for name, data in kept["names"].items() if name in local
        }
        _write_locals(frame, values)
        for turns in Turns.living:
            if turns.code is frame.f_code and turns.target in values:
                turns.go_to(values[turns.target])
    return renewal.exchanged


class Renewal:
    """Recorded values in the place of present ones; lists, dicts and objects stay the same and get what they held."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.exchanged: dict[int, torch.Tensor] = {}
        self._tensors = tensors
        self._made: dict[str, Any] = {}
        self._kept: list[Any] = []

    def renew(self, old: Any, data: Any) -> Any:
        """Return what a variable is to hold, given what it holds now; that is kept where the data does not fit it."""
        if not isinstance(data, dict):
            return data
        for mark, way in self._ways.items():
            if mark in data:
                return way(self, old, data[mark] if mark not in ("tensor", "float") else data)
        return old

    def _plain(self, _: Any, data: Any) -> Any:
        from clew.replay.restore import unpack

        return unpack(data, self._tensors)

    def _tensor(self, old: Any, data: Any) -> Any:
        import torch

        name = data["tensor"]
        if name not in self._made:
            new = self._plain(old, data)
            if isinstance(old, torch.Tensor) and old.is_leaf and old.requires_grad and old.shape == new.shape:
                # A weight: others know it as well.
                with torch.no_grad():
                    new = old.copy_(new)
            self._made[name] = new
        if isinstance(old, torch.Tensor):
            self._kept.append(old)  # its identity must not be used again
            self.exchanged[id(old)] = self._made[name]
        return self._made[name]

    def _array(self, _: Any, data: Any) -> Any:
        name = data["tensor"]
        if name not in self._made:
            self._made[name] = self._plain(None, data).numpy().copy()
        return self._made[name]

    def _parts(self, old: Any, data: list[Any]) -> list[Any]:
        present = list(old) if isinstance(old, (list, tuple, deque)) else []
        return [self.renew(present[i] if i < len(present) else None, part) for i, part in enumerate(data)]

    def _list(self, old: Any, data: list[Any]) -> Any:
        parts = self._parts(old, data)
        if type(old) is not list:
            return parts
        old[:] = parts
        return old

    def _deque(self, old: Any, data: list[Any]) -> Any:
        parts = self._parts(old, data)
        if type(old) is not deque:
            return deque(parts)
        old.clear()
        old.extend(parts)
        return old

    def _tuple(self, old: Any, data: list[Any]) -> Any:
        return tuple(self._parts(old, data))

    def _dict(self, old: Any, data: list[Any]) -> Any:
        target = old if type(old) is dict else {}
        for key, part in data:
            target[key] = self.renew(target.get(key), part)
        return target

    def _object(self, old: Any, data: dict[str, Any]) -> Any:
        attributes = getattr(old, "__dict__", None)
        if isinstance(attributes, dict):
            for name, part in data.items():
                attributes[name] = self.renew(attributes.get(name), part)
        return old

    def _suspended(self, old: Any, data: dict[str, Any]) -> Any:
        frame = getattr(old, "gi_frame", None)
        if frame is not None:
            local = frame.f_locals
            _write_locals(frame, {n: self.renew(local[n], part) for n, part in data.items() if n in local})
        return old

    def _generator(self, old: Any, data: Any) -> Any:
        if hasattr(old, "set_state"):
            old.set_state(self._plain(None, data))
        return old

    def _python_random(self, old: Any, data: Any) -> Any:
        if hasattr(old, "setstate"):
            old.setstate(_unlisted(data))
        return old

    def _numpy_random(self, old: Any, data: Any) -> Any:
        if hasattr(old, "bit_generator"):
            old.bit_generator.state = _unlisted(data)
        return old

    def _numpy_state(self, old: Any, data: Any) -> Any:
        if hasattr(old, "set_state"):
            old.set_state(_unlisted(data))
        return old

    _ways: Final[dict[str, Any]] = {
        "tensor": _tensor, "float": _plain, "array": _array, "items": _list, "list": _list, "tuple": _tuple,
        "deque": _deque, "entries": _dict, "attributes": _object, "suspended": _suspended,
        "generator": _generator, "random": _python_random, "numpy_random": _numpy_random,
        "numpy_state": _numpy_state,
    }  # fmt: skip


def _unlisted(data: Any) -> Any:
    """Return the state of a generator as the generator takes it."""
    if isinstance(data, dict):
        if "words" in data:
            import numpy as np

            return np.array(data["words"], dtype=np.uint32)
        if "tuple" in data:
            return tuple(_unlisted(part) for part in data["tuple"])
        return {key: _unlisted(part) for key, part in data.items()}
    return data


def _write_locals(frame: FrameType, values: dict[str, Any]) -> None:
    local = frame.f_locals
    local.update(values)
    if local is not frame.f_globals and sys.version_info < (3, 13):
        # From 3.13 on writing to f_locals is enough.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
