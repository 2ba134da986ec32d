"""A line of a program as a person would type it from where they stand."""

from __future__ import annotations

from pathlib import Path


def from_here(source: str) -> str:
    """Return ``src/train.py:41`` for a file under the working directory, and the whole path for any other.

    The line may be left out.
    """
    try:
        return str(Path(source).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return source
