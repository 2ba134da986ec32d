"""The same rows from torch operations: for other devices, and where no kernel was built. Never synchronises.

The sums of a tensor stay on its device as one packed tensor of 64-bit integers (sums of each piece as floating-point
bits, then hash, then histogram), so that a whole step comes to the host in one copy. The host makes the row of them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from clew.model.schema import HIST_BINS, HIST_LOW_EXPONENT, HIST_MAGNITUDES, STAT_NAMES
from clew.stats import reference, spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

PIECE: Final = 1 << 22
"""Elements per piece, a multiple of every block: temporaries stay small next to the tensors of a large model."""

SUMS: Final = 12
"""Numbers that a piece leaves on its device, as ``_sum_piece`` lists them."""

_NAN_PATTERNS: Final = {
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000, spec.NAN_BITS[4]),
    torch.float64: (torch.int64, (1 << 63) - 1, 0x7FF << 52, spec.NAN_BITS[8]),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00, spec.NAN_BITS[2]),
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80, spec.BFLOAT16_NAN),
    torch.float8_e4m3fn: (torch.int8, 0x7F, 0x7E, spec.FLOAT8_NAN),
    torch.float8_e5m2: (torch.int8, 0x7F, 0x7C, spec.FLOAT8_NAN),
}
"""For each type with several NaNs: how to see its bits, mask of the magnitude, largest that is no NaN, the one NaN."""


class Numbers(NamedTuple):
    """What a packed tensor says, on the host."""

    row: NDArray[np.float64]
    hash: int
    hist: NDArray[np.int64]
    rest: NDArray[np.int64]


def measure(values: torch.Tensor, *, hash: bool, hist: bool) -> torch.Tensor:
    """Return the packed sums of a dense tensor of real numbers, on its device."""
    flat = values.reshape(-1)
    parts = [_pack(_sum_piece(piece)) for piece in _pieces(flat)]
    if hash:
        parts.append(fingerprint(flat).reshape(1))
    if hist:
        parts.append(histogram(flat))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=flat.device)


def unpack(packed: NDArray[np.int64], count: int, *, device_type: str, hash: bool, hist: bool) -> Numbers:
    """Return row, hash and histogram of a tensor of ``count`` elements from what ``measure`` packed."""
    sizes = [min(PIECE, count - start) for start in range(0, count, PIECE)]
    hash_at = SUMS * len(sizes)
    hist_at = hash_at + hash
    rest_at = hist_at + HIST_BINS * hist
    sums = packed[:hash_at]
    if _wide(device_type) is torch.float64:
        table = sums.view(np.float64)
    else:
        table = sums.astype(np.int32).view(np.float32).astype(np.float64)
    rows = [_make_row(*pair) for pair in zip(table.reshape(-1, SUMS), sizes, strict=True)]
    row = rows[0] if len(rows) == 1 else reference.merge(rows)
    hashed = int(packed[hash_at]) & spec.MASK_64 if hash else 0
    return Numbers(row, hashed, packed[hist_at:rest_at], packed[rest_at:])


def _make_row(sums: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return the row of a piece from its sums; every element that was not finite counted as 0 in them."""
    total, shift, spread, abs_sum, l2, nan, pos_inf, neg_inf, zero, negative, low, high = sums.tolist()
    row = np.full(len(STAT_NAMES), np.nan)
    row[:7] = count, nan, pos_inf, neg_inf, zero, negative, count - nan - zero - negative
    bad = nan + pos_inf + neg_inf
    n = count - bad
    if n:
        mean = total / n
        m2 = spread * spread - bad * shift * shift - n * (mean - shift) ** 2
        std = math.sqrt(max(m2, 0.0) / n) if low != high else 0.0
        row[7:] = low + 0.0, high + 0.0, mean, std, abs_sum / n, max(abs(low), abs(high)), l2
    return row


def _pack(sums: torch.Tensor) -> torch.Tensor:
    return sums.view(torch.int64 if sums.dtype is torch.float64 else torch.int32).to(torch.int64)


def _wide(device_type: str) -> torch.dtype:
    """Return the widest floating type of a device."""
    return torch.float32 if device_type == "mps" else torch.float64


def _pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, flat.numel(), PIECE):
        yield flat.narrow(0, start, min(PIECE, flat.numel() - start))


def _sum_piece(piece: torch.Tensor) -> torch.Tensor:
    """Return the sums, counts and extremes of a piece; few operations, since each costs a launch on a device."""
    wide, infinity = _wide(piece.device.type), float("inf")
    if piece.dtype in {torch.float32, torch.float64}:
        x = piece
    else:
        x = piece.to(torch.float32 if piece.is_floating_point() else wide)
    kept = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
    total = kept.sum(dtype=wide)
    shift = total / x.numel()
    norm = torch.linalg.vector_norm
    sums = [total, shift, norm(kept - shift.reshape(1)), norm(kept, 1, dtype=wide), norm(kept, dtype=wide)]
    masks = (x != x, x == infinity, x == -infinity, x == 0, x < 0)  # noqa: PLR0124 - true for NaN
    counts = [mask.sum(dtype=wide) for mask in masks]
    low = torch.nan_to_num(x, nan=infinity, posinf=infinity, neginf=infinity).amin()
    high = torch.nan_to_num(x, nan=-infinity, posinf=-infinity, neginf=-infinity).amax()
    return torch.stack([*sums, *counts, low.to(wide), high.to(wide)])


