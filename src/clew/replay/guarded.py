"""Evaluating what a person typed, in a training that must go on as if nobody had looked."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clew.capture.torch.patches import Patches
from clew.capture.torch.trace_restore import kept_random_state, unchanged, unrecorded
from clew.replay.lens import tensors_in
from clew.replay.untouched import KeptOptimizer, Written, find_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _BeforeWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls a function with each tensor that an operation is about to write into."""

    def __init__(self, keep: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keep = keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in tensors_in((args, kwargs)):
                self._keep(tensor)
        return func(*args, **kwargs)


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """Put back what a condition changes in memory and random states; cheap enough for every call of a module."""
    written = Written()
    with unrecorded(), kept_random_state():
        try:
            with torch.no_grad(), _BeforeWrite(written.keep):
                yield
        finally:
            written.restore()


@contextlib.contextmanager
def all_undone() -> Iterator[None]:
    """Put back what a person at the prompt does: memory, gradients, optimizers, modes, attributes, random states.

    A backward pass keeps its graph, which the training still needs. What ordinary Python objects go through
    (a list that grows, a file that is written) is not undone.
    """
    written, patches = Written(), Patches()
    modules, optimizers, parameters = find_all()
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    states = [KeptOptimizer(optimizer) for optimizer in optimizers]
    with unrecorded(), unchanged(modules):
        patches.replace(torch.autograd, "backward", _retaining)
        patches.replace(torch.autograd, "grad", _retaining)
        try:
            with torch.enable_grad(), _BeforeWrite(written.keep):
                yield
        finally:
            patches.undo()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for state in states:
                state.restore()
            written.restore()


def _retaining(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "retain_graph": True})

    return run
