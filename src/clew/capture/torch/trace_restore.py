"""Running a model without leaving a trace: buffers, attributes, random states and gradients come back."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from clew.capture import current

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


@contextlib.contextmanager
def unchanged(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put buffers, plain attributes, modes and random states back when the block ends, however it ends."""
    kept = [_KeptModule(module) for module in modules]
    with kept_random_state():
        try:
            yield
        finally:
            for each in kept:
                each.restore()


class _KeptModule:
    """A module with what it held of its own: references to everything, copies of the buffers' values."""

    __slots__ = ("attributes", "buffers", "children", "copies", "module", "parameters")

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.attributes = dict(vars(module))
        self.parameters = dict(module._parameters)
        self.buffers = dict(module._buffers)
        self.children = dict(module._modules)
        self.copies = [
            (buffer, buffer.detach().clone(), version_of(buffer))
            for _, buffer in module.named_buffers(recurse=False)
            if not is_lazy(buffer)
        ]

    def restore(self) -> None:
        """Give the module back what it held; a lazy one keeps the shape that the first input gave it."""
        if not isinstance(self.module, (LazyModuleMixin, torch.jit.ScriptModule)):
            _put_back(vars(self.module), self.attributes)
            _put_back(self.module._parameters, self.parameters)
            _put_back(self.module._buffers, self.buffers)
            _put_back(self.module._modules, self.children)
        for tensor, copy, version in self.copies:
            # BatchNorm writes its statistics without counting the write, so only the values tell.
            if not tensor.is_meta and not torch.equal(tensor, copy):
                write_back(tensor, copy, version)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to, -1 for one of inference mode, which does not count."""
    return -1 if tensor.is_inference() else tensor._version


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Keep a recording that is going on from taking this look at the model for a part of the training."""
    recorder = getattr(current.active(), "recorder", None)
    if recorder is None or recorder.asleep:
        yield
        return
    recorder.asleep = True
    try:
        yield
    finally:
        recorder.asleep = False


def _put_back(present: dict[str, Any], before: Mapping[str, Any]) -> None:
    present.update(before)
    if len(present) > len(before):
        for name in [name for name in present if name not in before]:
            del present[name]


def write_back(tensor: torch.Tensor, copy: torch.Tensor, version: int) -> None:
    """Give a tensor its old values, so that autograd does not take it for changed."""
    with torch.no_grad():
        tensor.copy_(copy)
    if version >= 0:
        set_version(tensor, version)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """A graph the user still holds may have saved this tensor: to it, nothing has happened."""
    set_counter = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
    if set_counter is None:
        return
    try:
        set_counter((tensor,), (version,))
    except TypeError:  # before torch 2.6 it took one tensor
        set_counter(tensor, version)


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Put the random states of torch, its devices, numpy and Python back when the block ends."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    torch_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if _uses_cuda() else []
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def kept_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take ``.grad`` away for the block and give the same tensors back when it ends."""
    kept = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Let compiled modules run as they were written: a compiled one has no operations to look at."""
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Let Python's garbage collector rest for the block: what a trace notes down is no garbage, and looking
    through everything torch has loaded would take longer than the pass itself.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
