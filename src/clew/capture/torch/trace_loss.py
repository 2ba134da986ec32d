"""The number to differentiate, and the gradients of the leaves without touching their ``.grad``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from clew.capture.torch.leaves import walk
from clew.capture.torch.trace_restore import kept_gradients
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


def find_loss(output: Any) -> torch.Tensor | None:
    """Return the scalar an output offers for a backward pass: itself, its ``loss``, or None."""
    loss = own_loss(output)
    return loss if loss is not None and loss.requires_grad else None


def own_loss(output: Any) -> torch.Tensor | None:
    """Return the scalar that an output is or holds as its ``loss``, differentiable or not."""
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def choose_loss(output: Any) -> tuple[torch.Tensor, str]:
    """Return the loss of an output and a remark: without one, the sum of everything that can be differentiated."""
    loss = find_loss(output)
    if loss is not None:
        return loss.sum(), ""
    tensors = [tensor for _, tensor in walk(output) if tensor.requires_grad]
    if not tensors:
        raise UsageError(
            "nothing in the output depends on a tensor that needs a gradient",
            next_step="set requires_grad on a parameter or an input, and do not trace under no_grad",
        )
    total = torch.stack([_real_sum(tensor) for tensor in tensors]).sum()
    return total, "no loss was given: gradients are those of the sum of all outputs"


def _real_sum(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.real if tensor.is_complex() else tensor).double().sum()


def leaf_gradients(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient of the loss at each leaf, None where it does not reach; ``.grad`` stays as it was."""
    if not leaves:
        return []
    try:
        return list(torch.autograd.grad(loss, list(leaves), allow_unused=True, retain_graph=True))
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower():
            raise
    # Reentrant checkpointing runs backward inside backward, which autograd.grad does not allow.
    with kept_gradients([leaf for leaf in leaves if leaf.is_leaf]):
        loss.backward()  # type: ignore[no-untyped-call]
        return [leaf.grad if leaf.is_leaf else None for leaf in leaves]
