"""How rules about the loop speak of lines and names of the user's program."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def place(source: str) -> str:
    """Return ``train.py:14`` for a line with its whole path."""
    return source.replace("\\", "/").rpartition("/")[2]


def said_at(source: str) -> str:
    """Return `` at train.py:14``, or nothing where the line is not known."""
    return f" at {place(source)}" if source else ""


def list_some(names: Sequence[str], count: int) -> str:
    """Return the first few names and how many more there are."""
    more = count - len(names[:3])
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def call_site(name: str) -> str:
    """Return a site as one speaks of it: ``layer 1`` where the name is a number alone."""
    return f"layer {name}" if name.replace(".", "").isdigit() else name
