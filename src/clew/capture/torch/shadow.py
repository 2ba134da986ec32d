"""Copies of the parameters from before a step, so that the step's update can be measured after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from clew.capture.torch.leaves import local_part
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from clew.capture.torch.registry import TensorEntry


def take_shadows(pairs: list[tuple[TensorEntry, torch.Tensor]]) -> None:
    """Copy the parameters that have changed since their last copy.

    A recorded step leaves the copy equal to the parameter, so a run recorded at every step copies only once. A
    change made through ``.data`` between two recorded steps is not seen here and counts as part of the update.
    """
    stale = [(entry, tensor) for entry, tensor in _find_doubtful(pairs) if _is_stale(entry, tensor)]
    if not stale:
        return
    new = [(entry, tensor) for entry, tensor in stale if entry.shadow is None]
    for entry, tensor in new:
        entry.shadow = torch.empty_like(local_part(tensor).detach())
    with torch.no_grad():
        old = [entry.shadow for entry, _ in stale if entry.shadow is not None]
        torch._foreach_copy_(old, [local_part(tensor).detach() for _, tensor in stale])
    for entry, tensor in stale:
        entry.shadow_version = tensor._version


def _find_doubtful(pairs: list[tuple[TensorEntry, torch.Tensor]]) -> list[tuple[TensorEntry, torch.Tensor]]:
    """Leave out what is plainly as it was, which is usually all of it."""
    if KERNEL is None:
        return pairs
    shadows = [entry.shadow for entry, _ in pairs]
    versions = [entry.shadow_version for entry, _ in pairs]
    return [pairs[at] for at in KERNEL.list_stale([tensor for _, tensor in pairs], shadows, versions)]


def _is_stale(entry: TensorEntry, tensor: torch.Tensor) -> bool:
    shadow, held = entry.shadow, local_part(tensor)
    if (
        shadow is None
        or shadow.shape != held.shape
        or (shadow.dtype, shadow.device) != (held.dtype, held.device)
    ):
        entry.shadow = None
        return not held.is_sparse and held.layout == torch.strided
    return entry.shadow_version != tensor._version
