"""The stacks that a crash or a hang left in a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_MOST_BYTES: Final = 200_000


def read_crash(rank_folder: Path) -> str:
    """Return the text of a rank's crash file, nothing where there is none."""
    try:
        with (rank_folder / "crash.txt").open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", errors="replace").strip()
    except OSError:
        return ""
