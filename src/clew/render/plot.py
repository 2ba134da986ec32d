"""A curve as lines of text: braille dots, or stars where the terminal has no more than ASCII."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from clew.views.number import format_integer, format_value

if TYPE_CHECKING:
    from clew.views.block import Curve

_BRAILLE_BASE: Final = 0x2800
_BRAILLE_BITS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_LEAST: Final = 8
_FEW: Final = 16


@dataclass(frozen=True, slots=True)
class Plot:
    """The drawn lines, the line of non-finite marks below them (or empty), and the ruler of steps."""

    lines: tuple[str, ...]
    marks: str
    ruler: str


def draw(curve: Curve, *, width: int, height: int = 8, unicode: bool = True) -> Plot:
    """Return the curve in at most ``width`` columns and ``height`` lines, with labels on both axes."""
    ends = [value for value in (*curve.low, *curve.high) if value is not None]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    labels = (format_value(high, curve.format), format_value(low, curve.format))
    margin = max(len(label) for label in labels)
    # Few points would draw as scattered dots over a wide field.
    columns = max(min(width - margin - 2, max(_FEW, 4 * len(curve.steps))), _LEAST)
    cells = _draw_braille(curve, columns, height) if unicode else _draw_stars(curve, columns, height)
    axis = "┤" if unicode else "|"
    shown = {0: labels[0], height - 1: labels[1]} if ends else {}
    lines = tuple(f"{shown.get(row, ''):>{margin}} {axis}{line}" for row, line in enumerate(cells))
    indent = " " * (margin + 2)
    return Plot(
        lines,
        indent + marks if (marks := _draw_marks(curve, columns, unicode=unicode)).strip() else "",
        indent + _draw_ruler(curve, columns),
    )


def _draw_braille(curve: Curve, columns: int, height: int) -> list[str]:
    grid = [[0] * columns for _ in range(height)]
    for x, y in _dots(curve, 2 * columns, 4 * height):
        grid[y // 4][x // 2] |= _BRAILLE_BITS[y % 4][x % 2]
    return ["".join(chr(_BRAILLE_BASE + bits) if bits else " " for bits in row) for row in grid]


def _draw_stars(curve: Curve, columns: int, height: int) -> list[str]:
    grid = [[" "] * columns for _ in range(height)]
    for x, y in _dots(curve, columns, height):
        grid[y][x] = "*"
    return ["".join(row) for row in grid]


def _dots(curve: Curve, width: int, height: int) -> set[tuple[int, int]]:
    """Return the dots of the line of means and of the spread around it, y counted from the top."""
    ends = [value for value in (*curve.low, *curve.high) if value is not None]
    if not ends:
        return set()
    bottom, top = _position(curve, min(ends)), _position(curve, max(ends))

    def row(value: float) -> int:
        share = (_position(curve, value) - bottom) / (top - bottom) if top > bottom else 0.5
        return round((height - 1) * (1 - share))

    dots: set[tuple[int, int]] = set()
    previous: tuple[int, int] | None = None
    for step, low, mean, high in zip(curve.steps, curve.low, curve.mean, curve.high, strict=True):
        if low is None or mean is None or high is None:
            previous = None
            continue
        x = _column(curve, step, width)
        dots.update((x, y) for y in range(row(high), row(low) + 1))
        here = (x, row(mean))
        dots.update(_line(previous, here) if previous else [here])
        previous = here
    return dots


def _position(curve: Curve, value: float) -> float:
    # Halved, so that the difference of two values at the ends of the float range stays finite.
    return math.log10(value) if curve.scale == "log" else value / 2


def _column(curve: Curve, step: int, width: int) -> int:
    first, last = curve.steps[0], curve.steps[-1]
    return round((step - first) * (width - 1) / (last - first)) if last > first else 0


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            round(start[0] + (end[0] - start[0]) * part / length),
            round(start[1] + (end[1] - start[1]) * part / length),
        )
        for part in range(length + 1)
    ]


def _draw_marks(curve: Curve, columns: int, *, unicode: bool) -> str:
    marks = [" "] * columns
    for step in curve.nonfinite:
        marks[_column(curve, step, columns)] = "×" if unicode else "x"
    return "".join(marks).rstrip()


def _draw_ruler(curve: Curve, columns: int) -> str:
    first = f"step {format_integer(curve.steps[0])}" if curve.steps else ""
    last = format_integer(curve.last_step)
    if len(curve.steps) < 2:
        return first
    return first + last.rjust(max(columns - len(first), len(last) + 2))
