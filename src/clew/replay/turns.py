"""Where the user's loops are: in a script that is executed again, each ``for`` can be set to a later turn.

The script is compiled with a word around what its loops go over. Nothing else about it changes, lines included.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import sys
import tokenize
from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from clew.replay.frames import is_user_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

_WORD: Final = "__clew_turns__"
_INDEXED: Final[tuple[type, ...]] = (type(iter([])), type(iter(())), type(iter(range(1))))
"""Iterators that can be moved on without a trace."""
_MOST_PULLED: Final = 100_000


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


def follow_imports() -> None:
    """Have the user's modules that are imported from now on compiled like that, too, in this process only."""
    loader: Any = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self: Any, name: str) -> Any:
        file = self.get_filename(name)
        try:
            # Not source_to_code, whose result would be written into the user's __pycache__.
            return compile_with_turns(file) if is_user_file(file) else original(self, name)
        except (OSError, SyntaxError, ValueError):
            return original(self, name)

    loader.get_code = get_code


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
        inside = getattr(things, "iterable", None)
        if type(inside) in (range, enumerate):
            things = inside  # a progress bar around what the loop goes over
        if type(things) is range:
            if type(value) is int and value in things:
                self._iterator = iter(things[things.index(value) + 1 :])
        elif type(things) is enumerate:
            if type(value) is int:
                self._count_on(things, value + 1)
        elif _is_plain(self._iterator):
            self._pull_until(value)

    def _count_on(self, things: Any, start: int) -> None:
        """A loader gives the recorded batches by itself, and so does a generator; a list is moved on."""
        inner, count = things.__reduce__()[1]
        if _is_plain(inner):
            deque(islice(inner, max(0, start - count)), maxlen=0)
        self._things = self._iterator = enumerate(inner, start)

    def _pull_until(self, value: Any) -> None:
        """Move on to the first turn with this value, and stay where it is when there is none."""
        pulled = []
        for thing in islice(self._iterator, _MOST_PULLED):
            pulled.append(thing)
            first = thing[0] if type(thing) in (tuple, list) and thing else thing
            if _is_same(thing, value) or _is_same(first, value):
                return
        self._iterator = chain(pulled, self._iterator)


def _is_plain(iterator: Any) -> bool:
    """Return whether nothing happens when an iterator moves on: it goes over lists, tuples or ranges."""
    if type(iterator) in (zip, enumerate):
        inner = iterator.__reduce__()[1]
        return all(_is_plain(each) for each in (inner if type(iterator) is zip else inner[:1]))
    return type(iterator) in _INDEXED


def _is_same(thing: Any, value: Any) -> bool:
    import torch

    if isinstance(thing, torch.Tensor) and isinstance(value, torch.Tensor):
        return thing.shape == value.shape and torch.equal(thing, value)
    return type(thing) is type(value) and type(value) in (int, float, str) and bool(thing == value)
