"""A tensor inside a checkpoint: what it is, and its elements in blocks, in row-major order."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from clew.errors import CheckpointBroken
from clew.store.checkpoint_bytes import ByteSource, read_all, regroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from clew.store.checkpoint_dtype import ElementType

MAX_DIMENSIONS: Final = 32
MAX_REPEATED: Final = 1 << 28
"""With stride 0 a few bytes may claim any number of elements; beyond this many the tensor is refused."""

SECTIONS: Final = ("model", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class Part:
    """One shard of a tensor: where it starts in the whole, its shape, and its bytes."""

    start: tuple[int, ...]
    tensor: StoredTensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A named tensor whose elements stay in the file until they are asked for.

    ``strides`` are in elements, or None when the elements lie in row-major order. ``parts`` hold the elements
    instead of ``source`` when the tensor is sharded. ``section`` is one of ``model optimizer other``.
    """

    name: str
    element: ElementType
    shape: tuple[int, ...]
    source: ByteSource | None
    strides: tuple[int, ...] | None = None
    section: str = "model"
    parts: tuple[Part, ...] = ()
    where: str = ""

    @property
    def dtype(self) -> str:
        """Name of the element type, as torch writes it."""
        return self.element.name

    @property
    def count(self) -> int:
        """Number of elements of the carrier."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements."""
        return self.count * self.element.item_bytes

    def named(self, name: str, *, section: str) -> StoredTensor:
        """Return the same tensor under another name."""
        return replace(self, name=name, section=section)

    def blocks(self, limit: int) -> Iterator[NDArray[Any]]:
        """Yield the elements in row-major order as flat carrier arrays of ``limit`` (the last one fewer).

        A block is valid until the next one is asked for.
        """
        if self.parts or self.strides is not None:
            pieces = _pieces(self.load(), limit)
            yield from regroup(pieces, size=limit, total=self.count, where=self.where)
        elif self.source is not None:
            for block in self.source.blocks(limit * self.element.item_bytes):
                yield block.view(self.element.carrier)

    def load(self) -> NDArray[Any]:
        """Return the whole tensor in its carrier type; a repeated (stride 0) dimension stays a view."""
        if self.parts:
            return self._assemble()
        if self.source is None:
            return np.empty(self.shape, dtype=self.element.carrier)
        flat = read_all(self.source).view(self.element.carrier)
        if self.strides is None:
            return flat.reshape(self.shape)
        steps = tuple(step * flat.itemsize for step in self.strides)
        return as_strided(flat, self.shape, steps, writeable=False)

    def _assemble(self) -> NDArray[Any]:
        # Zeros, not whatever was in memory: shards that overlap leave gaps elsewhere.
        whole: NDArray[Any] = np.zeros(self.shape, dtype=self.element.carrier)
        for part in self.parts:
            box = tuple(
                slice(start, start + size) for start, size in zip(part.start, part.tensor.shape, strict=True)
            )
            whole[box] = part.tensor.load()
        return whole


def place(
    element: ElementType,
    source: ByteSource,
    *,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    where: str,
) -> StoredTensor:
    """Return the view of a storage that torch describes by offset, shape and strides, if it fits in there."""
    check_shape(shape, where)
    if len(strides) != len(shape) or any(step < 0 for step in strides) or offset < 0:
        raise CheckpointBroken(f"impossible strides {strides} for shape {shape}", where=where)
    item, count = element.item_bytes, math.prod(shape)
    if count == 0:
        return StoredTensor("", element, shape, None, where=where)
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if (last + 1) * item > source.size:
        raise CheckpointBroken(
            f"a tensor of shape {shape} needs {(last + 1) * item:,} bytes of a storage of {source.size:,}",
            where=where,
        )
    inner = _narrow(source, offset * item, (last + 1 - offset) * item)
    if _is_row_major(shape, strides):
        return StoredTensor("", element, shape, inner, where=where)
    if count > max(MAX_REPEATED, last + 1 - offset):
        raise CheckpointBroken(
            f"a tensor of shape {shape} repeats {last + 1 - offset:,} stored elements {count:,} times over",
            where=where,
        )
    return StoredTensor("", element, shape, inner, strides=strides, where=where)


def check_shape(shape: tuple[int, ...], where: str) -> None:
    """Refuse a shape with a negative, absurd or non-integer size."""
    if not all(isinstance(size, int) and 0 <= size < 1 << 48 for size in shape):
        raise CheckpointBroken(f"impossible shape {str(shape)[:80]}", where=where)
    if len(shape) > MAX_DIMENSIONS:
        raise CheckpointBroken(f"a tensor with {len(shape)} dimensions", where=where)


def _narrow(source: ByteSource, start: int, size: int) -> ByteSource:
    """Return a stretch of a file or memory source."""
    from clew.store.checkpoint_bytes import FileBytes, MemoryBytes

    if isinstance(source, FileBytes):
        return FileBytes(source.path, source.offset + start, size)
    return MemoryBytes(read_all(source)[start : start + size])


def _is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _pieces(array: NDArray[Any], limit: int) -> Iterator[NDArray[Any]]:
    """Yield flat pieces of at most ``limit`` elements in row-major order, copying no more than one."""
    if array.size <= limit:
        yield array.reshape(-1)
        return
    row = array.size // len(array)
    if row > limit:
        for each in array:
            yield from _pieces(each, limit)
        return
    step = limit // row
    for start in range(0, len(array), step):
        yield array[start : start + step].reshape(-1)
