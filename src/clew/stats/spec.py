"""What each statistic means, for every kind of tensor; the numbers that all implementations share.

Every tensor becomes one row of ``STAT_NAMES`` in float64.

Counts, over all elements
    ``count`` elements; ``nan``; ``pos_inf`` and ``neg_inf``; ``zero`` (both signs of zero); ``negative`` (``x < 0``,
    negative infinities too); ``positive`` (``x > 0``, likewise). ``count = nan + zero + negative + positive``.

Values, over the finite elements
    ``min``, ``max``, ``mean``, ``std`` (population: divided by the number of finite elements), ``abs_mean``,
    ``abs_max``, ``l2`` (root of the sum of squares). With no finite element (an empty tensor, nothing but NaN)
    each is NaN. A zero minimum or maximum is +0.

How exact they are
    Counts, ``min``, ``max`` and ``abs_max`` are exact. The others are sums. Relative to the magnitudes summed, those of
    float32 and narrower tensors are within ``SUM_TOLERANCE`` (``std``: ``SPREAD_TOLERANCE``) in the worst case and
    about 1e-7 as a rule, also where the mean is far larger than the deviation or squares leave the range of float32.
    float64 and integer tensors are summed in float64; squares or sums beyond its range overflow to infinity or
    vanish, as they do in numpy. Results depend neither on the number of threads nor on the instruction set; the
    compiled and the torch path agree within the tolerance.

What other tensors give
    * integers: their values as float64, so int64 beyond 2**53 is rounded. bool: 0 and 1.
    * float16, bfloat16, float8: converted exactly, then as float32. float8_e8m0fnu and packed types: not measured.
    * complex: the real numbers it consists of: ``count`` is twice the elements, ``l2`` that of the complex vector.
    * quantised: the values it stands for (dequantised); the hash too.
    * sparse: the dense tensor it stands for, elements not stored being zeros. Histogram: of the stored values after
      duplicates are summed. Hash: of the stored values, chained with that of their indices, so it differs from
      the dense twin's. On another device this is the one case that synchronises.
    * conjugate and negative views: the values a reader of the tensor would see. Expanded tensors: each element as
      often as it appears.
    * distributed (DTensor): the local part. Nested: the elements of all its parts, in order.
    * meta, fake, functional and transformed (inside ``vmap``, ``grad``) tensors have no values: UnsupportedTensor.

Updates
    The update of a parameter is ``new - old``, subtracted in float32 for float32 and narrower types (for float32 the
    same bits as torch's), in float64 for float64 and integers, and measured as a tensor of that type.

Histogram
    Counts by sign and binary exponent (``HIST_*`` in the schema). Tensors of at most ``HIST_FULL`` elements are counted
    whole. In larger ones, of each group of ``HIST_GROUP`` elements in logical order, one run of ``HIST_RUN`` is
    counted, at an offset that wanders (``sample_offset``): one element in eight, the same in every implementation
    and layout.

Hash
    A 64-bit number of the elements in logical (row-major) order: equal for equal bits whatever the strides, device
    or number of threads. All NaNs count as the same NaN; +0 and -0 differ. The shape is not part of it; number of
    elements and their width are. The bytes (little-endian) are cut into blocks of ``HASH_BLOCK_BYTES``, the last one
    filled with zeros. Of the 32-bit words ``w`` of a block and fixed keys ``k``, modulo 2**64:
    ``B = sum over pairs (w0+k0 mod 2**32) * (w1+k1 mod 2**32)`` and ``D = sum of the 64-bit words``. The sum over
    blocks of ``mix(B + mix(D + (block+1)*GOLDEN))``, with count and width mixed in, is the hash. A change of one word
    always changes ``D``. Two words exchanged in one block leave ``D`` alone and escape ``B`` about once in 2**32 times;
    tensors that differ in more than that collide about once in 2**64.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, TypeVar

import numpy as np

SUM_TOLERANCE: Final = 8e-6
"""Worst relative error of a sum over float32 elements (64 float32 additions per lane and block)."""

SPREAD_TOLERANCE: Final = 7e-5
"""Worst relative error of ``std`` of float32 elements: sums are taken about a shift up to four deviations away."""

HIST_FULL: Final = 4096
HIST_GROUP: Final = 128
HIST_RUN: Final = 16
"""Which elements a histogram counts: all of a small tensor, one run per group of a large one."""

HASH_BLOCK_BYTES: Final = 4096
GOLDEN: Final = 0x9E3779B97F4A7C15
MIX_1: Final = 0xBF58476D1CE4E5B9
MIX_2: Final = 0x94D049BB133111EB
MASK_64: Final = (1 << 64) - 1

NAN_BITS: Final = {2: 0x7E00, 4: 0x7FC00000, 8: 0x7FF8000000000000}
"""The one NaN that stands for all in a hash, by width in bytes; bfloat16 and float8 have their own."""
BFLOAT16_NAN: Final = 0x7FC0
FLOAT8_NAN: Final = 0x7F


def mix(value: int) -> int:
    """Scramble 64 bits so that each input bit moves every output bit."""
    value ^= value >> 30
    value = value * MIX_1 & MASK_64
    value ^= value >> 27
    value = value * MIX_2 & MASK_64
    return value ^ value >> 31


@lru_cache(maxsize=1)
def make_hash_keys() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return the fixed keys of the hash, one for each 32-bit word of a block."""
    words = HASH_BLOCK_BYTES // 4
    keys = np.array([mix(GOLDEN * (i + 1) & MASK_64) >> 32 for i in range(words)], np.uint32)
    keys.flags.writeable = False
    return keys


def finish_hash(total: int, *, count: int, width: int) -> int:
    """Return the hash of a tensor: the sum over its blocks, number and width in bytes of its elements mixed in."""
    return mix((total + mix(count * GOLDEN + width & MASK_64)) & MASK_64)


def chain(first: int, second: int) -> int:
    """Return one hash for two tensors that follow each other (several calls of a module in a step)."""
    return mix((mix((first + GOLDEN) & MASK_64) + second) & MASK_64)


Groups = TypeVar("Groups", int, "np.ndarray[tuple[int, ...], np.dtype[np.int64]]")


def sample_offset(group: Groups) -> Groups:
    """Return where in its group (or each of many) the counted run starts: spread evenly, never periodic."""
    return ((group * 2654435761 & 0xFFFFFFFF) >> 29) * HIST_RUN
