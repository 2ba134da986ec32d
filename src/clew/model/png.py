"""Pixels as a PNG file, with nothing but the standard library."""

from __future__ import annotations

import struct
import zlib
from typing import Final

_COLOUR_TYPES: Final = {1: 0, 3: 2, 4: 6}
"""Channels of a pixel (grey, red-green-blue, with opacity) and the number PNG has for them."""


def encode_png(pixels: bytes, *, width: int, height: int, channels: int) -> bytes:
    """Return a PNG file of bytes that stand row by row, 1 (grey), 3 (colour) or 4 (with opacity) to a pixel."""
    stride = width * channels
    if channels not in _COLOUR_TYPES or len(pixels) != stride * height or not pixels:
        raise ValueError(f"{len(pixels)} bytes are not {width} x {height} pixels of {channels} channels")
    # Each row begins with the number of its filter: 0, the bytes as they are.
    rows = b"".join(b"\0" + pixels[start : start + stride] for start in range(0, len(pixels), stride))
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, body) for name, body in chunks)


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
