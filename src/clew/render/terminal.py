"""Blocks on a terminal: colours when there are any, columns that fit, ASCII where that is all there is."""

from __future__ import annotations

import io
import itertools
import os
import random
import shutil
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TextIO

from clew.render.plot import draw
from clew.views.block import Callout, Cell, Column, Curve, Heading, KeyValues, Page, Table, Text
from clew.views.number import format_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import RenderableType

# On import rich draws a number from Python's generator, which is the user's: a look must not shift it.
_drawn_before = random.getstate()
try:
    from rich.cells import cell_len, set_cell_size
    from rich.console import Console, Group
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text as Line
finally:
    random.setstate(_drawn_before)

_STYLES: Final = {"plain": "", "good": "green", "quiet": "bright_black", "warn": "yellow", "bad": "bold red"}
_SIGNS: Final = {"note": ("i", "cyan"), "warning": ("!", "yellow"), "error": ("✗", "bold red")}
_ASCII: Final = str.maketrans({"…": "~", "µ": "u", "✗": "x", "×": "x", "→": ">", "·": "-", "–": "-"})
_CONTROL: Final = {code: "?" for code in (*range(32), *range(127, 160)) if code != ord("\n")}
"""Names and commands come from files: an escape sequence in one must not reach the terminal."""
_GAP: Final = 2
_SHORTEST: Final = 14
"""A flexible column is cut to no less than this before another column has to go."""


@dataclass(frozen=True, slots=True)
class Screen:
    """What the medium can do. ``fits``: lines longer than the width would be broken, so tables must adapt."""

    width: int = 80
    color: bool = False
    unicode: bool = True
    fits: bool = True

    @classmethod
    def of(cls, stream: TextIO) -> Screen:
        """Return the abilities of a stream: a terminal, or a pipe that takes lines of any length."""
        is_terminal = _is_terminal(stream)
        asked = os.environ.get("COLUMNS", "")
        width = int(asked) if asked.isdigit() and int(asked) else shutil.get_terminal_size((80, 24)).columns
        wanted = bool(os.environ.get("FORCE_COLOR")) or (is_terminal and os.environ.get("TERM") != "dumb")
        return cls(
            width=max(width, 20) if is_terminal or asked else 80,
            color=wanted and not os.environ.get("NO_COLOR"),
            unicode=_speaks_unicode(stream),
            fits=is_terminal or bool(asked),
        )


def show(page: Page, stream: TextIO | None = None) -> None:
    """Write a page to a stream, standard output unless given."""
    stream = sys.stdout if stream is None else stream
    stream.write(lower(page, Screen.of(stream)))
    stream.flush()


def lower(page: Page, screen: Screen) -> str:
    """Return a page as text for a screen; a block that cannot be drawn says so and the next one follows."""
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=screen.width if screen.fits else 10_000,
        color_system="standard" if screen.color else None,
        force_terminal=screen.color,
        no_color=not screen.color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
    for index, block in enumerate(page.blocks):
        if index and isinstance(block, (Heading, Callout)):
            console.print()
        console.print(_lower_safely(block, screen), soft_wrap=not screen.fits)
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    text = "\n".join(lines) + "\n"
    return text if screen.unicode else text.translate(_ASCII).encode("ascii", "replace").decode()


def _line(text: str, style: str = "") -> Line:
    return Line(text.translate(_CONTROL).encode("utf-8", "replace").decode(), style=style)


def _lower_safely(block: object, screen: Screen) -> RenderableType:
    try:
        return _LOWER[type(block)](block, screen)
    except Exception as error:  # noqa: BLE001 - one bad block must not take the page with it
        name = type(block).__name__
        return _line(f"({name} could not be drawn: {type(error).__name__}: {error})", _STYLES["bad"])


def _lower_heading(block: Heading, _: Screen) -> RenderableType:
    return _line(block.text, "bold" if block.level > 1 else "bold cyan")


def _lower_text(block: Text, _: Screen) -> RenderableType:
    return _line(block.text, _STYLES[block.tone])


def _lower_key_values(block: KeyValues, screen: Screen) -> RenderableType:
    keys = max((cell_len(key) for key, _ in block.rows), default=0)
    grid = Grid.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(width=keys, no_wrap=True, style=_STYLES["quiet"])
    room = max(screen.width - keys - 2 * _GAP, 8)
    grid.add_column(overflow="fold", max_width=room if screen.fits else None)
    for key, cell in block.rows:
        text = format_value(cell.value, cell.format or "text")
        grid.add_row(_line(key), _line(text, _STYLES[cell.tone]))
    return Padding(grid, (0, 0, 0, _GAP), expand=False)


def _lower_callout(block: Callout, screen: Screen) -> RenderableType:
    sign, style = _SIGNS[block.severity]
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=1, style=style)
    grid.add_column(overflow="fold", max_width=max(screen.width - 3, 8) if screen.fits else None)
    grid.add_row(sign, _line(block.text, style if block.severity == "error" else ""))
    if block.next_step:
        grid.add_row("", _line(f"next: {block.next_step}", _STYLES["quiet"]))
    return grid