def fingerprint(flat: torch.Tensor) -> torch.Tensor:
    """Return the 64-bit hash of a flat tensor, as a signed integer on its device."""
    blocks_per_piece = PIECE * flat.element_size() // spec.HASH_BLOCK_BYTES
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for i, piece in enumerate(_pieces(flat)):
        total = total + _hash_blocks(_unify_nans(piece), i * blocks_per_piece)
    tail = spec.mix(flat.numel() * spec.GOLDEN + flat.element_size() & spec.MASK_64)
    return _mix(total + _signed(tail))


def _unify_nans(piece: torch.Tensor) -> torch.Tensor:
    """Return the bits of a piece as integers, all NaNs alike."""
    if piece.dtype not in _NAN_PATTERNS:
        return piece.contiguous().view(_INTEGERS[piece.element_size()])
    view, magnitude, limit, one = _NAN_PATTERNS[piece.dtype]
    bits = piece.contiguous().view(view)
    return torch.where((bits & magnitude) > limit, one, bits)


_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _hash_blocks(bits: torch.Tensor, first: int) -> torch.Tensor:
    """Return the sum of the hashes of the blocks that some bits fill, the last one with zeros after its end."""
    per_block = spec.HASH_BLOCK_BYTES // bits.element_size()
    blocks = -(-bits.numel() // per_block)
    plain = _pad(bits, blocks * per_block).view(torch.int64).reshape(blocks, -1)
    low, high = _keys(bits.device)
    products = ((plain & 0xFFFFFFFF) + low & 0xFFFFFFFF) * (_shift(plain, 32) + high & 0xFFFFFFFF)
    place = torch.arange(first + 1, first + blocks + 1, dtype=torch.int64, device=bits.device)
    return _mix(products.sum(1) + _mix(plain.sum(1) + place * _signed(spec.GOLDEN))).sum()


@lru_cache(maxsize=8)
def _keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    keys = spec.make_hash_keys().astype(np.int64)
    return torch.tensor(keys[0::2], device=device), torch.tensor(keys[1::2], device=device)


def _signed(value: int) -> int:
    """Return the 64-bit integer with the same bits in torch's signed arithmetic."""
    return value - (1 << 64) if value >> 63 else value


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Return a shift to the right that fills with zeros."""
    return (x >> by) & ((1 << 64 - by) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Return ``spec.mix`` of each element."""
    x = (x ^ _shift(x, 30)) * _signed(spec.MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(spec.MIX_2)
    return x ^ _shift(x, 31)


def histogram(flat: torch.Tensor) -> torch.Tensor:
    """Return the counts of the bins of a flat tensor, of its sampled elements if it is large."""
    sampled = flat.numel() > spec.HIST_FULL
    total = torch.zeros(HIST_BINS, dtype=torch.int64, device=flat.device)
    for i, piece in enumerate(_pieces(flat)):
        chosen = _sample(piece, i * (PIECE // spec.HIST_GROUP)) if sampled else piece
        total = total + _count_bins(chosen)
    return total


def _sample(piece: torch.Tensor, first_group: int) -> torch.Tensor:
    """Return one run of each group, zeros (which no bin counts) where the piece ends before."""
    groups = -(-piece.numel() // spec.HIST_GROUP)
    wide = piece if piece.element_size() > 1 or not piece.is_floating_point() else piece.to(torch.float32)
    runs = _pad(wide, groups * spec.HIST_GROUP).view(-1, spec.HIST_RUN)
    group = torch.arange(groups, dtype=torch.int64, device=piece.device)
    run = _shift((group + first_group) * 2654435761 & 0xFFFFFFFF, 29)
    return runs.index_select(0, group * (spec.HIST_GROUP // spec.HIST_RUN) + run).reshape(-1)


def _pad(x: torch.Tensor, length: int) -> torch.Tensor:
    """Return a copy with zeros after its end, up to a length."""
    return torch.cat([x, torch.zeros(length - x.numel(), dtype=x.dtype, device=x.device)])


def _count_bins(x: torch.Tensor) -> torch.Tensor:
    """Return how many elements fall into each bin; by sorting, which needs neither the host nor atomic additions."""
    wide = _wide(x.device.type)
    x = x.to(wide)
    if wide is torch.float64:
        exponent = (_shift(x.view(torch.int64), 52) & 0x7FF) - 1022
    else:
        exponent = (_shift(x.view(torch.int32).to(torch.int64), 23) & 0xFF) - 126
    bins = (exponent - HIST_LOW_EXPONENT).clamp(0, HIST_MAGNITUDES - 1) + HIST_MAGNITUDES * (x < 0)
    bins = torch.where(torch.isfinite(x) & (x != 0), bins, HIST_BINS)
    edges = torch.arange(HIST_BINS + 1, dtype=torch.int64, device=x.device)
    return torch.searchsorted(bins.sort().values, edges).diff()
