"""What can be said of a torch tensor at a glance, with at most one wait for its device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from clew.capture.array import SMALL
from clew.capture.torch.patches import Patches
from clew.capture.torch.taps_value import blind_reason, measure, open_value, quietly
from clew.model.value import ValueFacts

if TYPE_CHECKING:
    from collections.abc import Callable


def examine_tensor(tensor: torch.Tensor) -> ValueFacts:
    """Return form, place and numbers of a tensor without anybody noticing."""
    facts: ValueFacts = quietly(_examine, tensor)
    return facts


def _examine(tensor: torch.Tensor) -> ValueFacts:
    # A nested tensor has no one shape: told is that of its parts joined, as its numbers are.
    form = open_value(tensor)[0] if tensor.is_nested else tensor
    shape = tuple(int(size) for size in form.shape)
    reason = blind_reason(tensor)
    stats, entries, note = None, None, reason
    if not reason:
        stats, entries, note = _read(tensor)
    return ValueFacts(
        kind=_kind_of(tensor),
        shape=shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        bytes=math.prod(shape) * tensor.element_size(),
        device=str(tensor.device),
        stats=stats,
        entries=entries,
        grad=_grad_of(tensor),
        note=note,
    )


def _read(tensor: torch.Tensor) -> tuple[dict[str, float] | None, tuple[Any, ...] | None, str]:
    """Return the numbers of a tensor: a small one comes to the host whole, of another only the statistics do."""
    opened, note = open_value(tensor)
    is_small = opened.numel() <= SMALL
    if is_small:
        opened = opened.cpu()
    stats = measure(opened) or None
    entries = tuple(opened.reshape(-1).tolist()) if is_small and not note else None
    return stats, entries, note


def _kind_of(tensor: torch.Tensor) -> str:
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    kind = type(tensor).__name__
    return "tensor" if kind == "Tensor" else kind


def _grad_of(tensor: torch.Tensor) -> str:
    if tensor.grad_fn is not None:
        return str(tensor.grad_fn.name())
    return "leaf" if tensor.requires_grad else ""


def replace_repr(describe: Callable[[torch.Tensor], str]) -> Patches:
    """Make ``describe`` the repr of every tensor until the patches are undone; torch's own where it fails."""
    patches = Patches()

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def __repr__(self: torch.Tensor, **options: Any) -> str:  # noqa: N807 - it is one
            try:
                return describe(self)
            except Exception:  # noqa: BLE001 - a repr must not raise
                return _fall_back(original, self, options)

        return __repr__

    patches.replace(torch.Tensor, "__repr__", make)
    patches.replace(torch.nn.Parameter, "__repr__", make)
    return patches


def _fall_back(original: Callable[..., str], tensor: torch.Tensor, options: dict[str, Any]) -> str:
    try:
        return original(tensor, **options)
    except Exception as error:  # noqa: BLE001 - nor may torch's own
        return f"<{type(tensor).__name__} without a repr: {type(error).__name__}: {error}>"
