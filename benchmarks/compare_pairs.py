"""Pairs of trainings that differ in one known way, read from ``pairs/pairs.toml``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCRIPTS = Path(__file__).parent / "pairs"


@dataclass(frozen=True, slots=True)
class Pair:
    """A script, the texts replaced in it, and the expected steps, sites and cause; no cause: the runs are the same."""

    name: str
    script: str
    edits: tuple[tuple[str, str], ...] = ()
    steps: frozenset[int] = frozenset()
    sites: frozenset[str] = frozenset()
    cause: str = ""


def read_pairs(name: str = "pairs") -> list[Pair]:
    """Return the pairs of a list, those that are the same last."""
    table = tomllib.loads((SCRIPTS / f"{name}.toml").read_text(encoding="utf-8"))
    return [
        Pair(
            row["name"],
            row["script"],
            tuple((old, new) for old, new in row.get("edits", ())),
            frozenset(row.get("steps", ())),
            frozenset(row.get("sites", ())),
            row.get("cause", ""),
        )
        for row in table["pair"]
    ]


def edit(text: str, pair: Pair) -> str:
    """Return a script with the texts of a pair replaced; one that is not there is an error of the pair."""
    for old, new in pair.edits:
        if old not in text:
            raise ValueError(f"{pair.name}: {pair.script} has no {old!r}")
        text = text.replace(old, new)
    return text
