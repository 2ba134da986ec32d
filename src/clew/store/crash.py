"""The stacks that a crash or a hang left in a run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_MOST_BYTES: Final = 200_000
_OURS: Final = r"/clew/(?:api/control|store/writer|capture/crash|capture/crash_family)\.py"
_OWN: Final = re.compile(
    rf"^Thread .*\n(?:  File .*\n)*  File \".*{_OURS}\".*(?:\n  File .*)*\n*", re.MULTILINE
)
"""A thread of clew's own, which waits for something and says nothing about the training."""


def read_crash(rank_folder: Path) -> str:
    """Return the text of a rank's crash file without clew's own threads, nothing where there is none."""
    try:
        with (rank_folder / "crash.txt").open("rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    return _OWN.sub("", text).strip()
