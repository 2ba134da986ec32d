"""Long lines folded to a terminal's width: what clew says while a script runs stays readable at 80 columns."""

from __future__ import annotations

import os
import re
import textwrap
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import TextIO

_NARROWEST: Final = 40
_HEAD: Final = re.compile(r"(?:clew: )?\s*")


def fold_for(stream: TextIO, text: str) -> str:
    """Return the text for a stream: folded for a terminal, line by line as it is for a pipe, where programs search."""
    width = find_width(stream)
    return text if width is None else fold(text, width)


def find_width(stream: TextIO) -> int | None:
    """Return how many columns a stream's terminal has, 80 where it does not say, None where there is no terminal."""
    try:
        if not stream.isatty():
            return None
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80
    except (ValueError, AttributeError):
        return None


def fold(text: str, width: int) -> str:
    """Return the text with lines of at most ``width`` columns; what follows stands below the words it belongs to.

    Paths and other long words are never broken.
    """
    width = max(width, _NARROWEST)
    return "\n".join(_fold_line(line, width) for line in text.split("\n"))


def _fold_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    head = _HEAD.match(line)
    start = head.group() if head is not None else ""
    pieces = textwrap.wrap(
        line[len(start) :],
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(pieces)
