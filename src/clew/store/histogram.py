"""Log2-magnitude histograms as few bytes: which bins are filled, then their counts as varints.

A packed histogram is a bitmap of ``HIST_BINS / 8`` bytes (bit ``i`` of byte ``i // 8``, lowest bit first, is set
where bin ``i`` is not empty) followed by one LEB128 number for each filled bin, in order of bins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clew.model.schema import HIST_BINS

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BITMAP = HIST_BINS // 8
_MAX_BYTES = 5  # a uint32 in groups of seven bits


def pack(histograms: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Pack rows of ``HIST_BINS`` counts; returns the offsets (one more than rows) and the bytes."""
    filled = histograms != 0
    rows, _ = np.nonzero(filled)
    counts = histograms[filled].astype(np.uint64)
    lengths = _varint_lengths(counts)
    row_lengths = np.bincount(rows, weights=lengths, minlength=len(histograms)).astype(np.int64) + _BITMAP
    offsets = np.concatenate(([0], np.cumsum(row_lengths)))
    data = np.zeros(int(offsets[-1]), np.uint8)
    bitmaps = np.packbits(filled, axis=1, bitorder="little")
    data[offsets[:-1, None] + np.arange(_BITMAP)] = bitmaps
    # Every count starts behind all earlier counts and behind the bitmaps of its own and all earlier rows.
    starts = np.cumsum(lengths) - lengths + (rows + 1) * _BITMAP
    for byte in range(int(lengths.max(initial=0))):
        present = lengths > byte
        more = np.where(lengths[present] > byte + 1, np.uint64(0x80), np.uint64(0))
        data[starts[present] + byte] = ((counts[present] >> np.uint64(7 * byte)) & np.uint64(0x7F)) | more
    return offsets, data


def _varint_lengths(counts: NDArray[np.uint64]) -> NDArray[np.int64]:
    lengths = np.ones(len(counts), np.int64)
    for byte in range(1, _MAX_BYTES):
        lengths += counts >= np.uint64(1 << (7 * byte))
    return lengths


def unpack(offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the histograms of ``pack``; an empty row (no histogram recorded) becomes all zeros."""
    result = np.zeros((len(offsets) - 1, HIST_BINS), np.uint32)
    recorded = np.flatnonzero(np.diff(offsets))
    if not len(recorded):
        return result
    heads = offsets[recorded, None] + np.arange(_BITMAP)
    filled = np.unpackbits(data[heads], axis=1, bitorder="little").astype(bool)
    is_count = np.ones(len(data), bool)
    is_count[heads] = False
    stream = data[is_count]
    ends = np.flatnonzero(stream < 0x80)
    if len(ends) != filled.sum():
        raise ValueError("a packed histogram is damaged")
    starts = np.concatenate(([0], ends[:-1] + 1))
    shifts = (np.arange(len(stream)) - np.repeat(starts, ends - starts + 1)) * 7
    pieces = (stream & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
    counts = np.add.reduceat(pieces, starts) if len(starts) else pieces
    block = np.zeros(filled.shape, np.uint32)
    block[filled] = counts.astype(np.uint32)
    result[recorded] = block
    return result
