"""A debugger over the whole screen: source, operations and values, with the prompt below."""

from __future__ import annotations

import linecache
import os
import random
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from clew.render.terminal import Screen, lower, shorten
from clew.views.debug_page import make_page

# On import rich draws a number from Python's generator, which is the user's: a look must not shift it.
_drawn_before = random.getstate()
try:
    from rich.console import Console
    from rich.layout import Layout
    from rich.panel import Panel
    from rich.text import Text
finally:
    random.setstate(_drawn_before)

if TYPE_CHECKING:
    from clew.render.prompt import Debugger, Front
    from clew.replay.reply import Reply

_CLEAR: Final = "\x1b[2J\x1b[H"
_LEAST_HEIGHT: Final = 12
_LEAST_SOURCE: Final = 5


class FullScreen:
    """Draws the whole view before each line is read; lines come from the front it is given."""

    def __init__(self, debugger: Debugger, front: Front) -> None:
        self._debugger = debugger
        self._front = front
        self._last: list[str] = []
        self._place: dict[str, Any] = {}
        self._verdict = ""

    def read(self) -> str | None:
        """Draw where the program stands, then ask for a line."""
        sys.stdout.write(_CLEAR + self.draw(*shutil.get_terminal_size()))
        sys.stdout.flush()
        return self._front.read()

    def show(self, reply: Reply) -> None:
        """Keep a reply for the next drawing."""
        data = reply.to_json()
        if data["kind"] == "exactness":
            self._verdict = f"replay: {data['replay']}"
        if data["kind"] == "place":
            self._place = data
            self._last = []
            return
        page = make_page(data)
        width = shutil.get_terminal_size().columns
        text = lower(page, Screen(width=width - 4, color=False, unicode=True)) if page.blocks else ""
        self._last = text.splitlines()

    def draw(self, width: int, height: int) -> str:
        """Return the view for a screen of this size, the last line left free for the prompt."""
        rows = height - 2
        if rows < _LEAST_HEIGHT:
            return self._draw_small(width, rows)
        # A long answer pushes the source up, as far as five lines of it.
        upper = max(min(rows // 2, rows - 2 - len(self._lines(width - 4))), _LEAST_SOURCE)
        layout = Layout()
        layout.split_column(Layout(name="top", size=upper), Layout(name="bottom"))
        layout["top"].split_row(Layout(name="source", ratio=3), Layout(name="queue", ratio=2))
        layout["source"].update(self._draw_source(upper - 2, width * 3 // 5 - 4))
        layout["queue"].update(self._draw_queue(upper - 2, width * 2 // 5 - 4))
        layout["bottom"].update(self._draw_values(rows - upper - 2, width - 4))
        console = Console(
            width=width,
            height=rows,
            force_terminal=True,
            color_system=None if os.environ.get("NO_COLOR") else "standard",
            highlight=False,
            _environ={},
        )
        with console.capture() as captured:
            console.print(layout)
        return captured.get()

    def _draw_small(self, width: int, rows: int) -> str:
        """Return the view for a screen without room for panels: the place and what there is to see."""
        place = self._place.get("line") or {"file": "", "line": 0, "text": ""}
        head = [self._place.get("title", ""), f"{Path(place['file']).name}:{place['line']} {place['text']}"]
        lines = [shorten(line, width) for line in head[: 2 if place["file"] else 1]]
        return "\n".join([*lines, *_cut(self._lines(width), max(rows - len(lines), 1))]) + "\n"

    def _draw_source(self, height: int, width: int) -> Panel:
        line = self._place.get("line") or {"file": "", "line": 0}
        number = int(line["line"])
        first = max(number - height // 2, 1)
        text = Text(no_wrap=True)
        for each in range(first, first + height):
            source = linecache.getline(line["file"], each).rstrip("\n") if line["file"] else ""
            mark = ">" if each == number else " "
            text.append(f"{mark}{each:>4} {source}"[:width] + "\n", "bold yellow" if each == number else "")
        return Panel(text, title=Text(Path(line["file"]).name or "no source"))

    def _draw_queue(self, height: int, width: int) -> Panel:
        operations = self._debugger.execute(f"queue {max(height - 1, 1)}").to_json().get("operations", [])
        text = Text(no_wrap=True)
        for each in operations[:height]:
            mark = ">" if each["here"] else " "
            line = shorten(f"{mark}{each['index']:>5} {each['op']} {each['site']}", width)
            text.append(line + "\n", "bold red" if each["bad"] else "bold" if each["here"] else "")
        return Panel(text, title=Text("operations"))

    def _draw_values(self, height: int, width: int) -> Panel:
        text = Text("\n".join(_cut(self._lines(width), height)), no_wrap=True)
        return Panel(text, title=Text(self._place.get("title", "")), subtitle=Text(self._verdict))

    def _lines(self, width: int) -> list[str]:
        """Return what is told below: the last answer, or the values of the place."""
        if self._last or not self._place:
            return self._last
        page = make_page({**self._place, "title": "", "line": {"file": "", "line": 0, "text": ""}})
        drawn = lower(page, Screen(width=width, color=False, unicode=True)).splitlines()
        return [line for line in drawn if line.strip()]


def can_draw(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can be erased."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "", None)


def _cut(lines: list[str], height: int) -> list[str]:
    """Return as many lines as there is room for, and say how many there would be more."""
    if len(lines) <= height:
        return lines
    return [*lines[: height - 1], f"… {len(lines) - height + 1} more lines"]
