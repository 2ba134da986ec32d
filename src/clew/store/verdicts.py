"""Verdicts of a run: one JSON file per explained step, written whole or not at all."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from clew.store.manifest import write_atomic

if TYPE_CHECKING:
    from pathlib import Path

FOLDER: Final = "why"
_NAME: Final = re.compile(r"step-(\d+)\.json")


def write_verdict(rank_folder: Path, verdict: dict[str, Any]) -> None:
    """Keep the verdict on a step; a later one on the same step takes its place."""
    folder = rank_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    # Python reads back what it writes here: NaN and Infinity are part of the evidence.
    write_atomic(folder / f"step-{int(verdict['step']):08d}.json", json.dumps(verdict, default=str))


def read_verdicts(rank_folder: Path) -> list[dict[str, Any]]:
    """Return the verdicts of a rank by step; a file that is no verdict is left out."""
    folder = rank_folder / FOLDER
    if not folder.is_dir():
        return []
    found = []
    for path in sorted(folder.iterdir()):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            verdict = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(verdict, dict) and isinstance(verdict.get("step"), int) and "found" in verdict:
            found.append(verdict)
    return found
