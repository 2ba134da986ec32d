"""What can be said of one tensor or array at a glance, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """Form, place and numbers of a value.

    ``stats`` are those of ``STAT_NAMES``, None where the elements cannot be read (``note`` says why, or which
    elements were read). ``entries`` are all elements of a small value in row-major order. ``grad`` is the
    function that made it, ``leaf`` for one that collects a gradient, or empty.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    device: str = ""
    stats: dict[str, float] | None = None
    entries: tuple[Any, ...] | None = None
    grad: str = ""
    note: str = ""
