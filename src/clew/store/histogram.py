"""Log2-magnitude histograms as few bytes: which bins are filled, then their counts.

A packed histogram is a bitmap of ``HIST_BINS`` bits (bit ``i % 8`` of byte ``i // 8`` is set where bin ``i`` is not
empty) followed by the counts of the filled bins in order, little-endian, of 16 bits each if all of them fit
and of 32 bits otherwise: the length tells which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clew.model.schema import HIST_BINS
from clew.stats.built import BUILT

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LONGEST = HIST_BINS // 8 + 4 * HIST_BINS
_HEAD = HIST_BINS // 16  # words of 16 bits


def pack(histograms: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Pack rows of ``HIST_BINS`` counts; returns the offsets (one more than rows) and the bytes."""
    if BUILT is None:
        return pack_slowly(histograms)
    counts = np.ascontiguousarray(histograms, np.uint32)
    rows = len(counts)
    offsets, packed = np.zeros(rows + 1, np.int64), np.empty(rows * _LONGEST, np.uint8)
    ends = offsets[1:]
    BUILT.pack_histograms(counts.ctypes.data, rows, ends.ctypes.data, packed.ctypes.data)
    return offsets, packed[: offsets[-1]]


def pack_slowly(histograms: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Do the same where there is no kernel, and as its twin."""
    filled = histograms != 0
    counts = histograms.ravel()[np.flatnonzero(filled)]
    per_row = np.count_nonzero(filled, axis=1)
    width = np.where(histograms.max(axis=1, initial=0) >= 1 << 16, 2, 1)
    offsets = np.concatenate(([0], np.cumsum(_HEAD + per_row * width)))
    words = np.empty(offsets[-1], "<u2")
    words[offsets[:-1, None] + np.arange(_HEAD)] = np.packbits(filled, axis=1, bitorder="little").view("<u2")
    places = _places(offsets[:-1] + _HEAD, per_row, width)
    words[places] = counts & 0xFFFF
    is_wide = np.repeat(width == 2, per_row)
    words[places[is_wide] + 1] = counts[is_wide] >> 16
    return offsets * 2, words.view(np.uint8)


def _places(
    starts: NDArray[np.int64], per_row: NDArray[np.int64], width: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the word at which each count begins, rows one after the other."""
    ends = np.cumsum(per_row)
    first = starts - (ends - per_row) * width
    numbers = np.arange(ends[-1] if len(ends) else 0)
    places: NDArray[np.int64] = np.repeat(first, per_row) + numbers * np.repeat(width, per_row)
    return places


def take(
    packed: tuple[NDArray[np.int64], NDArray[np.uint8]], rows: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return some of the histograms of ``pack``, those of a mask or in an order, packed as they are."""
    offsets, data = packed
    starts, sizes = offsets[:-1][rows], np.diff(offsets)[rows]
    ends = np.cumsum(sizes)
    places = np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)
    return np.concatenate(([0], ends)), data[places]


def unpack(offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the histograms of ``pack``; an empty row (no histogram recorded) becomes all zeros."""
    result = np.zeros((len(offsets) - 1, HIST_BINS), np.uint32)
    recorded = np.flatnonzero(np.diff(offsets))
    starts = offsets[recorded] // 2
    sizes = offsets[recorded + 1] // 2 - starts - _HEAD
    if len(data) % 2 or (sizes < 0).any():
        raise ValueError("a packed histogram is damaged")
    words = np.ascontiguousarray(data).view("<u2")
    heads = words[starts[:, None] + np.arange(_HEAD)]
    filled = np.unpackbits(heads.view(np.uint8), axis=1, bitorder="little").astype(bool)
    per_row = np.count_nonzero(filled, axis=1)
    width = np.where(sizes == per_row, 1, 2)
    if not np.array_equal(sizes, per_row * width):
        raise ValueError("a packed histogram is damaged")
    places = _places(starts + _HEAD, per_row, width)
    counts = words[places].astype(np.uint32)
    is_wide = np.repeat(width == 2, per_row)
    counts[is_wide] |= words[places[is_wide] + 1].astype(np.uint32) << 16
    block = np.zeros(filled.shape, np.uint32)
    block[filled] = counts
    result[recorded] = block
    return result
