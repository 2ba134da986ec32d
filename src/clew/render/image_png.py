"""Grids of small pictures as pixels: enlarged without smoothing, with labels and a bar of colours."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from clew.render.canvas import Canvas
from clew.views.color_map import BAD, colorize
from clew.views.number import format_number
from clew.views.scene import LIGHT
from clew.views.text_width import measure_text, shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clew.views.color_map import ColorScale
    from clew.views.image_grid import ImageGrid, Tile

MARGIN: Final = 28
GAP: Final = 10
TITLE: Final = 26.0
SMALL: Final = 19.0
_SIDES: Final = ((2, 520), (4, 300), (8, 190), (12, 130), (10**9, 90))
"""How large a picture is drawn, by how many stand beside each other."""


def draw_grid(grid: ImageGrid) -> NDArray[np.uint8]:
    """Return a grid as (height, width, 3) bytes."""
    return _Sheet(grid).draw()


class _Sheet:
    """Sizes of a grid, worked out before anything is drawn."""

    def __init__(self, grid: ImageGrid) -> None:
        self.grid = grid
        across = max(len(row) for row in grid.rows)
        side = next(size for limit, size in _SIDES if across <= limit)
        self.zoom = _choose_zoom(grid, side)
        tiles = [tile for row in grid.rows for tile in row]
        self.cell = max(tile.pixels.shape[1] for tile in tiles) * self.zoom
        labels = [measure_text(tile.label, SMALL) for tile in tiles]
        self.cell = max(self.cell, math.ceil(max(labels)))
        self.labels = [shorten(label, 40) for label in grid.labels]
        self.left = MARGIN + math.ceil(
            max((measure_text(text, SMALL) + 16 for text in self.labels), default=0)
        )
        body = across * (self.cell + GAP) - GAP
        self.lines = _wrap_notes(grid.notes)
        texts = [(shorten(grid.title, 80), TITLE), *((line, SMALL) for line in self.lines)]
        needed = max(math.ceil(measure_text(text, size, bold=size == TITLE)) for text, size in texts)
        self.width = max(self.left + body, MARGIN + needed, MARGIN + 420) + MARGIN

    def draw(self) -> NDArray[np.uint8]:
        """Return the pixels."""
        heights = [self._row_height(row) for row in self.grid.rows]
        head = MARGIN + 34
        foot = 26 * len(self.lines) + (58 if self.grid.scale else 10)
        height = head + sum(heights) + foot + MARGIN // 2
        canvas = Canvas(self.width, height, LIGHT["paper"])
        canvas.write(
            MARGIN, MARGIN + 14, shorten(self.grid.title, 80), size=TITLE, color=LIGHT["ink"], bold=True
        )
        y = head
        for index, row in enumerate(self.grid.rows):
            self._draw_row(canvas, index, row, y)
            y += heights[index]
        if self.grid.scale:
            self._draw_scale(canvas, self.grid.scale, y + 8)
            y += 48
        for line in self.lines:
            canvas.write(MARGIN, y + 22, line, size=SMALL, color=LIGHT["quiet"])
            y += 26
        return canvas.pixels

    def _row_height(self, row: tuple[Tile, ...]) -> int:
        tallest = int(max(tile.pixels.shape[0] for tile in row)) * self.zoom
        return tallest + GAP + (24 if any(tile.label for tile in row) else 0)

    def _draw_row(self, canvas: Canvas, index: int, row: tuple[Tile, ...], y: int) -> None:
        if index < len(self.labels):
            middle = y + row[0].pixels.shape[0] * self.zoom / 2 + SMALL / 3
            text = self.labels[index]
            canvas.write(self.left - 14, middle, text, size=SMALL, color=LIGHT["ink"], align="right")
        for column, tile in enumerate(row):
            large = np.repeat(np.repeat(tile.pixels, self.zoom, axis=0), self.zoom, axis=1)
            x = self.left + column * (self.cell + GAP)
            inset = (self.cell - large.shape[1]) // 2
            border = (x + inset - 1, y - 1, x + inset + large.shape[1] + 1, y + large.shape[0] + 1)
            canvas.fill_rect(*border, color=LIGHT["frame"])
            canvas.paste(large, x + inset, y)
            if tile.label:
                base, middle = y + large.shape[0] + 20, x + self.cell / 2
                canvas.write(middle, base, tile.label, size=SMALL, color=LIGHT["quiet"], align="middle")

    def _draw_scale(self, canvas: Canvas, scale: ColorScale, y: int) -> None:
        """Draw the colours with the numbers at both ends, and what magenta means where it occurs."""
        text = format_number(scale.low)
        canvas.write(MARGIN, y + 15, text, size=SMALL, color=LIGHT["ink"])
        x = MARGIN + math.ceil(measure_text(text, SMALL)) + 10
        ramp = colorize(np.linspace(scale.low, scale.high, 200)[None].repeat(18, axis=0), scale)
        canvas.fill_rect(x - 1, y - 1, x + 201, y + 19, color=LIGHT["frame"])
        canvas.paste(ramp, x, y)
        x += 210
        text = format_number(scale.high)
        canvas.write(x, y + 15, text, size=SMALL, color=LIGHT["ink"])
        if scale.has_bad:
            x += math.ceil(measure_text(text, SMALL)) + 24
            canvas.fill_rect(x, y, x + 18, y + 18, color="#{:02x}{:02x}{:02x}".format(*BAD))
            canvas.write(x + 26, y + 15, "NaN or infinite", size=SMALL, color=LIGHT["ink"])


def _choose_zoom(grid: ImageGrid, side: int) -> int:
    largest = int(max(max(tile.pixels.shape[:2]) for row in grid.rows for tile in row))
    return max(1, round(side / largest))


def _wrap_notes(notes: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    for note in notes:
        if lines and len(lines[-1]) + len(note) < 60:
            lines[-1] += f" · {note}"
        else:
            lines.append(note)
    return lines
