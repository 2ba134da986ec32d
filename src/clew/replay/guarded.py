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
def all_undone(found: Any = None) -> Iterator[None]:
    """Put back what a person at the prompt does: memory, gradients, optimizers, modes, attributes, random states.

    A backward pass keeps its graph, which the training still needs. What ordinary Python objects go through
    (a list that grows, a file that is written) is not undone. ``found``: what ``find_all`` gave a moment ago.
    """
    written, patches = Written(), Patches()
    modules, optimizers, parameters = found if found is not None else find_all()
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    states = [KeptOptimizer(optimizer) for optimizer in optimizers]
    with unrecorded(), unchanged(modules):
        patches.replace(torch.autograd, "backward", _retain_in_backward)
        patches.replace(torch.autograd, "grad", _retain_in_grad)
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


def _retain_in_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(tensors: Any, grad_tensors: Any = None, _: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("retain_graph", None)
        return original(tensors, grad_tensors, True, *args, **kwargs)

    return backward


def _retain_in_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    def grad(
        outputs: Any, inputs: Any, grad_outputs: Any = None, _: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.pop("retain_graph", None)
        return original(outputs, inputs, grad_outputs, True, *args, **kwargs)

    return grad
