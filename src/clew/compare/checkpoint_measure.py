"""Statistics of a stored tensor and differences of two, block by block: memory is a block, not a tensor.

The compiled loops work on the addresses of the blocks; without them numpy does the same, slowly.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from clew.compare import metric
from clew.compare.tolerance import tolerance_of
from clew.model.schema import STAT_NAMES
from clew.stats import reference
from clew.stats.built import BUILT
from clew.store.checkpoint_bytes import FileBytes, cut_off, unreadable
from clew.store.checkpoint_dtype import widen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from numpy.typing import NDArray

    from clew.store.checkpoint_tensor import StoredTensor

    Row = NDArray[np.float64]

try:
    from clew.compare import _pair as pair
except ImportError:
    pair = None  # type: ignore[assignment]
_pair: ModuleType | None = pair

BLOCK_BYTES: Final = 1 << 20
"""Two of them fit in a second-level cache, and a read of one is as fast as a read gets."""
ULP_RANGE: Final = 1e-4
"""Tensors further apart than this (relative L2 of the first block) are not apart by rounding: no ULPs then."""
PIECE_BYTES: Final = 64 << 20
"""A larger tensor is measured in pieces by several threads."""

KERNEL_TYPES: Final = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
"""The kernel's element types in the order of their numbers there."""
PAIR_TYPES: Final = ("float32", "float64", "float16", "bfloat16")
_FILE_TYPES: Final = ("float32", "float16", "bfloat16")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def summarise(tensor: StoredTensor) -> Row:
    """Return the row of statistics of a stored tensor."""
    total = np.full(len(STAT_NAMES), np.nan)
    total[: reference.MIN] = 0.0
    for block in tensor.blocks(block_elements(tensor)):
        total = reference.merge([total, summarise_block(block, tensor)])
    return total


def summarise_block(block: NDArray[Any], tensor: StoredTensor) -> Row:
    """Return the row of statistics of one block in its carrier type."""
    name = {"bool": "uint8", "complex64": "float32", "complex128": "float64"}.get(tensor.dtype, tensor.dtype)
    if BUILT is None or name not in KERNEL_TYPES:
        return reference.summarise(widen(block, tensor.element))
    row = np.empty(len(STAT_NAMES))
    count = len(block) * (2 if tensor.element.kind == "complex" else 1)
    code = KERNEL_TYPES.index(name)
    BUILT.measure_memory(block.ctypes.data, code, count, row.ctypes.data, 0, 0)
    return row


def count_denormals(block: NDArray[Any], tensor: StoredTensor) -> int:
    """Count by the bits: magnitudes above zero and below the smallest normal number, of 16 bits and wider."""
    element = tensor.element
    if not element.is_float or element.item_bytes < 2:
        return 0
    smallest = 1 << element.mantissa
    if _pair is not None:
        return int(_pair.count_denormals(block.ctypes.data, element.item_bytes, len(block), smallest))
    raw = block.view(f"u{element.item_bytes}")
    magnitude = raw & raw.dtype.type((1 << (8 * element.item_bytes - 1)) - 1)
    # Zero wraps around to the largest number.
    magnitude -= raw.dtype.type(1)
    return int(np.count_nonzero(magnitude < raw.dtype.type(smallest - 1)))


def block_elements(*tensors: StoredTensor) -> int:
    """Return how many elements of each tensor a block holds."""
    return BLOCK_BYTES // max(tensor.element.item_bytes for tensor in tensors)


