"""What of a tensor can be measured: its numbers as a plain dense tensor, or the reason why there are none."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from clew.errors import UnsupportedTensor
from clew.stats.compiled import list_dtype_codes

if TYPE_CHECKING:
    from collections.abc import Iterator

LAZY = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
MEASURED_DTYPES = frozenset(list_dtype_codes())


@dataclass(frozen=True, slots=True)
class Reading:
    """The stored numbers of a tensor, how many zeros it does not store, and where the stored ones belong."""

    values: torch.Tensor
    zeros: int = 0
    places: tuple[torch.Tensor, ...] = ()


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Ask tensors without anybody hearing it: no mode and no tensor subclass of the user's is called.

    Whether gradients are on stays as it is, for those who want to know.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let torch operations run as if nobody was there: no gradient, no mode, no transform sees or changes them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(unheard())
        stack.enter_context(torch.no_grad())
        if torch._C._functorch.peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        yield


def is_about_meta(error: Exception) -> bool:
    """Return whether torch raised because numbers were asked of a tensor on the meta device, which has none."""
    return isinstance(error, RuntimeError) and "meta tensor" in str(error)


def read(tensor: torch.Tensor) -> Reading:
    """Return the numbers of any tensor as a dense one of real numbers; call it inside ``undisturbed()``."""
    tensor = _unwrap(tensor)
    _refuse_valueless(tensor)
    if tensor.layout in {
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    }:
        return _read_sparse(tensor)
    dense = _make_real(_make_dense(tensor))
    if dense.dtype not in MEASURED_DTYPES:
        raise _refusal(tensor, f"elements of type {dense.dtype} have no numbers clew can read")
    return Reading(dense)


def _unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the values of a subclass: the local part if distributed, the buffer if nested."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedTensor(f"{type(tensor).__name__} is not a tensor")
    for name in ("_local_tensor", "_values"):
        inner = getattr(tensor, name, None) if type(tensor) is not torch.Tensor else None
        if isinstance(inner, torch.Tensor) and tensor.layout is not torch.sparse_coo:
            return _unwrap(inner)
    return tensor


def _refuse_valueless(tensor: torch.Tensor) -> None:
    """Raise UnsupportedTensor for a tensor without values of its own, with the reason."""
    functorch = torch._C._functorch
    if isinstance(tensor, LAZY):
        raise _refusal(tensor, "a lazy parameter has no values before its module is first called")
    if tensor.is_meta:
        raise _refusal(tensor, "a tensor on the meta device has a shape but no values")
    if _is_fake(tensor):
        raise _refusal(tensor, "a fake tensor exists while a program is traced, without values")
    if functorch.is_batchedtensor(tensor) or functorch.is_gradtrackingtensor(tensor):
        raise _refusal(tensor, "inside torch.func transforms (vmap, grad) a tensor stands for others")
    if torch._is_functional_tensor(tensor) or functorch.is_functionaltensor(tensor):
        raise _refusal(tensor, "a functional tensor exists while a program is traced, without values")
    if (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor._is_zerotensor()
        and tensor.numel()
    ):
        try:
            address = torch.Tensor.data_ptr(tensor)
        except RuntimeError:
            address = 0
        if not address:
            raise _refusal(tensor, f"{type(tensor).__name__} has no memory of its own")


def _is_fake(tensor: torch.Tensor) -> bool:
    """Whether torch's tracer made the tensor; its module is there if so, and costly to import if not."""
    tracer = sys.modules.get("torch._subclasses.fake_tensor")
    return tracer is not None and isinstance(tensor, tracer.FakeTensor)


def _refusal(tensor: torch.Tensor, reason: str) -> UnsupportedTensor:
    """Return the error that names the tensor and the reason."""
    return UnsupportedTensor(
        f"cannot measure this tensor: {reason}",
        where=f"{type(tensor).__name__} of {tensor.dtype} on {tensor.device}",
        next_step="leave its site out with --sites",
    )


def _make_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a strided tensor with the same numbers."""
    if tensor.is_nested:
        return torch.cat([part.reshape(-1) for part in tensor.unbind()])
    if tensor._is_zerotensor():
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    return tensor


def _make_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real numbers a dense tensor shows, lazy signs applied, as a plain tensor."""
    plain = tensor.as_subclass(torch.Tensor) if type(tensor) is not torch.Tensor else tensor
    plain = plain.resolve_conj().resolve_neg()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _read_sparse(tensor: torch.Tensor) -> Reading:
    """Return the stored values of a sparse tensor, duplicates summed, and their indices."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        places: tuple[torch.Tensor, ...] = (tensor.indices(),)
    elif tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        places = (tensor.crow_indices(), tensor.col_indices())
    else:
        places = (tensor.ccol_indices(), tensor.row_indices())
    values = _make_real(tensor.values())
    parts = 2 if tensor.is_complex() else 1
    return Reading(values, zeros=tensor.numel() * parts - values.numel(), places=places)


def subtract(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return ``new - old`` in the type that updates are measured in; call it inside ``undisturbed()``."""
    after, before = read(new).values, read(old).values
    if after.shape != before.shape:
        raise _refusal(new, f"its shape changed from {tuple(before.shape)} to {tuple(after.shape)}")
    narrow = after.is_floating_point() and after.element_size() <= 4
    kind = torch.float32 if narrow or after.device.type == "mps" else torch.float64
    return after.to(kind) - before.to(kind)
