"""Arrays of numpy: one in a ``.npy`` file, several in an ``.npz`` archive. Arrays of objects are refused."""

from __future__ import annotations

import io
import tokenize
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.lib import format as npy_format

from clew.errors import CheckpointBroken, CheckpointUntrusted
from clew.store.checkpoint_bytes import FileBytes, MemoryBytes, read_all
from clew.store.checkpoint_dtype import from_numpy
from clew.store.checkpoint_pickle import TRUST_STEP
from clew.store.checkpoint_tensor import StoredTensor, check_shape
from clew.store.checkpoint_zip import ZipEntry, read_directory

if TYPE_CHECKING:
    from pathlib import Path

    from clew.store.checkpoint_bytes import ByteSource

_HEADER_BYTES: Final = 12_000
"""Enough for the 10,000 characters that numpy itself accepts."""


def read_array(path: Path) -> StoredTensor:
    """Return the array of an ``.npy`` file."""
    entry = ZipEntry(path.stem, 0, path.stat().st_size, path.stat().st_size, is_deflated=False)
    return _read_entry(path, entry, path.stem)


def read_arrays(path: Path) -> list[StoredTensor]:
    """Return the arrays of an ``.npz`` archive by name."""
    entries = read_directory(path).values()
    return [_read_entry(path, entry, entry.name.removesuffix(".npy")) for entry in entries]


def _read_entry(path: Path, entry: ZipEntry, name: str) -> StoredTensor:
    where = f"{path}: {name}"
    shape, is_fortran, dtype, start = _read_header(_head(path, entry), where)
    if dtype.hasobject:
        raise CheckpointUntrusted(
            "an array of Python objects can only be read by unpickling it", where=where, next_step=TRUST_STEP
        )
    element = from_numpy(dtype)
    if element is None:
        raise CheckpointBroken(f"an array of {dtype} holds no numbers", where=where)
    check_shape(shape, where)
    source: ByteSource = entry.source(path, skip=start)
    if dtype.byteorder == ">":
        swapped = read_all(source).view(dtype).astype(element.carrier)
        source = MemoryBytes(swapped.view(np.uint8))
    steps = _column_major(shape) if is_fortran and len(shape) > 1 else None
    tensor = StoredTensor(name, element, shape, source, strides=steps, where=where)
    if tensor.size_bytes != source.size:
        raise CheckpointBroken(
            f"shape {shape} of {dtype} needs {tensor.size_bytes:,} bytes, the file has {source.size:,}",
            where=where,
            next_step="copy, download or save it again",
        )
    return tensor


def _head(path: Path, entry: ZipEntry) -> bytes:
    size = min(entry.size, _HEADER_BYTES)
    if not entry.is_deflated:
        return read_all(FileBytes(path, entry.offset, size)).tobytes()
    return next(iter(entry.source(path).blocks(_HEADER_BYTES)), np.empty(0, np.uint8)).tobytes()


def _read_header(head: bytes, where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, order, dtype and where the data starts; numpy parses it as a literal, running nothing."""
    file = io.BytesIO(head)
    try:
        version = npy_format.read_magic(file)
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError) as error:
        reason = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
        raise CheckpointBroken(f"not a sound numpy array: {reason}", where=where) from None
    return tuple(shape), bool(is_fortran), dtype, file.tell()


def _column_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in shape:
        steps.append(step)
        step *= size
    return tuple(steps)
