"""Notes and media of a run: events as JSON lines, files by step; nothing here may stop a training."""

from __future__ import annotations

import json
import os
import re
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

NOTES: Final = "notes.jsonl"
MEDIA: Final = "media"
MOST_BYTES: Final = 256 << 20
"""Notes and media together; enough for thousands of pictures, not for a forgotten loop over a data set."""

_UNSAFE = re.compile(r"[^\w.+=@-]+")


class NoteFile:
    """Appends to the notes of one rank; a forked copy of the process writes nothing."""

    def __init__(self, rank_folder: Path, *, quota_bytes: int | None = None) -> None:
        self._folder = rank_folder
        self._most = MOST_BYTES if quota_bytes is None else min(MOST_BYTES, quota_bytes // 4)
        self._pid = os.getpid()
        self._bytes = 0
        self._lock = threading.Lock()
        self.problem = ""

    def stop(self, reason: str) -> None:
        """Write nothing more."""
        self.problem = self.problem or reason

    def add_note(self, step: int, kind: str, data: dict[str, Any]) -> None:
        """Append something that happened in a step."""
        self.add_notes([{"step": step, "kind": kind, **data}])

    def add_notes(self, notes: Iterable[dict[str, Any]]) -> None:
        """Append several notes at once, each with its step and kind."""
        text = "".join(json.dumps(note, default=str) + "\n" for note in notes)
        with self._lock:
            if text and self._may_write(len(text)):
                self._try(lambda: self._append(text))

    def add_media(self, step: int, name: str, data: bytes, suffix: str) -> None:
        """Write a file of a step, and a note that tells of it."""
        safe = _UNSAFE.sub("-", name).strip("-.") or "media"
        relative = f"{MEDIA}/{safe}-{step:08d}{suffix}"
        with self._lock:
            if not self._may_write(len(data)) or not self._try(lambda: self._write(relative, data)):
                return
        self.add_note(step, "media", {"name": name, "file": relative, "bytes": len(data)})

    def _may_write(self, size: int) -> bool:
        if os.getpid() != self._pid or self.problem:
            return False
        self._bytes += size
        if self._bytes > self._most:
            self.problem = f"notes and media reached {self._most:,} bytes; later ones are not kept"
            return False
        return True

    def _append(self, text: str) -> None:
        with (self._folder / NOTES).open("a", encoding="utf-8") as file:
            file.write(text)

    def _write(self, relative: str, data: bytes) -> None:
        path = self._folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(path.suffix + ".part")
        temporary.write_bytes(data)
        temporary.replace(path)

    def _try(self, action: Any) -> bool:
        try:
            action()
        except OSError as error:
            self.problem = f"notes cannot be written: {error}"
            return False
        return True


def read_notes(rank_folder: Path) -> list[dict[str, Any]]:
    """Return the notes of a rank in order; a torn or foreign line is left out."""
    path = rank_folder / NOTES
    if not path.is_file():
        return []
    notes = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            note = json.loads(line)
        except ValueError:
            continue
        if isinstance(note, dict) and isinstance(note.get("step"), int):
            notes.append(note)
    return notes
