"""A sheet of pixels to draw on: rectangles, lines and text with smooth edges, in plain numpy."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from clew.render.stroke_font import ASCENT, distance_to_line, draw_letter
from clew.views.text_width import ADVANCE, BOLD, UNKNOWN_ADVANCE, measure_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_PHASES: Final = 4


def parse_color(color: str) -> NDArray[np.float32]:
    """Return ``#rrggbb`` as three numbers from 0 to 255."""
    return np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)], np.float32)


class Canvas:
    """Pixels of a colour. Coordinates are in pixels, x to the right and y down."""

    def __init__(self, width: int, height: int, ground: str) -> None:
        self.pixels: NDArray[np.uint8] = np.empty((height, width, 3), np.uint8)
        self.pixels[:] = parse_color(ground)

    def paste(self, image: NDArray[np.uint8], x: int, y: int) -> None:
        """Put an image of (height, width, 3) down as it is; what hangs over the edge is lost."""
        target = self.pixels[y : y + image.shape[0], x : x + image.shape[1]]
        target[:] = image[: target.shape[0], : target.shape[1]]

    def blend(self, ink: NDArray[np.floating], x: int, y: int, color: str) -> None:
        """Mix a colour in where there is ink; the array lies with its corner at (x, y)."""
        height, width = ink.shape
        top, left = max(0, -y), max(0, -x)
        bottom = min(height, self.pixels.shape[0] - y)
        right = min(width, self.pixels.shape[1] - x)
        if top >= bottom or left >= right:
            return
        part = self.pixels[y + top : y + bottom, x + left : x + right]
        share = ink[top:bottom, left:right, None]
        part[:] = np.rint(part + (parse_color(color) - part) * share)

    def fill_rect(
        self, left: float, top: float, right: float, bottom: float, *, color: str, radius: float = 0
    ) -> None:
        """Fill a rectangle whose sides lie on whole pixels and whose corners are round."""
        x0, y0, x1, y1 = round(left), round(top), round(right), round(bottom)
        r = min(math.ceil(radius), (x1 - x0) // 2, (y1 - y0) // 2)
        value = parse_color(color).astype(np.uint8)
        height, width = self.pixels.shape[:2]
        clip_x, clip_y = slice(max(0, x0), min(width, x1)), slice(max(0, y0), min(height, y1))
        if r < 1:
            self.pixels[clip_y, clip_x] = value
            return
        self.pixels[clip_y, max(0, x0 + r) : max(0, x1 - r)] = value
        self.pixels[max(0, y0 + r) : max(0, y1 - r), clip_x] = value
        rows, columns = np.mgrid[0:r, 0:r] + 0.5
        corner = np.clip(r + 0.5 - np.hypot(rows - r, columns - r), 0, 1)
        for y, flipped in ((y0, corner), (y1 - r, corner[::-1])):
            self.blend(flipped, x0, y, color)
            self.blend(flipped[:, ::-1], x1 - r, y, color)

    def draw_line(self, points: Sequence[tuple[float, float]], *, width: float, color: str) -> None:
        """Draw straight lines from point to point."""
        reach = width / 2 + 1
        for start, end in pairwise(points):
            x0, x1 = sorted((start[0], end[0]))
            y0, y1 = sorted((start[1], end[1]))
            left, top = math.floor(x0 - reach), math.floor(y0 - reach)
            size = (math.ceil(y1 + reach) - top, math.ceil(x1 + reach) - left)
            rows, columns = np.mgrid[0 : size[0], 0 : size[1]] + 0.5
            distance = distance_to_line(columns + left, rows + top, start, end)
            self.blend(np.clip(width / 2 + 0.5 - distance, 0, 1), left, top, color)

    def fill_triangle(self, corners: Sequence[tuple[float, float]], *, color: str) -> None:
        """Fill a triangle with corners in clockwise order."""
        xs, ys = [x for x, _ in corners], [y for _, y in corners]
        left, top = math.floor(min(xs)) - 1, math.floor(min(ys)) - 1
        rows, columns = np.mgrid[0 : math.ceil(max(ys)) + 1 - top, 0 : math.ceil(max(xs)) + 1 - left] + 0.5
        ink = np.ones(rows.shape)
        for (x0, y0), (x1, y1) in pairwise([*corners, corners[0]]):
            length = math.hypot(x1 - x0, y1 - y0) or 1.0
            inward = ((x1 - x0) * (rows + top - y0) - (y1 - y0) * (columns + left - x0)) / length
            np.minimum(ink, np.clip(inward + 0.5, 0, 1), out=ink)
        self.blend(ink, left, top, color)

    def write(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float,
        color: str,
        align: str = "left",
        bold: bool = False,
    ) -> None:
        """Write a line of text with its base line at y."""
        width = measure_text(text, size, bold=bold)
        x -= {"left": 0.0, "middle": width / 2, "right": width}[align]
        top = round(y) - math.ceil(ASCENT * size)
        for letter in text:
            whole = math.floor(x)
            phase = int((x - whole) * _PHASES) / _PHASES
            self.blend(draw_letter(letter, size, bold=bold, shift=phase), whole, top, color)
            x += ADVANCE.get(letter, UNKNOWN_ADVANCE) * size * (BOLD if bold else 1.0)
