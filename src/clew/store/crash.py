"""The stacks that a crash or a hang left in a run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_MOST_BYTES: Final = 200_000
_WAITING: Final = r"/clew/(?:api/control|store/writer|capture/crash|capture/crash_family)\.py"
_OWN: Final = re.compile(
    rf"^Thread .*\n(?:  File .*\n)*  File \".*{_WAITING}\".*(?:\n  File .*)*\n*", re.MULTILINE
)
"""A thread of clew's own, which waits for something and says nothing about the training."""
_FRAME: Final = re.compile(r'^  File ".*/clew/(?:api|cli|capture|replay)/[\w/]+\.py".*\n?', re.MULTILINE)
"""A frame of clew's own around the user's."""
_NO_NATIVE: Final = "native stacks of a crash: none"
"""How a file begins where native stacks cannot be had, whether there was a crash or not."""


def read_crash(rank_folder: Path) -> str:
    """Return the text of a rank's crash file without clew's own threads and frames, nothing where there is none."""
    try:
        with (rank_folder / "crash.txt").open("rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    text = _FRAME.sub("", _OWN.sub("", text)).strip()
    return "" if text.startswith(_NO_NATIVE) and "\n" not in text else text
