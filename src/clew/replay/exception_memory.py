"""What held the memory when there was none left: tensors by what they are for, and the largest of them."""

from __future__ import annotations

import gc
from typing import Any, Final

import torch

from clew.replay.exception_hint import read_message

_MOST_SHOWN: Final = 4


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory ran out, on the host or on a device."""
    text = read_message(error).lower()
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or (
        "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text
    )


def list_memory() -> list[dict[str, Any]]:
    """Return the bytes held by living tensors: weights, gradients, optimizer state and the rest, then the largest."""
    objects = [(thing, type(thing)) for thing in gc.get_objects()]
    tensors = [thing for thing, kind in objects if issubclass(kind, torch.Tensor)]
    weights = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
    held: list[tuple[torch.Tensor, str]] = [(tensor, "weights") for tensor in weights]
    held += [(tensor.grad, "gradients") for tensor in weights if tensor.grad is not None]
    for optimizer in (thing for thing, kind in objects if issubclass(kind, torch.optim.Optimizer)):
        states = (
            value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()
        )
        held += [(value, "optimizer state") for value in states if isinstance(value, torch.Tensor)]
    return _sum_up([*held, *((tensor, "other tensors") for tensor in tensors)])


def _sum_up(held: list[tuple[torch.Tensor, str]]) -> list[dict[str, Any]]:
    """Count each piece of memory once, for the first purpose it is listed with."""
    totals: dict[str, int] = {}
    sizes: list[tuple[int, str]] = []
    storages: set[int] = set()
    for tensor, purpose in held:
        try:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):
            continue  # sparse, nested or without memory of its own
        if not size or address in storages:
            continue
        storages.add(address)
        totals[purpose] = totals.get(purpose, 0) + size
        form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
        sizes.append((size, f"{form}, {purpose}"))
    largest = sorted(sizes, reverse=True)[:_MOST_SHOWN]
    return [{"what": what, "bytes": size} for what, size in totals.items()] + [
        {"what": f"largest: {what}", "bytes": size} for size, what in largest
    ]