def has_equal_bits(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors of one type hold the same bytes; reads no further than the first difference."""
    size = block_elements(a)
    return all(np.array_equal(_words(x), _words(y)) for x, y in _pairs(a, b, size))


def measure_pair(a: StoredTensor, b: StoredTensor) -> metric.Sums:
    """Return the sums over two tensors with as many elements, whatever their types."""
    if is_one_pass(a, b):
        return _measure_files(a, b)
    size = block_elements(a, b)
    parts: list[metric.Sums] = []
    floor, ulps = -1.0, True
    for x, y in _pairs(a, b, size):
        if floor < 0:
            # The scale of the first block stands for all: a second reading would cost more than it gives.
            floor = _floor(x, a)
        parts.append(_measure_block(x, y, a, b, floor=floor, ulps=ulps))
        if len(parts) == 1:
            ulps = metric.describe(parts[0]).relative_l2 < ULP_RANGE
    return metric.merge(parts)


def is_one_pass(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether the compiled loop reads both from their files itself, and sees on its way whether they are equal."""
    return hasattr(_pair, "measure_files") and all(
        isinstance(each.source, FileBytes)
        and each.strides is None
        and each.dtype in _FILE_TYPES
        and each.source.offset % each.element.item_bytes == 0
        for each in (a, b)
    )


def _measure_files(a: StoredTensor, b: StoredTensor) -> metric.Sums:
    """Return the sums over two tensors that lie in files in one piece; no lock is held while it reads and adds."""
    assert _pair is not None  # the caller has looked
    assert isinstance(a.source, FileBytes)
    assert isinstance(b.source, FileBytes)
    sums = np.empty(len(metric.SUM_NAMES))
    with a.source.open() as first, b.source.open() as second:
        try:
            short = _pair.measure_files(
                PAIR_TYPES.index(a.dtype), first.fileno(), a.source.offset,
                PAIR_TYPES.index(b.dtype), second.fileno(), b.source.offset,
                a.count, tolerance_of(a.dtype).small, ULP_RANGE, sums.ctypes.data,
            )  # fmt: skip
        except OSError as error:
            raise unreadable(a.source.path, error) from None
    if short:
        raise cut_off((a, b)[short - 1].source.path)  # type: ignore[union-attr]
    return sums


def _floor(block: NDArray[Any], tensor: StoredTensor) -> float:
    row = summarise_block(block, tensor)
    scale = row[reference.ABS_MAX]
    return float(tolerance_of(tensor.dtype).small * (scale if scale > 0 else 1.0))


def _measure_block(
    x: NDArray[Any], y: NDArray[Any], a: StoredTensor, b: StoredTensor, *, floor: float, ulps: bool
) -> metric.Sums:
    if _pair is not None and a.element is b.element and a.dtype in PAIR_TYPES:
        sums = np.empty(len(metric.SUM_NAMES))
        code = PAIR_TYPES.index(a.dtype)
        _pair.measure(code, x.ctypes.data, y.ctypes.data, len(x), floor, ulps, sums.ctypes.data)
        return sums
    left = metric.real_numbers(widen(x, a.element))
    right = metric.real_numbers(widen(y, b.element))
    bits = (x, y) if a.element is b.element and a.element.is_float and a.element.packed == 1 else None
    return metric.measure_numbers(left, right, floor=floor, bits=bits)


def _pairs(a: StoredTensor, b: StoredTensor, size: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    return zip(a.blocks(size), b.blocks(size), strict=True)


def _words(block: NDArray[Any]) -> NDArray[Any]:
    """Return the bytes as the widest integers that fit: comparing those is as fast as memory."""
    return block.view(np.uint64 if block.nbytes % 8 == 0 else np.uint8)


def split(tensor: StoredTensor, elements: int) -> list[StoredTensor]:
    """Return the parts of a tensor that lies in a file in one piece, each of ``elements``; else itself."""
    source = tensor.source
    if not isinstance(source, FileBytes) or tensor.strides is not None or tensor.count <= elements:
        return [tensor]
    width = tensor.element.item_bytes
    parts = []
    for start in range(0, tensor.count, elements):
        count = min(elements, tensor.count - start)
        piece = FileBytes(source.path, source.offset + start * width, count * width)
        parts.append(replace(tensor, shape=(count,), source=piece))
    return parts


def split_pair(a: StoredTensor, b: StoredTensor) -> list[tuple[StoredTensor, StoredTensor]]:
    """Return the pieces of two tensors of one shape side by side; in one when either cannot be split."""
    size = piece_elements(a, b)
    left, right = split(a, size), split(b, size)
    return list(zip(left, right, strict=True)) if len(left) == len(right) else [(a, b)]


def piece_elements(*tensors: StoredTensor) -> int:
    """Return how many elements a thread takes at a time."""
    return PIECE_BYTES // max(tensor.element.item_bytes for tensor in tensors)


def run_parallel(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """Yield the result for each item in order; several threads work ahead, since the loops hold no lock."""
    threads = min(
        4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if threads == 1 or len(items) < 2:
        yield from map(work, items)
        return
    executor = ThreadPoolExecutor(threads)
    try:
        yield from executor.map(work, items)
    finally:
        executor.shutdown(cancel_futures=True)
