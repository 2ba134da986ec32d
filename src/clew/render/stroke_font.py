"""Letters for pictures made of pixels: strokes of a pen, so that no font has to be installed or shipped."""

from __future__ import annotations

import itertools
import math
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from clew.views.text_width import ADVANCE, BOLD, UNKNOWN_ADVANCE

if TYPE_CHECKING:
    from numpy.typing import NDArray

Stroke: TypeAlias = list[tuple[float, float]]

ASCENT: Final = 0.85
DESCENT: Final = 0.28
PEN: Final = 0.082
BOLD_PEN: Final = 0.122
_BEARING: Final = 0.085
_UNKNOWN: Final = "0,0 0,72 100,72 100,0 0,0"


@lru_cache(maxsize=4096)
def draw_letter(letter: str, size: float, *, bold: bool = False, shift: float = 0.0) -> NDArray[np.float32]:
    """Return how much ink each pixel of a letter has, from 0 to 1.

    The base line lies ``ceil(ASCENT * size)`` rows below the first; ``shift`` moves the letter right by a
    part of a pixel.
    """
    advance = ADVANCE.get(letter, UNKNOWN_ADVANCE) * (BOLD if bold else 1.0) * size
    ascent = math.ceil(ASCENT * size)
    height, width = ascent + math.ceil(DESCENT * size), math.ceil(advance + shift) + 1
    ink = np.zeros((height, width), np.float32)
    bearing = min(_BEARING * size, advance * 0.2)
    pen = (BOLD_PEN if bold else PEN) * size / 2
    rows, columns = np.mgrid[0:height, 0:width] + 0.5
    for stroke in letter_strokes(letter):
        points = [
            (shift + bearing + x / 100 * (advance - 2 * bearing), ascent - y / 100 * size) for x, y in stroke
        ]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            distance = distance_to_line(columns, rows, (x0, y0), (x1, y1))
            np.maximum(ink, np.clip(pen + 0.5 - distance, 0, 1), out=ink)
    return ink


def distance_to_line(
    x: NDArray[np.float64], y: NDArray[np.float64], start: tuple[float, float], end: tuple[float, float]
) -> NDArray[np.float64]:
    """Return how far points are from a line between two points."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = dx * dx + dy * dy
    if length == 0:
        return np.hypot(x - start[0], y - start[1])
    share = np.clip(((x - start[0]) * dx + (y - start[1]) * dy) / length, 0, 1)
    return np.hypot(x - start[0] - share * dx, y - start[1] - share * dy)


def letter_strokes(letter: str) -> tuple[Stroke, ...]:
    """Return the strokes of a letter as points; a letter we have none for is an empty box."""
    if letter == " ":
        return ()
    return _parse(_alphabet().get(letter, _UNKNOWN))


@cache
def _alphabet() -> dict[str, str]:
    text = (files("clew.render") / "assets" / "strokes.txt").read_text(encoding="utf-8")
    return {line[0]: line[2:] for line in text.splitlines() if not line.startswith("//")}


@cache
def _parse(text: str) -> tuple[Stroke, ...]:
    return tuple([point for item in stroke.split() for point in _points(item)] for stroke in text.split("|"))


def _points(item: str) -> Stroke:
    if not item.startswith("@"):
        x, y = map(float, item.split(","))
        return [(x, y)]
    x, y, radius_x, radius_y, start, end = map(float, item[1:].split(","))
    steps = max(2, round(abs(end - start) / 15))
    angles = [math.radians(start + (end - start) * step / steps) for step in range(steps + 1)]
    return [(x + radius_x * math.cos(angle), y + radius_y * math.sin(angle)) for angle in angles]
