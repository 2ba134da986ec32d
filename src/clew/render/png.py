"""Drawings as PNG files, with nothing but numpy."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from clew.errors import UsageError
from clew.model.png import encode_png
from clew.render.canvas import Canvas
from clew.render.svg import HEAD
from clew.views.scene import LIGHT, Line, Rect, Words
from clew.views.text_width import measure_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from clew.views.scene import Point, Scene, Shape, Wire

SCALE: Final = 2.0
"""Pixels for each unit of a drawing, so that text is sharp on today's screens."""

MOST_PIXELS: Final = 60_000_000
_CURVE_STEPS: Final = 14
_DASH: Final = (4.0, 3.0)


def encode_pixels(pixels: NDArray[np.uint8]) -> bytes:
    """Return (height, width, 3) bytes as a PNG file."""
    height, width, channels = pixels.shape
    return encode_png(pixels.tobytes(), width=width, height=height, channels=channels)


def render_png(scene: Scene) -> bytes:
    """Return a drawing as a PNG file; a very large one gets fewer pixels for each unit."""
    scale = min(SCALE, math.sqrt(MOST_PIXELS / (scene.width * scene.height)))
    if scale < 0.5:
        raise UsageError(
            f"the picture is {scene.width:,.0f} by {scene.height:,.0f}, too large for pixels",
            where=scene.title,
            next_step="open fewer levels (depth=2), or save it as .svg or .html",
        )
    canvas = Canvas(math.ceil(scene.width * scale), math.ceil(scene.height * scale), LIGHT["paper"])
    for shape in scene.shapes:
        _draw(canvas, shape, scale)
    return encode_pixels(canvas.pixels)


def _draw(canvas: Canvas, shape: Shape, scale: float) -> None:
    if isinstance(shape, Rect):
        _draw_rect(canvas, shape, scale)
    elif isinstance(shape, Words):
        _draw_words(canvas, shape, scale)
    elif isinstance(shape, Line):
        points = [(x * scale, y * scale) for x, y in shape.points]
        canvas.draw_line(points, width=shape.width * scale, color=_resolve(shape.color))
    else:
        _draw_wire(canvas, shape, scale)


def _resolve(role: str) -> str:
    return LIGHT.get(role, role)


def _draw_rect(canvas: Canvas, rect: Rect, scale: float) -> None:
    left, top = rect.x * scale, rect.y * scale
    right, bottom = (rect.x + rect.width) * scale, (rect.y + rect.height) * scale
    radius, pen = rect.radius * scale, rect.stroke_width * scale if rect.stroke else 0.0
    inset = 0
    if rect.stroke and not rect.dashed:
        # Whole pixels for the outer border and the same number of them on each side for the line.
        left, top, right, bottom = (
            round(side) for side in (left - pen / 2, top - pen / 2, right + pen / 2, bottom + pen / 2)
        )
        radius, inset = radius + pen / 2, max(1, round(pen))
        canvas.fill_rect(left, top, right, bottom, color=_resolve(rect.stroke), radius=radius)
    sides = (left + inset, top + inset, right - inset, bottom - inset)
    canvas.fill_rect(*sides, color=_resolve(rect.fill or "paper"), radius=max(radius - inset, 0))
    if rect.dashed:
        outline = _round_outline(left, top, right, bottom, radius)
        for dash in _cut(outline, _DASH[0] * scale, _DASH[1] * scale):
            canvas.draw_line(dash, width=pen, color=_resolve(rect.stroke))


def _round_outline(left: float, top: float, right: float, bottom: float, radius: float) -> list[Point]:
    centres = (
        (right - radius, top + radius, -90),
        (right - radius, bottom - radius, 0),
        (left + radius, bottom - radius, 90),
        (left + radius, top + radius, 180),
    )
    points = []
    for x, y, start in centres:
        for step in range(7):
            angle = math.radians(start + 15 * step)
            points.append((x + radius * math.cos(angle), y + radius * math.sin(angle)))
    return [*points, points[0]]


def _cut(points: list[Point], on: float, off: float) -> list[list[Point]]:
    """Return the dashes of a line."""
    dashes: list[list[Point]] = []
    is_on, left, dash = True, on, [points[0]]
    for (x0, y0), (x1, y1) in pairwise(points):
        length, done = math.hypot(x1 - x0, y1 - y0), 0.0
        while length - done > left:
            done += left
            cut = (x0 + (x1 - x0) * done / length, y0 + (y1 - y0) * done / length)
            if is_on:
                dashes.append([*dash, cut])
            is_on, left, dash = not is_on, off if is_on else on, [cut]
        left -= length - done
        dash.append((x1, y1))
    return [*dashes, dash] if is_on else dashes


def _draw_words(canvas: Canvas, words: Words, scale: float) -> None:
    size, x, y = words.size * scale, words.x * scale, words.y * scale
    if words.halo:
        width = measure_text(words.text, size, bold=words.bold)
        left = x - {"left": 0.0, "middle": width / 2, "right": width}[words.align]
        sides = (left - 2, y - size * 0.9, left + width + 2, y + size * 0.3)
        canvas.fill_rect(*sides, color=_resolve(words.halo))
    color = _resolve(words.color)
    canvas.write(x, y, words.text, size=size, color=color, align=words.align, bold=words.bold)


def _draw_wire(canvas: Canvas, wire: Wire, scale: float) -> None:
    points = [(x * scale, y * scale) for x, y in wire.points]
    x, y = points[-1]
    color, head = _resolve(wire.color), HEAD * scale
    if wire.arrow:
        points[-1] = (x, y - head + scale)
    canvas.draw_line(_flatten(points), width=wire.width * scale, color=color)
    if wire.arrow:
        half = 3.5 * scale
        canvas.fill_triangle(((x, y), (x - half, y - head), (x + half, y - head)), color=color)


def _flatten(points: list[Point]) -> list[Point]:
    """Return a wire as straight pieces, with those curves where it changes sides that SVG draws."""
    flat = [points[0]]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 != x1:
            middle = (y0 + y1) / 2
            for step in range(1, _CURVE_STEPS):
                t = step / _CURVE_STEPS
                a, b, c, d = (1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3
                flat.append(((a + b) * x0 + (c + d) * x1, a * y0 + (b + c) * middle + d * y1))
        flat.append((x1, y1))
    return flat
