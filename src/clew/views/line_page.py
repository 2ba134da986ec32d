"""Lines for the terminal: one curve after the other, and a table of where each began and ended."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from clew.views.block import Cell, Column, Heading, Page, Table
from clew.views.curve import choose_scale, thin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clew.views.block import Block
    from clew.views.line_chart import Axes, Drawn


def make_page(lines: Sequence[Drawn], axes: Axes) -> Page:
    """Return the curves of all lines and their first, last, lowest and highest values."""
    title = axes.title or f"{axes.y_label} over {axes.x_label}"
    blocks: list[Block] = [Heading(title, 1)]
    if axes.x_label == "step":
        blocks += [_curve(line, axes) for line in lines if len(line.x)]
    blocks.append(_table(lines, axes))
    return Page(title, tuple(blocks))


def _curve(line: Drawn, axes: Axes) -> Block:
    low, high = axes.x_range
    inside = (line.x >= (-np.inf if low is None else low)) & (line.x <= (np.inf if high is None else high))
    curve = thin(line.name, line.x[inside].astype(np.int64).tolist(), line.y[inside].tolist())
    scale = choose_scale([each for each in (*curve.low, *curve.high) if each is not None])
    return replace(curve, scale=scale if axes.log is None else "log" if axes.log else "linear")


def _table(lines: Sequence[Drawn], axes: Axes) -> Table:
    columns = (
        Column("name", "line", flexible=True),
        Column("values", "values", "integer", drop=3),
        Column("first", "first", "number", drop=1),
        Column("last", "last", "number"),
        Column("lowest", "lowest", "number"),
        Column("at", f"at {axes.x_label}", "integer" if axes.x_label == "step" else "number"),
        Column("highest", "highest", "number", drop=2),
    )
    return Table(columns, tuple(_row(line) for line in lines), empty="no line")


def _row(line: Drawn) -> tuple[Cell, ...]:
    finite = np.flatnonzero(np.isfinite(line.y))
    if not len(finite):
        return (Cell(line.name), Cell(len(line.y)), *(Cell("") for _ in range(5)))
    lowest = finite[line.y[finite].argmin()]
    last = float(line.y[-1])
    return (
        Cell(line.name),
        Cell(len(line.y)),
        Cell(float(line.y[0])),
        Cell(last, "plain" if np.isfinite(last) else "bad"),
        Cell(float(line.y[lowest])),
        Cell(float(line.x[lowest])),
        Cell(float(line.y[finite].max())),
    )
