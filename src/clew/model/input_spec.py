"""An input that somebody asked for in words: random numbers of a shape, a plain value, an array of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of a model. ``kind`` is ``tensor``, ``value`` or ``file``; without a name it is positional."""

    name: str = ""
    kind: str = "tensor"
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    low: float | None = None
    high: float | None = None
    value: Any = None
