"""The recording that is going on, for whatever in the user's code wants to write into it."""

from __future__ import annotations

import os
import threading
from typing import Any, Final, Protocol


class Session(Protocol):
    """What a recording offers to the taps in the user's code. Nothing here may raise into training."""

    @property
    def step(self) -> int:
        """The step that is going on, counted from 0."""

    def log(self, **numbers: float) -> None:
        """Take numbers of this step, by name."""

    def note(self, kind: str, data: dict[str, Any]) -> None:
        """Take something that happened, as data that fits JSON: a failed check, a histogram."""

    def add_media(self, name: str, data: bytes, suffix: str) -> None:
        """Take a picture or another file of this step; the suffix, such as ``.png``, says what it is."""


_sessions: Final[list[tuple[int, Session]]] = []
_lock: Final = threading.Lock()


def push(session: Session) -> None:
    """Make a recording the active one, for this thread and for threads that have none of their own."""
    with _lock:
        _sessions.append((threading.get_ident(), session))


def pop(session: Session) -> None:
    """End a recording; the one before it becomes active again. One that is not known is ignored."""
    with _lock:
        for position in reversed(range(len(_sessions))):
            if _sessions[position][1] is session:
                del _sessions[position]
                return


def active() -> Session | None:
    """Return the newest recording of this thread, else of any: autograd has threads of its own."""
    entries = tuple(_sessions)
    if not entries:
        return None
    thread = threading.get_ident()
    own = (session for owner, session in reversed(entries) if owner == thread)
    return next(own, entries[-1][1])


if hasattr(os, "register_at_fork"):
    # A forked child (a loader's worker) shares the files of the recording but must not write into them.
    os.register_at_fork(after_in_child=_sessions.clear)
