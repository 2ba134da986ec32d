"""How the elements of a tensor are spread, as bars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from clew.views.number import format_integer, format_number, format_share
from clew.views.scene import Rect, Scene, Shape, Words

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIDTH: Final = 460.0
HEIGHT: Final = 180.0
LEFT: Final = 58.0
TOP: Final = 58.0


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of the finite elements between edges, and how many elements were not finite or zero."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    counts: NDArray[np.int64]
    edges: NDArray[np.float64]
    nan: int
    infinite: int
    zero: int

    @property
    def total(self) -> int:
        """All elements, the finite and the others."""
        return int(self.counts.sum()) + self.nan + self.infinite


def count_values(values: NDArray[np.generic], name: str, *, bins: int, dtype: str = "") -> Histogram:
    """Return how the finite elements of an array are spread over equal bins."""
    flat = values.astype(np.float64).ravel()
    finite = flat[np.isfinite(flat)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if low == high:
        # All elements equal: one bin around them, however large they are.
        reach = abs(low) / 2 or 0.5
        low, high = low - reach, high + reach
    counts, edges = np.histogram(finite, bins, range=(low, high))
    return Histogram(
        name, values.shape, dtype or str(values.dtype), counts, edges,
        int(np.isnan(flat).sum()), int(np.isinf(flat).sum()), int((flat == 0).sum()),
    )  # fmt: skip


def draw_histogram(histogram: Histogram) -> Scene:
    """Return the bars with the range below, the largest count beside, and what is outside of the bars above."""
    counts, edges = histogram.counts, histogram.edges
    top = max(int(counts.max(initial=0)), 1)
    base, step = TOP + HEIGHT, WIDTH / len(counts)
    shapes: list[Shape] = [
        Words(LEFT - 34, 24, histogram.name or "histogram", 15, bold=True),
        Words(LEFT - 34, 41, _describe(histogram), 10.5, "quiet"),
    ]
    for index, count in enumerate(counts):
        height = HEIGHT * int(count) / top
        if count:
            x = LEFT + index * step
            # The rarest value must still be seen.
            height = max(height, 1.0)
            shapes.append(Rect(x, base - height, max(step - 0.5, 0.5), height, 0, "conv-line"))
    shapes.append(Rect(LEFT, base, WIDTH, 1, 0, "line"))
    shapes += _ticks(float(edges[0]), float(edges[-1]), base)
    shapes.append(Words(LEFT - 6, TOP + 8, format_integer(top), 9.5, "quiet", "right"))
    shapes.append(Words(LEFT - 6, base, "0", 9.5, "quiet", "right"))
    title = f"Histogram of {histogram.name}" if histogram.name else "Histogram"
    return Scene(LEFT + WIDTH + 34, base + 34, tuple(shapes), title, _describe(histogram))


def _ticks(low: float, high: float, base: float) -> list[Shape]:
    shapes: list[Shape] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, value = LEFT + WIDTH * share, low + (high - low) * share
        shapes.append(Rect(x - 0.5, base, 1, 4, 0, "line"))
        shapes.append(Words(x, base + 16, format_number(value), 9.5, "quiet", "middle"))
    if low < 0 < high:
        x = LEFT + WIDTH * -low / (high - low)
        shapes.append(Rect(x - 0.4, TOP, 0.8, base - TOP, 0, "bad-line"))
    return shapes


def _describe(histogram: Histogram) -> str:
    size = "×".join(map(str, histogram.shape)) or "scalar"
    parts = [f"{histogram.dtype} {size}", f"{format_integer(histogram.total)} elements"]
    if histogram.zero:
        parts.append(f"{format_share(histogram.zero / histogram.total)} zero")
    if histogram.nan:
        parts.append(f"{format_integer(histogram.nan)} NaN")
    if histogram.infinite:
        parts.append(f"{format_integer(histogram.infinite)} infinite")
    return " · ".join(parts)
