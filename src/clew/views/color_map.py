"""Numbers as colours: one ramp from little to much, one with a middle for numbers of two signs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BAD: Final = (255, 0, 255)
"""The colour of what is NaN or infinite: magenta, which no ramp has."""

_RAMPS: Final = {
    "sequential": ("#fbfbfd", "#d5dcf0", "#a3bde0", "#639fd0", "#2f7fb9", "#135c8d", "#08304f"),
    "diverging": ("#0b4f8a", "#4d94c8", "#b3d3e8", "#fafafa", "#f4c3ad", "#d5694b", "#8f1d14"),
}


@dataclass(frozen=True, slots=True)
class ColorScale:
    """Which colour stands for which number: a ramp between two numbers, and whether some had no place on it."""

    ramp: str
    low: float
    high: float
    has_bad: bool = False


def choose_scale(values: NDArray[np.floating], *, low: float | None = None) -> ColorScale:
    """Return a scale that fits: with white at zero for both signs, else from ``low`` or the least number up."""
    good = np.isfinite(values)
    has_bad = not bool(good.all())
    if not good.any():
        return ColorScale("sequential", 0.0, 1.0, has_bad)
    least, most = float(values[good].min()), float(values[good].max())
    if least < 0 < most:
        bound = max(-least, most)
        return ColorScale("diverging", -bound, bound, has_bad)
    return ColorScale("sequential", least if low is None else low, most, has_bad)


def colorize(values: NDArray[np.floating], scale: ColorScale) -> NDArray[np.uint8]:
    """Return numbers as red, green and blue bytes; all numbers being equal is no reason to divide by zero."""
    good = np.isfinite(values)
    span = scale.high - scale.low
    low = np.where(good, values, scale.low) - scale.low
    shares = np.clip(low / span, 0, 1) if span > 0 else np.zeros(values.shape)
    anchors = np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in _RAMPS[scale.ramp]])
    place = np.linspace(0, 1, len(anchors))
    pixels = np.stack([np.interp(shares, place, anchors[:, channel]) for channel in range(3)], axis=-1)
    pixels[~good] = BAD
    rounded: NDArray[np.uint8] = np.rint(pixels).astype(np.uint8)
    return rounded


def shrink(values: NDArray[np.floating], most: int) -> tuple[NDArray[np.floating], int]:
    """Return a table of at most so many rows and columns, each the mean of a block, and the side of a block."""
    block = -(-max(values.shape) // most)
    if block <= 1:
        return values, 1
    rows, columns = (np.arange(0, size, block) for size in values.shape)
    sums = np.add.reduceat(np.add.reduceat(values, rows, axis=0), columns, axis=1)
    sizes = [
        np.diff(np.append(starts, size)) for starts, size in zip((rows, columns), values.shape, strict=True)
    ]
    return sums / np.outer(*sizes), block
