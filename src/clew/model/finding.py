"""What the doctor says: one cause, with the numbers it was made from and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

SEVERITIES: Final = ("info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """A named fault. ``id`` and ``rule`` are those of the catalogue (``L01``, ``softmax-before-cross-entropy``).

    ``evidence`` holds the numbers, by name; ``source`` the user's line as ``file:line``; ``explains`` the findings
    that are only its consequences. ``step`` is where it began.
    """

    id: str
    rule: str
    severity: str
    step: int
    title: str
    site: str = ""
    rank: int = 0
    evidence: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    hint: str = ""
    explains: tuple[Finding, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A rule that could not judge this run, and why."""

    id: str
    why: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict on a run: findings with the root cause first, what was checked, and what could not be."""

    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain data."""
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "checked": list(self.checked),
            "not_checked": [asdict(one) for one in self.not_checked],
        }
