"""The table of a graph on a screen, or as JSON, CSV or HTML."""

from __future__ import annotations

import csv
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from clew.errors import UsageError, suggest
from clew.render import html, json
from clew.render.terminal import Screen, lower
from clew.views.graph_records import to_lines, to_records
from clew.views.graph_table import make_page, make_rows

if TYPE_CHECKING:
    from clew.model.graph import Graph

FORMS: Final = ("json", "csv", "html")
_READABLE: Final = 300
"""Rows that somebody scrolls through."""


def show(
    graph: Graph, *, depth: int | None = None, width: int | None = None, stream: TextIO | None = None
) -> None:
    """Write the table to a stream, standard output unless given; a narrow one gets two lines per row."""
    stream = sys.stdout if stream is None else stream
    screen = Screen.of(stream)
    screen = replace(screen, width=max(width or screen.width, 40), fits=True)
    page = make_page(graph, depth=depth, width=screen.width)
    stream.write(lower(page, screen))
    stream.flush()


def lower_as(graph: Graph, to: str | Path, *, depth: int | None = None) -> str:
    """Return the table as ``json``, ``csv`` or ``html``; a path with such an ending is written too."""
    name = str(to)
    form = name if name in FORMS else Path(name).suffix.lstrip(".")
    if form not in FORMS:
        raise UsageError(
            f"to='{name}' is no form of the table",
            next_step=suggest(name, FORMS) or "json, csv, html, or a file with such an ending",
        )
    text = _FORMS[form](graph, depth)
    if name != form:
        Path(name).write_text(text, encoding="utf-8")
    return text


def lower_fragment(graph: Graph) -> str:
    """Return the table as HTML to be put into a notebook; a large graph by modules, so that it can be read."""
    depth = next((depth for depth in (None, 4, 3, 2) if len(make_rows(graph, depth)) <= _READABLE), 1)
    return html.lower(make_page(graph, depth=depth, width=None))


def _to_json(graph: Graph, depth: int | None) -> str:
    return json.dump(to_records(graph, depth))


def _to_csv(graph: Graph, depth: int | None) -> str:
    lines = to_lines(graph, depth)
    if not lines:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _to_html(graph: Graph, depth: int | None) -> str:
    return html.lower_file(make_page(graph, depth=depth, width=None))


_FORMS: Final = {"json": _to_json, "csv": _to_csv, "html": _to_html}
