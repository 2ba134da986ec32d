"""Inputs and models that the command line names: random tensors, arrays of files, exported programs."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from clew.errors import UsageError

if TYPE_CHECKING:
    from clew.model.input_spec import InputSpec


def make_input(spec: InputSpec) -> Any:
    """Return the input of a description; the same description gives the same numbers."""
    if spec.kind == "value":
        return spec.value
    if spec.kind == "file":
        return _load_array(str(spec.value))
    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(repr(spec).encode()))
    if dtype.is_floating_point or dtype.is_complex:
        if spec.low is None or spec.high is None:
            return torch.randn(spec.shape, dtype=_drawable(dtype), generator=generator).to(dtype)
        spread = torch.rand(spec.shape, generator=generator, dtype=torch.float64)
        return (spec.low + (spec.high - spec.low) * spread).to(dtype)
    low, high = (0, 2) if spec.low is None or spec.high is None else (int(spec.low), int(spec.high))
    return torch.randint(low, high, spec.shape, generator=generator).to(dtype)


def _drawable(dtype: torch.dtype) -> torch.dtype:
    """Draw in float32 what is smaller: every device can do that."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _load_array(path: str) -> torch.Tensor:
    import numpy as np

    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"cannot read an array from '{path}': {error}", next_step="save it with numpy.save"
        ) from error


def load_exported(path: str) -> Any:
    """Return the exported program in a file."""
    if not Path(path).is_file():
        raise UsageError(f"no exported program '{path}'", next_step="write one with torch.export.save")
    try:
        return torch.export.load(path)
    except Exception as error:
        raise UsageError(
            f"cannot read an exported program from '{path}': {type(error).__name__}: {error}",
            next_step="write one with torch.export.save",
        ) from error
