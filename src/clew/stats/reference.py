"""The slow twin of every fast number: numpy, float64, one obvious line after another. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clew.model.schema import HIST_BINS, HIST_LOW_EXPONENT, HIST_MAGNITUDES, STAT_INDEX, STAT_NAMES
from clew.stats import spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

COUNT, NAN, POS_INF, NEG_INF, ZERO, NEGATIVE, POSITIVE = range(7)
MIN, MAX, MEAN, STD, ABS_MEAN, ABS_MAX, L2 = range(7, 14)


def summarise(array: NDArray[Any]) -> NDArray[np.float64]:
    """Return the row of statistics of an array, as ``spec`` defines them."""
    x = _widen(_real_numbers(array))
    row = np.full(len(STAT_NAMES), np.nan)
    row[COUNT] = x.size
    row[NAN] = np.isnan(x).sum()
    row[POS_INF] = np.isposinf(x).sum()
    row[NEG_INF] = np.isneginf(x).sum()
    row[ZERO] = (x == 0).sum()
    row[NEGATIVE] = (x < 0).sum()
    row[POSITIVE] = (x > 0).sum()
    finite = x[np.isfinite(x)]
    if finite.size:
        row[MIN:] = _summarise_finite(finite)
    return row


def _summarise_finite(x: NDArray[np.float64]) -> list[float]:
    """Return the value statistics of at least one finite number."""
    magnitude = np.abs(x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        mean = x.mean()
        std = np.sqrt(np.mean((x - mean) ** 2))
        l2 = np.sqrt(np.sum(x * x))
    return [x.min() + 0.0, x.max() + 0.0, mean, std, magnitude.mean(), magnitude.max(), l2]


def histogram(array: NDArray[Any]) -> NDArray[np.uint32]:
    """Return the log2-magnitude histogram of an array, of the sampled elements if it is large."""
    x = _widen(_real_numbers(array))
    if x.size > spec.HIST_FULL:
        x = x[sampled_positions(x.size)]
    x = x[np.isfinite(x) & (x != 0)]
    exponent = np.frexp(np.abs(x))[1] - 1
    bins = np.clip(exponent - HIST_LOW_EXPONENT + 1, 0, HIST_MAGNITUDES - 1) + HIST_MAGNITUDES * (x < 0)
    return np.bincount(bins, minlength=HIST_BINS).astype(np.uint32)


def sampled_positions(count: int) -> NDArray[np.int64]:
    """Return the positions, in logical order, that the histogram of a large tensor counts."""
    groups = np.arange(-(-count // spec.HIST_GROUP), dtype=np.int64)
    starts = groups * spec.HIST_GROUP + spec.sample_offset(groups)
    positions = starts[:, None] + np.arange(spec.HIST_RUN)
    flat: NDArray[np.int64] = positions.ravel()
    return flat[flat < count]


def fingerprint(array: NDArray[Any]) -> int:
    """Return the 64-bit hash of an array's elements in logical order."""
    x = _real_numbers(array)
    raw = _one_nan(x).tobytes()
    blocks = -(-len(raw) // spec.HASH_BLOCK_BYTES)
    words = np.frombuffer(raw.ljust(blocks * spec.HASH_BLOCK_BYTES, b"\0"), "<u4")
    words = words.reshape(blocks, spec.HASH_BLOCK_BYTES // 4)
    keys = spec.make_hash_keys()
    total = 0
    for index, block in enumerate(words):
        keyed = (block + keys).astype(np.uint64)
        products = int((keyed[0::2] * keyed[1::2]).sum(dtype=np.uint64))
        plain = int(np.ascontiguousarray(block).view("<u8").sum(dtype=np.uint64))
        inner = spec.mix((plain + (index + 1) * spec.GOLDEN) & spec.MASK_64)
        total += spec.mix((products + inner) & spec.MASK_64)
    return spec.finish_hash(total & spec.MASK_64, count=x.size, width=x.itemsize)


def _real_numbers(array: NDArray[Any]) -> NDArray[Any]:
    """Return the elements in logical order, a complex one as its two parts."""
    flat = np.ascontiguousarray(array).reshape(-1)
    real: NDArray[Any] = flat.view(flat.real.dtype) if np.iscomplexobj(flat) else flat
    return real


def _widen(x: NDArray[Any]) -> NDArray[np.float64]:
    """Return the numbers in float64; a signalling NaN becomes an ordinary one without a warning."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def _one_nan(x: NDArray[Any]) -> NDArray[Any]:
    """Return the array with every NaN replaced by the one that stands for all."""
    if x.dtype.kind != "f" or not np.isnan(x).any():
        return x
    bits: NDArray[Any] = x.view(f"<u{x.itemsize}").copy()
    bits[np.isnan(x)] = spec.NAN_BITS[x.itemsize]
    return bits


def merge(rows: Sequence[NDArray[np.float64]] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the row of all elements together from the rows of the parts (micro-batches, calls, ranks)."""
    merged = np.full(len(STAT_NAMES), np.nan)
    merged[:MIN] = 0.0
    for row in rows:
        merged = _merge_two(merged, np.asarray(row, np.float64))
    return merged


def _merge_two(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the row of two parts; sums of squared deviations are joined about the common mean."""
    na, nb = _finite(a), _finite(b)
    out: NDArray[np.float64] = (a if na else b).copy()
    out[:MIN] = a[:MIN] + b[:MIN]
    if na and nb:
        n = na + nb
        delta = b[MEAN] - a[MEAN]
        out[MIN], out[MAX] = min(a[MIN], b[MIN]), max(a[MAX], b[MAX])
        out[MEAN] = a[MEAN] + delta * (nb / n)
        spread = a[STD] ** 2 * (na / n) + b[STD] ** 2 * (nb / n) + delta**2 * (na / n) * (nb / n)
        out[STD] = np.sqrt(spread)
        out[ABS_MEAN] = a[ABS_MEAN] * (na / n) + b[ABS_MEAN] * (nb / n)
        out[ABS_MAX] = max(a[ABS_MAX], b[ABS_MAX])
        out[L2] = np.hypot(a[L2], b[L2])
    return out


def _finite(row: NDArray[np.float64]) -> float:
    """Return how many finite elements a row speaks of."""
    return float(row[COUNT] - row[NAN] - row[POS_INF] - row[NEG_INF])


def merge_histograms(hists: Iterable[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """Return the histogram of all elements together; a count that no longer fits stays at the limit."""
    total = np.zeros(HIST_BINS, np.uint64)
    for hist in hists:
        total += hist
    return np.minimum(total, np.iinfo(np.uint32).max).astype(np.uint32)


def quantile(hist: NDArray[np.uint32], row: NDArray[np.float64], q: float) -> float:
    """Return the approximate quantile ``q`` (0 to 1) of the finite elements, from a histogram and its row.

    The row says how many negative, zero and positive elements there are, the counted ones say how the magnitudes of
    each sign are spread. Inside a bin magnitudes are taken to be even in their logarithm, so the result is within a
    factor of two (of the elements counted), and never outside minimum and maximum.
    """
    negative = row[NEGATIVE] - row[NEG_INF]
    positive = row[POSITIVE] - row[POS_INF]
    total = negative + row[ZERO] + positive
    if not total:
        return float("nan")
    rank = min(max(q, 0.0), 1.0) * total
    if rank < negative:
        value = -_magnitude_at(hist[HIST_MAGNITUDES:], 1.0 - rank / negative)
    elif rank <= negative + row[ZERO] and row[ZERO]:
        value = 0.0
    else:
        share = (rank - negative - row[ZERO]) / positive if positive else 1.0
        value = _magnitude_at(hist[:HIST_MAGNITUDES], share)
    return float(min(max(value, row[MIN]), row[MAX]))


def _magnitude_at(hist: NDArray[np.uint32], share: float) -> float:
    """Return the magnitude below which a share of the counted elements of one sign lies."""
    filled = np.flatnonzero(hist)
    if not filled.size:
        return 0.0
    below = np.concatenate([[0.0], np.cumsum(hist[filled], dtype=np.float64)])
    target = share * below[-1]
    slot = min(int(np.searchsorted(below, target, side="right")) - 1, filled.size - 1)
    inside = (target - below[slot]) / (below[slot + 1] - below[slot])
    return float(2.0 ** (HIST_LOW_EXPONENT - 1 + float(filled[slot]) + inside))


assert (STAT_INDEX["count"], STAT_INDEX["l2"]) == (COUNT, L2)
