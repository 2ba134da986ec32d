"""Where the user's loops are: in a script that is executed again, each ``for`` can be set to a later turn.

The script is compiled with a word around what its loops go over. Nothing else about it changes, lines included.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

    import torch

_WORD: Final = "__clew_turns__"
_INDEXED: Final[tuple[type, ...]] = (type(iter([])), type(iter(())), type(iter(range(1))))
"""Iterators that can be moved on without a trace."""


def compile_with_turns(file: str) -> CodeType:
    """Compile a script so that its loops can be set to a later turn, in this process only."""
    setattr(builtins, _WORD, Turns)
    with tokenize.open(file) as source:
        tree = ast.parse(source.read(), file)
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            word = ast.Name(_WORD, ast.Load())
            called = ast.Call(word, [node.iter, ast.Constant(_target_of(node.target))], [])
            node.iter = ast.copy_location(called, node.iter)
    return compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)


def _target_of(target: ast.expr) -> str:
    """Return the name that tells where a loop is: its variable, or the first of several."""
    first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
    return first.id if isinstance(first, ast.Name) else ""


class Turns:
    """What a loop of the script goes over; ``go_to`` sets it to the turn after the one with a certain value."""

    living: Final[list[Turns]] = []

    def __init__(self, things: Any, target: str) -> None:
        self.target = target
        self.code = sys._getframe(1).f_code
        self._things = things
        self._iterator: Iterator[Any] = iter(things)
        self.living.append(self)

    def __iter__(self) -> Turns:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            if self in self.living:
                self.living.remove(self)
            raise

    def go_to(self, value: Any) -> None:
        """Go on after the turn whose variable had this value; loops over other things stay where they are."""
        things = self._things
        if type(things) is range and type(value) is int and value in things:
            self._iterator = iter(things[things.index(value) + 1 :])
        elif type(things) is enumerate and type(value) is int:
            inside: Any = things.__reduce__()
            inner, count = inside[1]
            self._count_on(inner, value + 1, ahead=value + 1 - count)
        elif hasattr(value, "untyped_storage") and type(self._iterator) in _INDEXED:
            self._find(list(things), value)

    def _count_on(self, inner: Any, start: int, *, ahead: int) -> None:
        """A loader gives the recorded batches by itself; anything else is moved on."""
        from torch.utils.data import dataloader

        if not isinstance(inner, dataloader._BaseDataLoaderIter) and type(inner) not in _INDEXED:
            return
        if type(inner) in _INDEXED:
            for _ in range(ahead):
                next(inner, None)
        self._things = enumerate(inner, start)
        self._iterator = self._things

    def _find(self, things: list[Any], value: torch.Tensor) -> None:
        import torch

        for position, thing in enumerate(things):
            if isinstance(thing, torch.Tensor) and thing.shape == value.shape and torch.equal(thing, value):
                self._iterator = iter(things[position + 1 :])
                return


def restore_names(saved: list[dict[str, Any]], tensors: dict[str, torch.Tensor]) -> None:
    """Put recorded variables back into the frames of the script, and its loops to the turns they tell."""
    from clew.capture.torch.snapshot_names import user_frames

    frames = user_frames(sys._getframe(1))
    for kept in saved:
        place = (kept["file"], kept["function"])
        frame = next(
            (f for f in frames if (Path(f.f_code.co_filename).name, f.f_code.co_name) == place), None
        )
        if frame is None:
            continue
        frames.remove(frame)
        values = _unpack_all(kept["names"], tensors, frame)
        _write_locals(frame, values)
        for turns in Turns.living:
            if turns.code is frame.f_code and turns.target in values:
                turns.go_to(values[turns.target])


def _unpack_all(names: dict[str, Any], tensors: dict[str, torch.Tensor], frame: FrameType) -> dict[str, Any]:
    from clew.replay.restore import Unfit, unpack

    found, local = {}, frame.f_locals
    for name, data in names.items():
        if name not in local:
            continue
        try:
            found[name] = unpack(data, tensors)
        except Unfit:
            continue
    return found


def _write_locals(frame: FrameType, values: dict[str, Any]) -> None:
    local = frame.f_locals
    local.update(values)
    if local is not frame.f_globals and sys.version_info < (3, 13):
        # From 3.13 on writing to f_locals is enough.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
