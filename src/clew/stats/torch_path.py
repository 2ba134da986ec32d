"""The same rows from torch operations: for other devices, and where no kernel was built. Never synchronises.

The row of a tensor stays on its device as one packed tensor of 64-bit integers (statistics as float64 bits, then hash,
then histogram), so that a whole step can be brought to the host in one copy.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from clew.model.schema import HIST_BINS, HIST_LOW_EXPONENT, HIST_MAGNITUDES, STAT_NAMES
from clew.stats import spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

PIECE: Final = 1 << 21
"""Elements per piece, a multiple of every block: temporaries stay small next to the tensor of a large model."""

_NAN_PATTERNS: Final = {
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000, spec.NAN_BITS[4]),
    torch.float64: (torch.int64, (1 << 63) - 1, 0x7FF << 52, spec.NAN_BITS[8]),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00, spec.NAN_BITS[2]),
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80, spec.BFLOAT16_NAN),
    torch.float8_e4m3fn: (torch.int8, 0x7F, 0x7E, spec.FLOAT8_NAN),
    torch.float8_e5m2: (torch.int8, 0x7F, 0x7C, spec.FLOAT8_NAN),
}
"""For each type with several NaNs: how to see its bits, mask of the magnitude, largest that is no NaN, the one NaN."""


def measure(values: torch.Tensor, *, hash: bool, hist: bool) -> torch.Tensor:
    """Return the packed row of a dense tensor of real numbers, on its device."""
    flat = values.reshape(-1)
    parts = [_pack(_summarise(flat))]
    if hash:
        parts.append(fingerprint(flat).reshape(1))
    if hist:
        parts.append(histogram(flat))
    return torch.cat(parts)


def unpack(packed: NDArray[np.int64], device_type: str) -> NDArray[np.float64]:
    """Return the statistics from the first columns of a packed row on the host."""
    bits = packed[: len(STAT_NAMES)]
    if _wide(device_type) is torch.float64:
        return bits.view(np.float64)
    return bits.astype(np.int32).view(np.float32).astype(np.float64)


def _pack(row: torch.Tensor) -> torch.Tensor:
    bits = row.view(torch.int64 if row.dtype is torch.float64 else torch.int32)
    return bits.to(torch.int64)


def _wide(device_type: str) -> torch.dtype:
    """Return the widest floating type of a device."""
    return torch.float32 if device_type == "mps" else torch.float64


def _pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, flat.numel(), PIECE):
        yield flat.narrow(0, start, min(PIECE, flat.numel() - start))


def _summarise(flat: torch.Tensor) -> torch.Tensor:
    """Return the row of statistics: sums of each piece, then the pieces joined about their common mean."""
    wide = _wide(flat.device.type)
    if not flat.numel():
        nothing = [0.0] * 7 + [float("nan")] * 7
        return torch.tensor(nothing, dtype=wide, device=flat.device)
    table = torch.stack([_sum_piece(piece.to(wide)) for piece in _pieces(flat)])
    counts, moments, extremes = torch.split(table, [6, 4, 2], dim=1)
    nan, pos_inf, neg_inf, zero, negative, finite = counts.sum(0).unbind()
    n, mean, m2, abs_sum = moments.unbind(1)
    low, high = extremes.unbind(1)
    total = torch.nansum(n * mean) / finite
    spread = m2.sum() + torch.nansum(n * (mean - total) ** 2)
    smallest, largest = low.amin() + 0.0, high.amax() + 0.0
    values = torch.stack([
        smallest,
        largest,
        total,
        torch.sqrt(spread / finite),
        abs_sum.sum() / finite,
        torch.maximum(smallest.abs(), largest.abs()),
        torch.sqrt(spread + finite * total**2),
    ])  # fmt: skip
    values = torch.where(finite > 0, values, float("nan"))
    count = torch.full_like(nan, flat.numel())
    heads = torch.stack([count, nan, pos_inf, neg_inf, zero, negative, count - nan - zero - negative])
    return torch.cat([heads, values])


def _sum_piece(x: torch.Tensor) -> torch.Tensor:
    """Return counts, moments and extremes of the finite numbers of a piece; its mean is NaN when there are none."""
    finite = torch.isfinite(x)
    kept = torch.where(finite, x, 0.0)
    n = finite.sum().to(x.dtype)
    mean = kept.sum() / n
    deviation = torch.where(finite, x - mean, 0.0)
    left = deviation.sum()
    m2 = torch.where(n > 0, (deviation * deviation).sum() - left * (left / n), 0.0).clamp_min(0.0)
    nan, pos_inf = torch.isnan(x).sum(), (x == float("inf")).sum()
    counts = [nan, pos_inf, x.numel() - n - nan - pos_inf, (x == 0).sum(), (x < 0).sum(), n]
    moments = [n, mean + left / n, m2, kept.abs().sum()]
    extremes = [torch.where(finite, x, float("inf")).amin(), torch.where(finite, x, -float("inf")).amax()]
    return torch.stack([part.to(x.dtype) for part in (*counts, *moments, *extremes)])


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
