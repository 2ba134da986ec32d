"""A drawing as SVG: text that any browser, editor or paper shows, with no script and nothing to fetch."""

from __future__ import annotations

import itertools
from html import escape
from typing import TYPE_CHECKING, Final

from clew.views.scene import LIGHT, Line, Rect, Wire, Words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from clew.views.scene import Point, Scene, Shape

FONT: Final = "Inter, 'Segoe UI', 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
_ANCHORS: Final = {"left": "start", "middle": "middle", "right": "end"}
HEAD: Final = 7.0
"""Length of an arrow's head; the line stops where it begins."""


def render_svg(scene: Scene) -> str:
    """Return a complete SVG file."""
    width, height = _number(scene.width), _number(scene.height)
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" role="img" font-family="{FONT}">'
            ),
            f"<title>{escape(scene.title)}</title>",
            f"<desc>{escape(scene.description)}</desc>",
            f'<rect width="{width}" height="{height}" fill="{LIGHT["paper"]}"/>',
            render_shapes(scene.shapes),
            "</svg>\n",
        ]
    )


def _light(role: str) -> str:
    return LIGHT.get(role, role)


def render_shapes(
    shapes: Iterable[Shape], resolve: Callable[[str], str] = _light, *, tips: bool = True
) -> str:
    """Return shapes as SVG elements; ``resolve`` turns the name of a colour into one."""
    return "\n".join(_render(shape, resolve, tips=tips) for shape in shapes)


def _render(shape: Shape, resolve: Callable[[str], str], *, tips: bool) -> str:
    if isinstance(shape, Rect):
        return _render_rect(shape, resolve, tip=shape.tip if tips else "")
    if isinstance(shape, Words):
        return _render_words(shape, resolve)
    if isinstance(shape, Line):
        return _render_line(shape, resolve, tip=shape.tip if tips else "")
    return _render_wire(shape, resolve, tip=shape.tip if tips else "")


def _render_rect(rect: Rect, resolve: Callable[[str], str], *, tip: str) -> str:
    parts = [f'<rect x="{_number(rect.x)}" y="{_number(rect.y)}"']
    parts.append(f'width="{_number(rect.width)}" height="{_number(rect.height)}"')
    if rect.radius:
        parts.append(f'rx="{_number(rect.radius)}"')
    parts.append(f'fill="{resolve(rect.fill) if rect.fill else "none"}"')
    if rect.stroke:
        parts.append(f'stroke="{resolve(rect.stroke)}" stroke-width="{_number(rect.stroke_width)}"')
    if rect.dashed:
        parts.append('stroke-dasharray="4 3"')
    return _close(" ".join(parts), "rect", tip)


def _render_words(words: Words, resolve: Callable[[str], str]) -> str:
    parts = [f'<text x="{_number(words.x)}" y="{_number(words.y)}" font-size="{_number(words.size)}"']
    parts.append(f'fill="{resolve(words.color)}"')
    if words.align != "left":
        parts.append(f'text-anchor="{_ANCHORS[words.align]}"')
    if words.bold:
        parts.append('font-weight="600"')
    if words.halo:
        halo = resolve(words.halo)
        parts.append(f'stroke="{halo}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"')
    return f"{' '.join(parts)}>{escape(words.text)}</text>"


def _render_wire(wire: Wire, resolve: Callable[[str], str], *, tip: str) -> str:
    color = resolve(wire.color)
    line = f'<path d="{trace_path(wire.points, stop_short=wire.arrow)}" fill="none" '
    element = _close(f'{line}stroke="{color}" stroke-width="{_number(wire.width)}"', "path", tip)
    if not wire.arrow:
        return element
    x, y = wire.points[-1]
    head = f"M{_number(x)} {_number(y)}l-3.5 -{_number(HEAD)}h7z"
    return f'{element}\n<path d="{head}" fill="{color}"/>'


def _render_line(line: Line, resolve: Callable[[str], str], *, tip: str) -> str:
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in line.points)
    pen = f'stroke="{resolve(line.color)}" stroke-width="{_number(line.width)}" stroke-linejoin="round"'
    return _close(f'<polyline points="{points}" fill="none" {pen}', "polyline", tip)


def trace_path(points: Sequence[Point], *, stop_short: bool = False) -> str:
    """Return the SVG path of a wire: straight down, and in a curve where it changes sides."""
    steps = list(points)
    if stop_short:
        x, y = steps[-1]
        steps[-1] = (x, y - HEAD + 1)
    path = f"M{_number(steps[0][0])} {_number(steps[0][1])}"
    for (x0, y0), (x1, y1) in itertools.pairwise(steps):
        if x0 == x1:
            path += f"V{_number(y1)}" if y0 != y1 else ""
        else:
            middle = _number((y0 + y1) / 2)
            path += f"C{_number(x0)} {middle} {_number(x1)} {middle} {_number(x1)} {_number(y1)}"
    return path


def _close(opening: str, tag: str, tip: str) -> str:
    return f"{opening}><title>{escape(tip)}</title></{tag}>" if tip else f"{opening}/>"


def _number(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    text = f"{value:.1f}"
    return text.removesuffix(".0")
