"""Findings of a run as JSON lines: appended as they come up, replaced by the final word when the run ends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from clew.store.manifest import write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FINDINGS: Final = "findings.jsonl"


def append_findings(rank_folder: Path, findings: Iterable[dict[str, Any]]) -> None:
    """Add findings to those of a rank."""
    with (rank_folder / FINDINGS).open("a", encoding="utf-8") as file:
        file.writelines(_line(finding) for finding in findings)


def write_findings(rank_folder: Path, findings: Iterable[dict[str, Any]]) -> None:
    """Replace the findings of a rank, all at once or not at all."""
    write_atomic(rank_folder / FINDINGS, "".join(_line(finding) for finding in findings))


def read_findings(rank_folder: Path) -> list[dict[str, Any]]:
    """Return the findings of a rank; a torn or foreign line is left out."""
    path = rank_folder / FINDINGS
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            finding = json.loads(line)
        except ValueError:
            continue
        if isinstance(finding, dict) and "id" in finding:
            found.append(finding)
    return found


def _line(finding: dict[str, Any]) -> str:
    return json.dumps(finding, default=str) + "\n"
