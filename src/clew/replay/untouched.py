"""Running a piece of training in this process and leaving everything as it was: for when there can be no copy."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import torch

from clew.capture.torch.trace_restore import set_version, unchanged, unrecorded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.replay.lens import OpLens


@contextlib.contextmanager
def untouched(lens: OpLens) -> Iterator[None]:
    """Put weights, buffers, gradients, optimizers, modes and random states back when the block ends.

    Memory is copied when an operation is about to write into it, so only what changes is kept.
    """
    written = Written()
    lens.before_write = written.keep
    modules, optimizers, parameters = find_all()
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    states = [KeptOptimizer(optimizer) for optimizer in optimizers]
    with unrecorded(), unchanged(modules):
        try:
            yield
        finally:
            lens.before_write = None
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for state in states:
                state.restore()
            written.restore()


class Written:
    """Memory as it was before the first write into it, and how often its tensors had been written to."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy the memory behind a tensor unless that has been done."""
        if tensor.layout != torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            copy = storage.clone()  # type: ignore[no-untyped-call]
            self._storages[storage.data_ptr()] = (storage, copy)
        if not tensor.is_inference():
            self._versions.setdefault(id(tensor), (tensor, tensor._version))

    def restore(self) -> None:
        """Write everything back."""
        for storage, copy in self._storages.values():
            storage.copy_(copy)
        for tensor, version in self._versions.values():
            set_version(tensor, version)


class KeptOptimizer:
    """What an optimizer holds, the tensors by reference: their values come back with the memory."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {
            parameter: {key: _copy_list(value) for key, value in state.items()}
            for parameter, state in optimizer.state.items()
        }
        self._groups = [dict(group) for group in optimizer.param_groups]

    def restore(self) -> None:
        """Give the optimizer back its state and the numbers of its groups."""
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=False):
            group.clear()
            group.update(kept)


def _copy_list(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def find_all() -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer], list[torch.Tensor]]:
    """Return every module, optimizer and trainable leaf of the process."""
    # The class, not isinstance: objects that pretend to be something else must not be woken up.
    objects = [(thing, type(thing)) for thing in gc.get_objects()]
    modules = [thing for thing, kind in objects if issubclass(kind, torch.nn.Module)]
    optimizers = [thing for thing, kind in objects if issubclass(kind, torch.optim.Optimizer)]
    tensors = [thing for thing, kind in objects if issubclass(kind, torch.Tensor)]
    return modules, optimizers, [leaf for leaf in tensors if leaf.requires_grad and leaf.is_leaf]
