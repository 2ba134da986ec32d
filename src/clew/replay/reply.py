"""What a debugger answers: plain data, for a view to draw or for JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. ``kind`` says what ``data`` holds; ``resume`` is how the program goes on, empty to stay."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    resume: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the reply as plain data."""
        return {"kind": self.kind, **self.data, **({"resume": self.resume} if self.resume else {})}


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a program stands: a title, the source lines around it (innermost first) and what there is to see.

    ``shown`` are the values told at once, by name; ``names`` those of each line, for expressions; ``extra`` are added
    to every line's: ``out``, ``args``, ``module`` …
    """

    title: str
    site: str = ""
    phase: str = ""
    lines: tuple[Any, ...] = ()
    names: tuple[dict[str, Any], ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    shown: tuple[tuple[str, Any], ...] = ()
    modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
