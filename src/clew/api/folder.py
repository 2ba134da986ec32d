"""Which folder a new run gets; ranks that train together share one without talking to each other."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import time
from pathlib import Path
from typing import Final

from clew.capture.provenance import read_rank
from clew.store.layout import claim_folder, rank_folder

_WAIT_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.05
_FRESH_SECONDS: Final = 300.0


def choose_folder(out: str, name: str | None, title: str) -> Path:
    """Create the folder of a run, or find the one that rank 0 of the same launch has created."""
    root = Path(out)
    label = name or f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{title}"
    meeting = _meeting_point(root)
    if meeting is None:
        return claim_folder(root, label)
    if read_rank() == 0:
        folder = claim_folder(root, label)
        _announce(meeting, folder)
        return folder
    return _await(meeting) or claim_folder(root, f"{label}-rank{read_rank()}")


def give_back(folder: Path) -> None:
    """Remove a folder that was created and never used."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def close_meeting(folder: Path) -> None:
    """Take rank 0's announcement of a run away, now that the run is over."""
    meeting = _meeting_point(folder.parent)
    if meeting is not None and read_rank() == 0:
        with contextlib.suppress(OSError):
            meeting.unlink(missing_ok=True)


def _meeting_point(root: Path) -> Path | None:
    """Return the file that names the run of this launch, known to all its ranks from the environment."""
    if int(os.environ.get("WORLD_SIZE") or 1) <= 1 or "RANK" not in os.environ:
        return None
    words = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
    key = "|".join(os.environ.get(word, "") for word in words)
    return root / f".launch-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _announce(meeting: Path, folder: Path) -> None:
    temporary = meeting.with_name(f"{meeting.name}.{os.getpid()}")
    temporary.write_text(folder.name, encoding="utf-8")
    temporary.replace(meeting)


def _await(meeting: Path) -> Path | None:
    """Wait for rank 0's word; an old one, left by an earlier launch on the same port, does not count."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            folder = meeting.parent / meeting.read_text(encoding="utf-8")
            fresh = time.time() - meeting.stat().st_mtime < _FRESH_SECONDS
            if fresh and folder.is_dir() and not rank_folder(folder, read_rank()).exists():
                return folder
        time.sleep(_LOOK_SECONDS)
    return None
