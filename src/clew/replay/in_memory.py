"""The step as it still lies in memory when its fault shows: an execution of it is compared with that, bit by bit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch import backward as capture_backward
from clew.capture.torch.leaves import walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.capture.torch.registry import Registry
    from clew.replay.rehearsal import Rehearsal

_MOST_NODES: Final = 4000
_SAVED: Final = "_saved_"
_ALIKE: Final = {"ReshapeAlias": "View", "UnsafeView": "View"}
"""Nodes that have another name under the lens, where composite operations are taken apart further."""
_UNDEFINED: Final = frozenset({("CtcLoss", "_saved_log_alpha"), ("MkldnnRnnLayer", "_saved_result3")})
"""What operations keep for themselves, with elements that nobody has written."""


class InMemory:
    """What is there of the step before it is executed again: the graph of a bad loss, or gradients, or weights.

    Made in the copy of the process before anything is put back; most steps are not recorded in full, and this needs
    no recording. ``is_sum``: the gradients hold those of earlier turns of the loop as well, and tell nothing.
    """

    def __init__(self, kind: str, registry: Registry, *, is_sum: bool = False) -> None:
        self._kind = kind
        self._registry = registry
        self._losses = _find_losses() if kind == "loss" else []
        self._tensors: dict[int, torch.Tensor] = {}
        for _, parameter in registry.living_parameters():
            if kind == "gradient" and parameter.grad is not None and not is_sum:
                self._tensors[id(parameter)] = parameter.grad
            elif kind == "parameter":
                self._tensors[id(parameter)] = parameter.detach().clone()

    def count_equal(self, rehearsal: Rehearsal) -> int:
        """Return how many tensors of the execution equal those in memory, 0 when none is there, -1 when one differs."""
        pairs = self._pair_graphs(rehearsal) if self._kind == "loss" else self._pair_parameters()
        count = 0
        for mine, other in pairs:
            if mine is None or other is None or not _is_equal(mine, other, rehearsal):
                return -1
            count += 1
        return count

    def _pair_parameters(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        for _, parameter in self._registry.living_parameters():
            kept = self._tensors.get(id(parameter))
            if kept is not None:
                yield kept, parameter.grad if self._kind == "gradient" else parameter.detach()

    def _pair_graphs(self, rehearsal: Rehearsal) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        executed = rehearsal.bad_loss
        if executed is None or not self._losses:
            return
        for mine in self._losses:
            if mine.shape == executed.shape:
                yield from _walk_both(mine.grad_fn, executed.grad_fn)
                return


def _is_equal(mine: torch.Tensor, other: torch.Tensor, rehearsal: Rehearsal) -> bool:
    if mine.dtype != other.dtype:  # counts that one overload takes as integers and another as floats
        return mine.shape == other.shape and torch.equal(mine.detach().double(), other.detach().double())
    return rehearsal.fingerprint(mine) == rehearsal.fingerprint(other)


def _find_losses() -> list[torch.Tensor]:
    """Return what the backward pass was called with that is about to begin: it waits further down the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(capture_backward.__file__) and "tensors" in frame.f_locals:
            return [tensor for _, tensor in walk(frame.f_locals["tensors"])]
        frame = frame.f_back
    return []


def _walk_both(mine: Any, other: Any) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Yield the tensors that two graphs keep, node by node; (None, None) where the graphs differ in form."""
    waiting = [(mine, other)]
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_NODES:
        left, right = waiting.pop()
        if left is None and right is None:
            continue
        if left is None or right is None or _kind_of(left) != _kind_of(right):
            yield None, None
            return
        if left in seen:
            continue
        seen.add(left)
        if left.name() == right.name():
            yield from _saved_in_both(left, right)
        waiting += [(a[0], b[0]) for a, b in zip(left.next_functions, right.next_functions, strict=False)]


def _kind_of(node: Any) -> str:
    """Return the operation of a node, whatever overload of it was called."""
    name = str(node.name()).rstrip("0123456789").removesuffix("Backward")
    return _ALIKE.get(name, name)


def _saved_in_both(left: Any, right: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    kind = _kind_of(left)
    for name in dir(left):
        if not name.startswith(_SAVED) or (kind, name) in _UNDEFINED:
            continue
        try:
            values = getattr(left, name), getattr(right, name)
        except RuntimeError:  # freed already, or written over since: the user's next backward would say so
            continue
        if all(isinstance(value, torch.Tensor) for value in values):
            yield values
