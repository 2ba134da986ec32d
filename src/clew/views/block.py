"""The display language: what to show, as plain data. Renderers decide how it looks on their medium.

Values stay raw (a share is 0.031, a size is in bytes) and carry the name of their format, so that a page of
JSON holds numbers and a terminal shows text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

TONES: Final = ("plain", "good", "quiet", "warn", "bad")
"""How a value feels: renderers turn it into a colour, never into a word of its own."""

SEVERITIES: Final = ("note", "warning", "error")


@dataclass(frozen=True, slots=True)
class Cell:
    """A value with a tone, and a format of its own where it differs from its column's."""

    value: object
    tone: str = "plain"
    format: str = ""


@dataclass(frozen=True, slots=True)
class Heading:
    """The title of what follows; level 1 is the page, level 2 a part of it."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str
    tone: str = "plain"


@dataclass(frozen=True, slots=True)
class KeyValues:
    """Named values, one per line."""

    rows: tuple[tuple[str, Cell], ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    ``format`` is a key of ``views.number.FORMATS``, ``text`` or ``time``. ``drop`` orders the columns that a
    narrow medium may leave out, highest first; 0 always stays. A ``flexible`` column may be shortened, to no less than
    ``shortest`` characters (0: as the medium likes) while there are columns to leave out. ``is_prose``: sentences,
    which go on in the next line instead of losing their middle.
    """

    key: str
    title: str
    format: str = "text"
    drop: int = 0
    flexible: bool = False
    shortest: int = 0
    is_prose: bool = False

    @property
    def is_number(self) -> bool:
        """Whether the values line up on the right."""
        return self.format not in ("text", "time")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under columns; ``empty`` is said instead when there are none, ``note`` below the rows."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    empty: str = "nothing to show"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line over steps, thinned to buckets: the first step of each, lowest, mean and highest finite value.

    A bucket without finite values holds None. ``nonfinite`` lists the steps whose buckets held NaN or inf.
    """

    title: str
    steps: tuple[int, ...]
    low: tuple[float | None, ...]
    mean: tuple[float | None, ...]
    high: tuple[float | None, ...]
    nonfinite: tuple[int, ...] = ()
    scale: str = "linear"
    format: str = "number"
    last_step: int = 0


@dataclass(frozen=True, slots=True)
class Callout:
    """Something the reader must not miss, with the next step."""

    severity: str
    text: str
    next_step: str = ""


Block: TypeAlias = Heading | Text | KeyValues | Table | Curve | Callout


@dataclass(frozen=True, slots=True)
class Page:
    """What one command or one address shows."""

    title: str
    blocks: tuple[Block, ...]
