"""Shapes with names: ``"B T 64"`` binds B and T, and holds every later shape of the step to them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch

from clew.capture import current
from clew.capture.torch.taps_place import find_call, find_place, find_root_call
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_Call = tuple[Any, Hashable]
"""A call site: the code object and what stands for the instruction in it."""

Dimension = int | str | None | EllipsisType
"""A size, a name, None for any size, or dots for any number of dimensions."""


def parse_dimensions(spec: str | Sequence[Any]) -> tuple[Dimension, ...]:
    """Return the dimensions of ``"B T 64"``, ``"... 3"`` or ``("B", None, 64)``."""
    tokens = tuple(spec.replace(",", " ").split()) if isinstance(spec, str) else tuple(spec)
    dimensions = tuple(_parse_dimension(token, spec) for token in tokens)
    if dimensions.count(...) > 1:
        raise _wrong_spec(spec, "'...' may stand once only")
    return dimensions


_parse_text = lru_cache(maxsize=1024)(parse_dimensions)


def _parse_dimension(token: Any, spec: Any) -> Dimension:
    if token is None or token == "_":
        return None
    if token is ... or token == "...":
        return ...
    if isinstance(token, str) and token.isidentifier():
        return token
    try:
        size = int(token)
    except (TypeError, ValueError):
        raise _wrong_spec(spec, f"{token!r} is neither a size nor a name") from None
    if size < 0:
        raise _wrong_spec(spec, f"{size} is not a size")
    return size


def _wrong_spec(spec: Any, reason: str) -> UsageError:
    return UsageError(
        f"the shape {spec!r} cannot be read: {reason}",
        next_step="write sizes, names, '_' for any size and '...' for any number of dimensions: 'B T 64'",
    )


@dataclass(slots=True)
class _Bound:
    """The size a name stands for, which line said so, and whether that was inside a module call."""

    size: int
    said: str
    call: _Call
    inside: bool


class _Scope:
    """The names bound in one step, and the step and root call they belong to."""

    def __init__(self) -> None:
        self.bound: dict[str, _Bound] = {}
        self.step: Hashable = None
        self.root: tuple[weakref.ref[Any], ...] | None = None

    def forget(self) -> None:
        """Begin a step without names."""
        self.bound.clear()
        self.root = None

    def refresh(self, call: _Call, wanted: list[str]) -> bool:
        """Forget what belongs to an earlier step; return whether this is inside a module call."""
        session = current.active()
        step = None if session is None else (id(session), session.step)
        if step != self.step:
            self.step = step
            self.forget()
        root = find_root_call()
        if root is not None and not self._is_same_call(root):
            self.root = tuple(weakref.ref(each) for each in root)
            self.bound = {name: bound for name, bound in self.bound.items() if not bound.inside}
        # The line that bound a name comes round again: a new step, unless it is a loop within one call.
        repeats_count = root is None or len(root) == 1
        if repeats_count and any(self.bound[name].call == call for name in wanted if name in self.bound):
            self.bound.clear()
        return root is not None

    def _is_same_call(self, root: tuple[Any, ...]) -> bool:
        """Return whether a root call is the known one: the same module and the very same tensors."""
        known = self.root
        return (
            known is not None
            and len(known) == len(root)
            and all(old() is new for old, new in zip(known, root, strict=True))
        )


class _Scopes(threading.local):
    """The scopes of one thread: one with gradients, and one without, for an evaluation between two steps."""

    def __init__(self) -> None:
        self.of = {True: _Scope(), False: _Scope()}


_scopes = _Scopes()


def new_step() -> None:
    """Forget the sizes that names were bound to."""
    for scope in _scopes.of.values():
        scope.forget()


def check_shape(shape: tuple[int, ...], spec: Any, *, name: str, key: Hashable = None) -> list[str]:
    """Return what is wrong with a shape; when nothing is, bind the names that were free.

    ``key`` stands for the call site where there is no frame to tell it.
    """
    dimensions = _parse_text(spec) if isinstance(spec, str) else parse_dimensions(spec)
    aligned = _align(dimensions, shape)
    if aligned is None:
        wanted = sum(1 for dimension in dimensions if dimension is not ...)
        more = " or more" if ... in dimensions else ""
        return [f"it has {len(shape)} dimensions, not {wanted}{more}"]
    if not any(isinstance(dimension, str) for dimension, _ in aligned.values()):
        return _compare(aligned, {})
    call = (None, key) if key is not None else find_call()
    scope = _scopes.of[torch.is_grad_enabled()]
    inside = scope.refresh(call, [wanted for wanted, _ in aligned.values() if isinstance(wanted, str)])
    problems = _compare(aligned, scope.bound)
    sizes = {wanted: size for wanted, size in aligned.values() if isinstance(wanted, str)}
    fresh = sizes.keys() - scope.bound.keys()
    if not problems and fresh:
        source = find_place(site="").source
        said = f"since {name or 'a check'}{f' at {source}' if source else ''}"
        scope.bound.update({each: _Bound(sizes[each], said, call, inside) for each in fresh})
    return problems


def _align(
    dimensions: tuple[Dimension, ...], shape: tuple[int, ...]
) -> dict[int, tuple[int | str | None, int]] | None:
    """Return what is wanted and what is there for each dimension, or None when their numbers differ."""
    if ... in dimensions:
        dots = dimensions.index(...)
        missing = len(shape) - (len(dimensions) - 1)
        if missing < 0:
            return None
        dimensions = (*dimensions[:dots], *(None,) * missing, *dimensions[dots + 1 :])
    if len(dimensions) != len(shape):
        return None
    pairs = zip(dimensions, shape, strict=True)
    return {position: (wanted, size) for position, (wanted, size) in enumerate(pairs)}  # type: ignore[misc]


def _compare(aligned: dict[int, tuple[int | str | None, int]], bound: dict[str, _Bound]) -> list[str]:
    problems = []
    here: dict[str, tuple[int, int]] = {}
    for position, (wanted, size) in aligned.items():
        if wanted is None or wanted == size:
            continue
        if isinstance(wanted, int):
            problems.append(f"dimension {position} is {size}, not {wanted}")
        elif wanted in bound:
            known = bound[wanted]
            if known.size != size:
                problems.append(f"dimension {position} is {size}, but {wanted} = {known.size} {known.said}")
        elif here.setdefault(wanted, (size, position))[0] != size:
            first, where = here[wanted]
            problems.append(f"dimension {position} is {size}, but {wanted} = {first} at dimension {where}")
    return problems
