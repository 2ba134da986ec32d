"""The checksum of what is written and read: that of ``zlib.crc32``, sooner where the processor can."""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np

from clew.stats.built import BUILT

_LARGE: Final = 16_384
"""Bytes from where finding the way to the kernel pays."""


def crc32(data: memoryview | bytes, before: int = 0) -> int:
    """Return the checksum of some bytes, going on from that of the bytes before them."""
    if BUILT is not None and len(data) >= _LARGE:
        found = BUILT.crc32(np.frombuffer(data, np.uint8).ctypes.data, len(data), before)
        if found is not None:
            return int(found)
    return zlib.crc32(data, before)
