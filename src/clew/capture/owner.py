"""Which thread is recorded: the first that trains. What other threads do at the same time passes by untouched.

One step is one step of one loop, and autograd writes gradients without the interpreter's lock: reading those of a model
that another thread trains would be a race.
"""

from __future__ import annotations

import threading
from threading import get_ident
from typing import TYPE_CHECKING

from clew.capture.beat import Holder

if TYPE_CHECKING:
    from collections.abc import Callable


class Owner(Holder):
    """The thread whose training is recorded. Until one has trained, everybody may call models."""

    def __init__(self, on_shared: Callable[[], None]) -> None:
        self.thread = 0
        """The identity of the thread that trains, 0 while nobody does."""
        self.is_shared = False
        """Whether another thread was seen training at the same time."""
        self.has_rivals = False
        """Whether a model was called for training in another thread: then that one does not come next either."""
        self.on_claimed: Callable[[], None] = lambda: None
        """Called in a thread that has just become the one that is recorded."""
        self._on_shared = on_shared
        self._lock = threading.Lock()

    def is_here(self) -> bool:
        """Return whether the present thread is recorded; one of autograd's own works for whoever has called it."""
        thread = self.thread
        if not thread or get_ident() == thread or _is_without_name():
            return True
        if thread in threading._active or self.has_rivals:  # type: ignore[attr-defined]
            return False
        self.thread = 0  # it has ended: whoever trains next is the next
        return True

    def claim(self) -> bool:
        """The present thread trains: return whether it is the one that is recorded."""
        if self.is_here() and self.thread:
            return True
        with self._lock:
            is_first = not self.thread
            if is_first:
                self.thread = get_ident()
        if is_first:
            self.on_claimed()
        elif not self.is_here():
            self._share()
            return False
        return True

    def hand_to_me(self) -> None:
        """Record the present thread from now on: it goes on with what the other has left."""
        self.thread = get_ident()

    def _share(self) -> None:
        if not self.is_shared:
            self.is_shared = self.has_rivals = True
            self._on_shared()


def _is_without_name() -> bool:
    """Return whether the present thread was not started from Python."""
    known = threading._active.get(get_ident())  # type: ignore[attr-defined]
    return known is None or isinstance(known, threading._DummyThread)
