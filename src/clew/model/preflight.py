"""What a rehearsal before a long run found: one result for each check, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

STATUSES: Final = ("ok", "warning", "failed", "not checked")


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. ``text`` says what was seen, or why nothing could be; ``hint`` what to change."""

    name: str
    status: str
    text: str
    hint: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Preflight:
    """All results in order, how the steps were executed, and what the script had written before it was stopped."""

    checks: tuple[Check, ...]
    seconds: float = 0.0
    way: str = ""
    written: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Check:
        """Return the result of a check by its name."""
        return next(check for check in self.checks if check.name == name)

    @property
    def is_ready(self) -> bool:
        """Whether no check failed."""
        return not self.named("failed")

    @property
    def exit_code(self) -> int:
        """What a shell is told: 0 when nothing failed, 2 otherwise."""
        return 0 if self.is_ready else 2

    def named(self, status: str) -> list[str]:
        """Return the names of the checks with a status."""
        return [check.name for check in self.checks if check.status == status]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "ready": self.is_ready,
            "seconds": self.seconds,
            "way": self.way,
            "written": list(self.written),
            "checks": [check.to_json() for check in self.checks],
        }
