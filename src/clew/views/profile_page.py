"""The profile of a Python function as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clew.views.block import Cell, Column, Heading, Page, Table
from clew.views.number import format_integer

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_page(name: str, calls: int, rows: Sequence[tuple[Any, ...]], total: int) -> Page:
    """Return the page of a profile; a row is (calls, own seconds, seconds with callees, source, name)."""
    columns = (
        Column("total", "total", "seconds"),
        Column("own", "own", "seconds"),
        Column("calls", "calls", "integer"),
        Column("function", "function", flexible=True),
        Column("source", "line", flexible=True, drop=1),
    )
    lines = tuple(
        (Cell(spent), Cell(own), Cell(count), Cell(function), Cell(_short(source)))
        for count, own, spent, source, function in rows
    )
    left = total - len(rows)
    note = f"and {format_integer(left)} more" if left > 0 else ""
    title = f"{name}: {format_integer(calls)} call{'s' if calls != 1 else ''}"
    return Page(title, (Heading(title, 1), Table(columns, lines, empty="no call was profiled", note=note)))


def _short(source: str) -> str:
    """Return a path with at most its last folder."""
    return "/".join(source.rsplit("/", 2)[-2:])
