"""Series of numbers as lines over one pair of axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from clew.views.curve import choose_scale
from clew.views.number import format_integer, format_number
from clew.views.scene import Line, Rect, Scene, Shape, Words
from clew.views.text_width import measure_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

WIDTH: Final = 640.0
HEIGHT: Final = 300.0
_TOP: Final = 52.0
_RIGHT: Final = 28.0
_LABEL: Final = 10.5
_PALETTE: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#5f6b76")
"""Colours that people tell apart who see few of them."""
MOST_LINES: Final = 24
_BUCKETS: Final = 400
_TICKS: Final = 5
_LARGEST: Final = 1e300
"""Beyond it, and below its inverse, the arithmetic of axes would leave the range of floats."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """One line: its name in the legend, where it lies, and the values."""

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Axes:
    """What stands at the axes, and the ranges that were asked for; ``log`` None decides by the values."""

    title: str = ""
    x_label: str = "step"
    y_label: str = ""
    log: bool | None = None
    x_range: tuple[float | None, float | None] = (None, None)
    y_range: tuple[float | None, float | None] = (None, None)


def mean_over(x: NDArray[np.float64], y: NDArray[np.float64], every: int) -> tuple[NDArray[np.float64], ...]:
    """Return the means of ``every`` values after each other, at the last place of each group."""
    if every <= 1 or not len(x):
        return x, y
    starts = np.arange(0, len(x), every)
    counts = np.diff(np.append(starts, len(x)))
    with np.errstate(invalid="ignore"):
        return x[starts + counts - 1], np.add.reduceat(y, starts) / counts


def draw_lines(lines: Sequence[Drawn], axes: Axes) -> Scene:
    """Return the lines with ticks, a legend, and a cross at the top wherever a value is not finite."""
    plane = _Plane.around(lines, axes)
    shapes: list[Shape] = [Words(plane.left, 24, axes.title, 14, bold=True)] if axes.title else []
    shapes += plane.draw_axes(axes)
    for number, line in enumerate(lines):
        color = _PALETTE[number % len(_PALETTE)]
        shapes += plane.draw_line(line, color)
    legend = list(_draw_legend([line.name for line in lines], plane.left, plane.base + 52))
    shapes += legend
    height = plane.base + 50 + 18 * len(lines) if legend else plane.base + 44
    description = f"{len(lines)} lines over {axes.x_label}: " + ", ".join(line.name for line in lines)
    return Scene(plane.left + WIDTH + _RIGHT, height, tuple(shapes), axes.title or axes.y_label, description)


def _draw_legend(names: list[str], left: float, top: float) -> Iterator[Shape]:
    for number, name in enumerate(names):
        y = top + 18 * number
        yield Rect(left, y - 4, 18, 3, 1, _PALETTE[number % len(_PALETTE)])
        yield Words(left + 26, y, name, 11)


@dataclass(frozen=True, slots=True)
class _Plane:
    """Where numbers lie on the page."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool
    left: float

    @property
    def base(self) -> float:
        return _TOP + HEIGHT

    @classmethod
    def around(cls, lines: Sequence[Drawn], axes: Axes) -> _Plane:
        x_low, x_high = _limits([line.x for line in lines], axes.x_range)
        shown = [line.y[(line.x >= x_low) & (line.x <= x_high)] for line in lines]
        finite = [np.clip(values[np.isfinite(values)], -_LARGEST, _LARGEST) for values in shown]
        ends = [float(end) for values in finite if len(values) for end in (values.min(), values.max())]
        log = choose_scale(ends) == "log" if axes.log is None else axes.log
        if log:
            finite = [values[values > 1 / _LARGEST] for values in finite]
        y_low, y_high = _limits(finite, axes.y_range, is_positive=log)
        if not log:
            # A little room, so that no line lies on the frame; an end that was asked for stays.
            room = y_high / 25 - y_low / 25
            y_low = y_low - room if axes.y_range[0] is None else y_low
            y_high = y_high + room if axes.y_range[1] is None else y_high
        labels = [format_number(value) for value in _ticks(y_low, y_high, log=log)]
        left = 22 + max((measure_text(label, _LABEL) for label in labels), default=20.0)
        return cls(x_low, x_high, y_low, y_high, log, left)

    def column(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.left + WIDTH * (x - self.x_low) / (self.x_high - self.x_low)

    def row(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        low, high = self._position(np.array([self.y_low, self.y_high]))
        # Half of each, so that the ends of the float range can be told apart.
        share = (self._position(y) / 2 - low / 2) / (high / 2 - low / 2)
        return np.asarray(self.base - HEIGHT * share, np.float64)

    def _position(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.log10(y), np.float64) if self.log else y

    def draw_axes(self, axes: Axes) -> Iterator[Shape]:
        for value in _ticks(self.y_low, self.y_high, log=self.log):
            y = float(self.row(np.array([value]))[0])
            yield Rect(self.left, y - 0.4, WIDTH, 0.8, 0, "box")
            yield Words(self.left - 8, y + 3.5, format_number(value), _LABEL, "quiet", "right")
        is_whole = axes.x_label == "step"
        for value in _ticks(self.x_low, self.x_high, is_whole=is_whole):
            x = float(self.column(np.array([value]))[0])
            text = format_integer(value) if is_whole else format_number(value)
            yield Rect(x - 0.4, self.base, 0.8, 4, 0, "line")
            yield Words(x, self.base + 17, text, _LABEL, "quiet", "middle")
        yield Rect(self.left, self.base, WIDTH, 1, 0, "line")
        yield Words(self.left + WIDTH, self.base + 33, axes.x_label, _LABEL, "quiet", "right")
        scale = " (logarithmic)" if self.log else ""
        yield Words(self.left, _TOP - 10, f"{axes.y_label}{scale}", _LABEL, "quiet")

    def draw_line(self, line: Drawn, color: str) -> Iterator[Shape]:
        inside = (line.x >= self.x_low) & (line.x <= self.x_high)
        x, y = line.x[inside], line.y[inside]
        columns = self.column(x)
        drawable = np.isfinite(y) & ((y > 0) | (not self.log))
        rows = np.clip(self.row(np.where(drawable, y, self.y_low)), _TOP, self.base)
        for piece in _pieces(drawable):
            points = _thin(columns[piece], rows[piece])
            if len(points) == 1:
                yield Rect(points[0][0] - 1.5, points[0][1] - 1.5, 3, 3, 1.5, color)
            else:
                yield Line(points, color, tip=line.name)
        for column in _bad_columns(columns, y):
            yield Words(column, _TOP + 4, "×", 12, "bad-line", "middle")


def _limits(
    values: Sequence[NDArray[np.float64]],
    wish: tuple[float | None, float | None],
    *,
    is_positive: bool = False,
) -> tuple[float, float]:
    """Return a range that holds the values, or what was asked for, and is never empty."""
    full = [each for each in values if len(each)]
    low = min((float(each.min()) for each in full), default=0.0) if wish[0] is None else wish[0]
    high = max((float(each.max()) for each in full), default=1.0) if wish[1] is None else wish[1]
    if is_positive and low <= 0:
        low = high / 1e6 if high > 0 else 1e-6
    if high - low > 1 / _LARGEST:
        return low, high
    reach = abs(low) / 2 if abs(low) > 1 / _LARGEST else 0.5
    return low if is_positive else low - reach, high + reach


def _ticks(low: float, high: float, *, log: bool = False, is_whole: bool = False) -> list[float]:
    """Return round numbers inside a range, a handful of them."""
    if log:
        first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
        if last - first >= 1:
            powers = range(first, last + 1, max(1, math.ceil((last - first) / (_TICKS + 1))))
            return [10.0**power for power in powers]
    span = high / _TICKS - low / _TICKS
    unit: float = 10.0 ** math.floor(math.log10(span))
    stride: float = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= span)
    if is_whole:
        stride = max(1.0, round(stride))
    count = math.floor(high / stride + 1e-9)
    return [number * stride for number in range(math.ceil(low / stride - 1e-9), count + 1)]


def _pieces(drawable: NDArray[np.bool_]) -> Iterator[slice]:
    """Yield the runs of values that can be drawn; a line breaks where one cannot."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], drawable, [False]]).astype(np.int8)))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield slice(int(start), int(end))


def _thin(columns: NDArray[np.float64], rows: NDArray[np.float64]) -> tuple[tuple[float, float], ...]:
    """Return the points of a line; of many in one place the first, the extremes and the last remain."""
    if len(columns) <= 4 * _BUCKETS:
        kept = np.arange(len(columns))
    else:
        buckets = ((columns - columns[0]) * _BUCKETS / max(columns[-1] - columns[0], 1e-9)).astype(np.int64)
        starts = np.flatnonzero(np.diff(buckets, prepend=-1))
        chosen = []
        for start, end in zip(starts, [*starts[1:], len(columns)], strict=True):
            part = rows[start:end]
            chosen += [start, start + int(part.argmin()), start + int(part.argmax()), end - 1]
        kept = np.unique(chosen)
    return tuple((float(columns[index]), float(rows[index])) for index in kept)


def _bad_columns(columns: NDArray[np.float64], y: NDArray[np.float64]) -> list[float]:
    """Return where values are not finite, at most one mark for every few units."""
    return sorted({round(float(column) / 8) * 8 for column in columns[~np.isfinite(y)]})
