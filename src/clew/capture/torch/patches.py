"""Replacing functions of torch and putting them back, in the right order and only once."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

Function = TypeVar("Function")

_ASIDE: Final = "/importlib._bootstrap"
"""``warnings`` counts its levels past the frames of Python's import machinery, which it knows by these two words."""


def step_aside(function: Function) -> Function:
    """Return the function, passed over when a warning looks for the line that it is about.

    A wrapper around a function of torch stands between it and the user: without this, a warning that torch gives
    about the caller's line would name a line of clew, and the user's filters by module would miss it.
    """
    if isinstance(function, FunctionType) and not function.__code__.co_filename.endswith(_ASIDE):
        code = function.__code__
        function.__code__ = code.replace(co_filename=code.co_filename + _ASIDE)
    return function


class Patches:
    """What one recording has changed in torch; ``undo`` leaves everything as it was found."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._listening: list[tuple[list[Any], Any]] = []
        self._covers: list[tuple[Callable[[], object], Callable[[], object]]] = []
        self.is_covered = self.is_bare = False
        """Whether the covers are on; whether they never will be again."""

    def replace(
        self,
        owner: Any,
        name: str,
        make: Callable[[Any], Any],
        cover: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Replace ``owner.name`` by ``make(original)``, which warnings pass over.

        With a cover, ``cover(original, made)`` stands in its place from ``cover`` to ``uncover``.
        """
        inherited = isinstance(owner, type) and name not in vars(owner)
        original = getattr(owner, name) if not isinstance(owner, type) or inherited else vars(owner)[name]
        made = step_aside(make(original))
        setattr(owner, name, made)
        gate = made if cover is None else cover(original, made)
        self._undo.append(lambda: _restore(owner, name, original, (gate, made), inherited=inherited))
        self.add_gate(owner, name, made, gate)

    def add_gate(self, owner: Any, name: str, made: Any, gate: Any) -> None:
        """Have a gate stand in the place of what was made while covers are on; where there is none, both are one."""
        if gate is not made:
            self.add_cover(
                lambda: _exchange(owner, name, made, gate), lambda: _exchange(owner, name, gate, made)
            )

    def add_cover(self, put: Callable[[], object], take: Callable[[], object]) -> None:
        """Have actions put something in front of what was made, and take it away again."""
        self._covers.append((put, take))
        if self.is_covered:
            put()

    def cover(self) -> None:
        """Put the covers on, those of later replacements too; not once they were taken away."""
        if self.is_bare or self.is_covered:
            return
        self.is_covered = True
        for put, _ in self._covers:
            put()

    def uncover(self) -> None:
        """Take the covers away, for good."""
        was_covered, self.is_covered, self.is_bare = self.is_covered, False, True
        if was_covered:
            for _, take in self._covers:
                take()

    def on_undo(self, action: Callable[[], object]) -> None:
        """Run an action when the recording ends, such as the removal of a hook."""
        self._undo.append(action)

    def listen(self, listeners: list[Any], listener: Any) -> None:
        """Add a listener to a list until the recording ends; one that was removed meanwhile stays removed."""
        listeners.append(listener)
        self._listening.append((listeners, listener))
        self._undo.append(lambda: listeners.remove(listener) if listener in listeners else None)

    def hush(
        self, owners: Container[object], lists: Sequence[list[Any]] | None = None
    ) -> list[tuple[list[Any], Any]]:
        """Take the listeners of some objects away, from some lists or all, and return them: they heard enough."""
        chosen = None if lists is None else set(map(id, lists))
        hushed = [
            (listeners, listener)
            for listeners, listener in self._listening
            if (chosen is None or id(listeners) in chosen)
            and getattr(listener, "__self__", None) in owners
            and listener in listeners
        ]
        for listeners, listener in hushed:
            listeners.remove(listener)
        return hushed

    def undo(self) -> None:
        """Put everything back, the newest change first."""
        while self._undo:
            self._undo.pop()()
        self._listening.clear()
        self._covers.clear()
        self.is_covered = False


def _exchange(owner: Any, name: str, old: Any, new: Any) -> None:
    if vars(owner).get(name) is old:
        setattr(owner, name, new)


def _restore(owner: Any, name: str, original: Any, ours: tuple[Any, Any], *, inherited: bool) -> None:
    # Somebody may have patched on top of us meanwhile; taking theirs away would be worse than staying as
    # a pass-through underneath.
    present = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name, None)
    if not any(present is each for each in ours):
        return
    if inherited:
        delattr(owner, name)
    else:
        setattr(owner, name, original)
