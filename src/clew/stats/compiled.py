"""The compiled kernel, told once about torch; None where it was not built or CLEW_KERNEL says otherwise."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Final

import torch

from clew.errors import UsageError, suggest
from clew.stats.built import BUILT

if TYPE_CHECKING:
    from types import ModuleType

ELEMENT_TYPES: Final = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
)
"""Names in the order of the kernel's element types; torch versions differ in which they have."""

CHOICES: Final = ("torch", "plain", "portable", "baseline", "avx2", "avx512")


def list_dtype_codes() -> dict[torch.dtype, int]:
    """Return the kernel's number for each dtype this torch has; bool is read as uint8."""
    codes = {getattr(torch, name): i for i, name in enumerate(ELEMENT_TYPES) if hasattr(torch, name)}
    return codes | {torch.bool: ELEMENT_TYPES.index("uint8")}


def load_kernel() -> ModuleType | None:
    """Return the kernel ready for use, or None when the torch path should do the work."""
    choice = os.environ.get("CLEW_KERNEL", "")
    if choice and choice not in CHOICES:
        raise UsageError(
            f"CLEW_KERNEL is '{choice}'",
            where="environment",
            next_step=suggest(choice, CHOICES) or f"use one of {', '.join(CHOICES)}, or unset it",
        )
    if BUILT is None or choice == "torch":
        return None
    try:
        BUILT.select(choice)
    except ValueError:
        raise UsageError(
            f"CLEW_KERNEL is '{choice}', which this processor cannot run",
            where="environment",
            next_step=f"use one of {', '.join(BUILT.variants())}, or unset it",
        ) from None
    tell_of_torch(BUILT)
    return BUILT


def tell_of_torch(kernel: ModuleType, *, has_exchange: bool = True) -> None:
    """Tell the kernel what it asks of tensors; without the exchange table it asks by their methods alone."""
    tensor = torch.Tensor
    methods = (
        tensor.data_ptr,
        tensor.numel,
        tensor.is_contiguous,
        tensor.stride,
        tensor.is_neg,
        tensor.storage_offset,
    )
    functions = (
        torch._C._is_torch_function_mode_enabled,
        torch.get_num_threads,
        torch.is_grad_enabled,
        torch._C._has_storage,
    )
    types = (torch.Tensor, torch.nn.Parameter)
    exchange = getattr(tensor, "__dlpack_c_exchange_api__", None) if has_exchange else None
    kernel.configure(types, list_dtype_codes(), (*methods, *functions), _find_openmp(), exchange)


def _find_openmp() -> int:
    """Return the address of the OpenMP entry point that torch itself uses, or 0: then one thread does the work."""
    if not torch._C.has_openmp:
        return 0
    try:
        entry = ctypes.CDLL(None).GOMP_parallel
    except (OSError, AttributeError, TypeError):
        return 0
    return ctypes.cast(entry, ctypes.c_void_p).value or 0
