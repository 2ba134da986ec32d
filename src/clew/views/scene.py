"""A drawing as plain data: rectangles, curves and lines of text. Renderers turn it into SVG or pixels.

Colours are names of roles (``ink``, ``paper``, ``conv`` …) that a theme resolves, or ``#rrggbb`` as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle with rounded corners; an empty fill or stroke is not drawn."""

    x: float
    y: float
    width: float
    height: float
    radius: float = 0.0
    fill: str = ""
    stroke: str = ""
    stroke_width: float = 1.0
    dashed: bool = False
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """One line of text. ``align``: ``left middle right``; ``y`` is the base line; ``halo`` covers what is below."""

    x: float
    y: float
    text: str
    size: float
    color: str = "ink"
    align: str = "left"
    bold: bool = False
    halo: str = ""


@dataclass(frozen=True, slots=True)
class Wire:
    """A line from point to point that leaves and arrives vertically; ``arrow`` puts a head at its end."""

    points: tuple[Point, ...]
    color: str = "line"
    width: float = 1.2
    arrow: bool = False
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """Straight lines from point to point."""

    points: tuple[Point, ...]
    color: str = "line"
    width: float = 1.6
    tip: str = ""


Shape: TypeAlias = Rect | Words | Wire | Line


@dataclass(frozen=True, slots=True)
class Scene:
    """Shapes in the order of drawing, on a page of a size, with a title for those who cannot see it."""

    width: float
    height: float
    shapes: tuple[Shape, ...]
    title: str = ""
    description: str = ""


LIGHT: Final = {
    "paper": "#ffffff",
    "ink": "#17202b",
    "quiet": "#4a5563",
    "line": "#7b8794",
    "frame": "#b9c2cc",
    "frame-fill": "#f5f7fa",
    "frame-fill-2": "#ffffff",
    "box": "#eef1f5",
    "box-line": "#8593a3",
    "conv": "#d3e4fb",
    "conv-line": "#2563b0",
    "linear": "#fbd9d7",
    "linear-line": "#b3302a",
    "norm": "#fde4c4",
    "norm-line": "#b0660a",
    "activation": "#d3efd6",
    "activation-line": "#237a35",
    "pool": "#d2f0f6",
    "pool-line": "#13788c",
    "arithmetic": "#e6dbf8",
    "arithmetic-line": "#6a3fb5",
    "attention": "#f6efb8",
    "attention-line": "#857400",
    "other": "#e8ebef",
    "other-line": "#66727f",
    "param": "#fde0ee",
    "param-line": "#c04a86",
    "buffer": "#eee3ea",
    "buffer-line": "#8f6a80",
    "end": "#dfe5ec",
    "end-line": "#4b5968",
    "good": "#d8f0dd",
    "good-line": "#2b7d40",
    "warn": "#fde4b0",
    "warn-line": "#a36200",
    "bad": "#f7b8b4",
    "bad-line": "#a3130c",
    "dead": "#cfd4da",
    "dead-line": "#48525d",
    "unknown": "#f4f5f7",
    "unknown-line": "#9aa5b1",
}
"""The colours of a picture on white paper. A pair ``x`` and ``x-line`` fills and outlines a box."""

DARK: Final = {
    "paper": "#12171d",
    "ink": "#e8edf2",
    "quiet": "#b4bfca",
    "line": "#7f8c99",
    "frame": "#465361",
    "frame-fill": "#1a2129",
    "frame-fill-2": "#151b22",
    "box": "#26303a",
    "box-line": "#8292a2",
    "conv": "#193a63",
    "conv-line": "#6fa8ee",
    "linear": "#5a2220",
    "linear-line": "#f08b84",
    "norm": "#553408",
    "norm-line": "#f0ae58",
    "activation": "#1b4625",
    "activation-line": "#73c983",
    "pool": "#0f444f",
    "pool-line": "#63c6d9",
    "arithmetic": "#3c2766",
    "arithmetic-line": "#b697f0",
    "attention": "#494008",
    "attention-line": "#d9c74a",
    "other": "#2c353f",
    "other-line": "#9aa7b4",
    "param": "#56213c",
    "param-line": "#ee8ebb",
    "buffer": "#3f3039",
    "buffer-line": "#c39db2",
    "end": "#2f3b48",
    "end-line": "#a9b8c6",
    "good": "#194a26",
    "good-line": "#6fce85",
    "warn": "#573a04",
    "warn-line": "#eebb55",
    "bad": "#711b16",
    "bad-line": "#ff8f87",
    "dead": "#20262d",
    "dead-line": "#aab4be",
    "unknown": "#1d242b",
    "unknown-line": "#6d7985",
}
"""The same roles on a dark page."""