def _lower_curve(block: Curve, screen: Screen) -> RenderableType:
    title = f"{block.title} (log scale)".lstrip() if block.scale == "log" else block.title
    if not block.steps:
        return _line(f"  {title}: no values", _STYLES["quiet"])
    plot = draw(block, width=min(screen.width, 100) - _GAP, unicode=screen.unicode)
    parts: list[RenderableType] = [_line(f"  {title}", "bold")] if title else []
    parts += [Line("  " + line) for line in plot.lines]
    if plot.marks:
        parts.append(Line("  " + plot.marks, style=_STYLES["bad"]))
    parts.append(Line("  " + plot.ruler, style=_STYLES["quiet"]))
    if plot.marks:
        parts.append(Line("  × NaN or infinite", style=_STYLES["quiet"]))
    return Group(*parts)


def _lower_table(block: Table, screen: Screen) -> RenderableType:
    parts: list[RenderableType] = [_line("  " + block.title, "bold")] if block.title else []
    if not block.rows:
        return Group(*parts, Padding(_line(block.empty, _STYLES["quiet"]), (0, 0, 0, _GAP)))
    texts = [
        [_cell_text(cell, column) for cell, column in zip(row, block.columns, strict=True)]
        for row in block.rows
    ]
    widths = fit_columns(block.columns, texts, width=screen.width - _GAP if screen.fits else None)
    titles = [(column.title, "quiet") for column in block.columns]
    cells = [
        zip(line, (cell.tone for cell in row), strict=True)
        for text, row in zip(texts, block.rows, strict=True)
        for line in _break(text, block.columns, widths)
    ]
    parts += [_lay_out(row, block.columns, widths) for row in (titles, *cells)]
    hidden = [column.title for column, width in zip(block.columns, widths, strict=True) if not width]
    notes = [f"not enough width for: {', '.join(hidden)}"] if hidden else []
    notes += [block.note] if block.note else []
    parts += [Padding(_line(note, _STYLES["quiet"]), (0, 0, 0, _GAP)) for note in notes]
    return Group(*parts)


def _break(row: list[str], columns: Sequence[Column], widths: Sequence[int]) -> list[list[str]]:
    """Return the lines of a row: several where a sentence is too long for its column."""
    if not any(column.is_prose for column in columns):
        return [row]
    parts = [
        textwrap.wrap(text, width) if column.is_prose and width else [text]
        for text, column, width in zip(row, columns, widths, strict=True)
    ]
    return [list(line) for line in itertools.zip_longest(*parts, fillvalue="")]


def _lay_out(row: Iterable[tuple[str, str]], columns: Sequence[Column], widths: Sequence[int]) -> Line:
    """Return one line of a table from texts and their tones; a grid of rich's own takes ten times as long."""
    line = Line(no_wrap=True)
    gap = " " * _GAP
    for (text, tone), column, width in zip(row, columns, widths, strict=True):
        if width:
            cell = _line(shorten(text, width), _STYLES[tone])
            padding = " " * (width - cell.cell_len)
            line.append(gap + padding if column.is_number else gap).append_text(cell)
            line.append("" if column.is_number else padding)
    return line


def _cell_text(cell: Cell, column: Column) -> str:
    return format_value(cell.value, cell.format or column.format).replace("\n", " ")


def fit_columns(columns: Sequence[Column], texts: Sequence[Sequence[str]], *, width: int | None) -> list[int]:
    """Return the width of each column, 0 for one left out: flexible ones shrink first, then some go."""
    natural = [
        max(cell_len(column.title), *(cell_len(row[index]) for row in texts), 1)
        for index, column in enumerate(columns)
    ]
    if width is None:
        return natural
    kept = set(range(len(columns)))
    while True:
        least = [
            min(natural[i], columns[i].shortest or _SHORTEST) if columns[i].flexible else natural[i]
            for i in range(len(columns))
        ]
        needed = sum(least[i] for i in kept) + _GAP * (len(kept) - 1)
        droppable = [i for i in kept if columns[i].drop]
        if needed <= width or not droppable:
            break
        kept.remove(max(droppable, key=lambda i: columns[i].drop))
    return _spread(columns, natural, least, kept=kept, spare=width - needed)


def _spread(
    columns: Sequence[Column], natural: list[int], least: list[int], *, kept: Iterable[int], spare: int
) -> list[int]:
    widths = [least[i] if i in kept else 0 for i in range(len(columns))]
    if spare < 0:
        # Even the columns that must stay are too wide: the widest of them gives way.
        widest = max(range(len(widths)), key=widths.__getitem__)
        widths[widest] = max(widths[widest] + spare, 4)
        return widths
    for i in range(len(columns)):
        if widths[i] and columns[i].flexible:
            more = min(natural[i] - widths[i], spare)
            widths[i] += more
            spare -= more
    return widths


def shorten(text: str, width: int) -> str:
    """Return the text in ``width`` cells; a long one loses its middle: both ends tell names apart."""
    if cell_len(text) <= width:
        return text
    if width < 5:
        return set_cell_size(text, width)
    head = (width - 1) // 2
    tail = width - 1 - head
    return set_cell_size(text, head) + "…" + text[-tail:]


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def _speaks_unicode(stream: TextIO) -> bool:
    try:
        "…µ✗×⠿┤".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


_LOWER: Final[dict[type, Callable[[Any, Screen], RenderableType]]] = {
    Heading: _lower_heading,
    Text: _lower_text,
    KeyValues: _lower_key_values,
    Table: _lower_table,
    Curve: _lower_curve,
    Callout: _lower_callout,
}
