"""Copies of the parameters from before a step, so that the step's update can be measured after it."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, NamedTuple

import torch

from clew.capture.torch.leaves import local_part
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from clew.capture.torch.registry import TensorEntry


class Moved(NamedTuple):
    """What a step may have moved: the tensors as this process holds them, their copies, and the keys of the updates."""

    held: list[torch.Tensor]
    copies: list[torch.Tensor]
    keys: list[int]


class Shadows:
    """The copies of one optimizer's parameters. A tensor that cannot be copied has none.

    A recorded step leaves the copies equal to the parameters, so a run recorded at every step copies only once. A
    change made through ``.data`` between two recorded steps is not seen here and counts as part of the update.
    """

    def __init__(self, pairs: list[tuple[TensorEntry, torch.Tensor]], keys: list[int]) -> None:
        self._pairs = pairs
        self._keys = keys
        self._tensors = [tensor for _, tensor in pairs]
        self._copies: list[torch.Tensor | None] = [None] * len(pairs)
        self._versions = [-1] * len(pairs)
        self._moved: Moved | None = None

    def take(self) -> None:
        """Copy the parameters that have changed since their last copy, usually none."""
        doubtful = range(len(self._tensors))
        if KERNEL is not None:
            doubtful = KERNEL.list_stale(self._tensors, self._copies, self._versions)
        stale = [at for at in doubtful if self._is_stale(at)] if doubtful else []
        if stale:
            self._copy(stale)

    def _is_stale(self, at: int) -> bool:
        copy, held = self._pairs[at][0].shadow, local_part(self._tensors[at])
        self._copies[at] = copy
        if copy is None or not are_alike(copy, held):
            self._pairs[at][0].shadow = None
            return not held.is_sparse and held.layout == torch.strided
        return self._versions[at] != list_versions_slowly([self._tensors[at]])[0]

    def _copy(self, stale: list[int]) -> None:
        copies = []
        for at in stale:
            entry, tensor = self._pairs[at]
            if entry.shadow is None:
                entry.shadow = torch.empty_like(local_part(tensor).detach())
            copies.append(entry.shadow)
            self._copies[at], self._versions[at] = entry.shadow, list_versions_slowly([tensor])[0]
        with torch.no_grad():
            torch._foreach_copy_(copies, [local_part(self._tensors[at]).detach() for at in stale])
        self._moved = None

    def list_moved(self) -> Moved:
        """Return what is to be measured after a step; the copies are given the new values."""
        if self._moved is not None:
            return self._moved
        there = [(at, copy) for at, copy in enumerate(self._copies) if copy is not None]
        held = [local_part(self._tensors[at]) for at, _ in there]
        moved = Moved(held, [copy for _, copy in there], [self._keys[at] for at, _ in there])
        # The part that this process holds of a distributed tensor may be another one next time.
        if len(held) == len(self._tensors) and all(map(is_, held, self._tensors)):
            self._moved = moved
        return moved

    def settle(self) -> None:
        """The copies are equal to the parameters now."""
        read = KERNEL.list_versions if KERNEL is not None else list_versions_slowly
        self._versions = read(self._tensors)


def are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the numbers of two tensors can be held against each other, one by one."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def list_versions_slowly(tensors: list[torch.Tensor]) -> list[int]:
    """Return how often each tensor has been written in its place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
