"""A copy of one rank without the others: what would talk to them is done with this rank's own values, or not at all.

The threads that carry messages do not live in a forked copy, and the other ranks know nothing of it: whatever waits for
them would wait for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

NOTE: Final = "executed on this rank alone, with its own gradients instead of the average over ranks"
_KEPT: Final = ("all_reduce", "broadcast", "reduce", "barrier", "monitored_barrier", "broadcast_object_list")
"""After these a rank holds its own values still."""
_NEEDS_OTHERS: Final = (
    "send",
    "recv",
    "isend",
    "irecv",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "gather",
)


class NeedsOthers(RuntimeError):
    """The step asks for what only another rank has."""


def has_others() -> bool:
    """Return whether this process trains together with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def stay_alone() -> None:
    """Make this process, which is a copy of a rank, go on without the others; there is no way back."""
    replaced: list[tuple[Any, str, Any]] = [
        (DistributedDataParallel, "forward", _call_inside),
        (torch.nn.SyncBatchNorm, "forward", _normalise_alone),
        (dist, "all_gather", _gather_own),
    ]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    for name in _KEPT:
        setattr(dist, name, _keep)
    for name in _NEEDS_OTHERS:
        setattr(dist, name, _refuse(name))


def _call_inside(parallel: Any, *args: Any, **kwargs: Any) -> Any:
    # Hooks of the reducer fire in the backward pass and do nothing where no forward has prepared them.
    return parallel.module(*args, **kwargs)


class _Done:
    """The handle of a message that was never sent."""

    def wait(self, *_: Any) -> bool:
        """Wait for nothing."""
        return True

    def is_completed(self) -> bool:
        """It is over."""
        return True


def _keep(*_: Any, async_op: bool = False, **__: Any) -> _Done | None:
    return _Done() if async_op else None


def _gather_own(tensors: Any, tensor: torch.Tensor, *_: Any, async_op: bool = False, **__: Any) -> Any:
    for each in tensors:
        each.copy_(tensor)
    return _Done() if async_op else None


def _refuse(name: str) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> Any:
        raise NeedsOthers(f"torch.distributed.{name} needs the other ranks")

    return refused


def _normalise_alone(module: Any, x: torch.Tensor) -> torch.Tensor:
    is_batch = module.training or not module.track_running_stats
    mean = module.running_mean if not module.training or module.track_running_stats else None
    variance = module.running_var if not module.training or module.track_running_stats else None
    return torch.nn.functional.batch_norm(
        x, mean, variance, module.weight, module.bias, is_batch, module.momentum or 0.1, module.eps
    )
