"""The card of the exception that ended a rank, as a JSON file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from clew.store.manifest import write_atomic

if TYPE_CHECKING:
    from pathlib import Path

FILE: Final = "exception.json"
_WORDS: Final = ("error", "message")


def write_exception(rank_folder: Path, card: dict[str, Any]) -> None:
    """Keep the card of an exception."""
    # Python reads back what it writes here: NaN and Infinity are values of the user's.
    write_atomic(rank_folder / FILE, json.dumps(card, default=str))


def read_exception(rank_folder: Path) -> dict[str, Any] | None:
    """Return the card of the exception that ended a rank, None where there was none or the file is no card."""
    try:
        card = json.loads((rank_folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(card, dict):
        return None
    is_card = isinstance(card.get("step"), int) and all(isinstance(card.get(word), str) for word in _WORDS)
    return card if is_card else None
