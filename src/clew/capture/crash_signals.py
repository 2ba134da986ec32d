"""What a fatal signal leaves: Python's stacks from faulthandler, then native ones of all threads, and the same end.

Handlers of the script's own, from Python or from a library, are left alone, whether they were there before or come
later. A process that is forked inherits all of this, with the file.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

FATAL: Final = tuple(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT")
    if hasattr(signal, name)
)
_PYTHON: Final = "python"
_TORCH_WORKER: Final = "libtorch_python"
"""The loader's workers have handlers of torch's, which say what happened on standard error and pass the signal on."""

_enable = faulthandler.enable
_active: FatalSignals | None = None


class FatalSignals:
    """Has fatal signals write stacks into an open file, until ``stop``."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_ours = False
        self._native = _load_native()

    @property
    def is_active(self) -> bool:
        """Whether fatal signals are this one's business; those of a recording inside another are the other's."""
        return _active is self

    def start(self) -> None:
        """Begin: native stacks below Python's, or above those of a faulthandler that is the script's own."""
        global _active
        if _active is not None:
            return
        _active = self
        is_theirs = faulthandler.is_enabled()
        for number in FATAL if self._native is not None else ():
            owner = self._native.owner(number)
            is_faulthandler = owner == _PYTHON and is_theirs and not callable(signal.getsignal(number))
            if not owner or is_faulthandler or _TORCH_WORKER in owner:
                self._native.arm(number, self._file.fileno())
        if self._native is None and not os.fstat(self._file.fileno()).st_size:
            # Once: a process that loads data would seem to have been asked for its stacks.
            os.write(self._file.fileno(), f"{_say_why_not()}\n".encode())
        if not is_theirs:
            self._call("enable", lambda: _enable(self._file, all_threads=True))
            self._is_ours = True

    def give_way(self) -> None:
        """The script has switched faulthandler on itself: from now on it is the script's."""
        self._is_ours = False

    def stop(self) -> None:
        """Leave everything as it was found, and what the script has changed meanwhile as it is."""
        global _active
        if not self.is_active:
            return
        _active = None
        if self._is_ours:
            self._call("disable", faulthandler.disable)
            self._is_ours = False
        if self._native is not None:
            self._native.disarm()

    def _call(self, name: str, function: Callable[[], object]) -> None:
        if self._native is not None:
            getattr(self._native, name)(function)
        else:
            function()


def renew() -> bool:
    """In a forked process whose handlers were replaced: begin again above them. Return whether there was a watch."""
    if _active is None:
        return False
    watch = _active
    watch.stop()
    watch.start()
    return True


def leave_none() -> None:
    """In a forked copy that is none of the training: its crash is not the training's."""
    if _active is not None:
        _active.stop()
    faulthandler.disable()


def _load_native() -> Any:
    try:
        from clew.capture import _stacks
    except ImportError:
        return None
    return _stacks if hasattr(_stacks, "arm") else None


def _say_why_not() -> str:
    """Return why there are no native stacks."""
    try:
        import clew.capture._stacks  # noqa: F401 - whether it can be
    except ImportError:
        why = "clew was installed without its compiled part"
    else:
        why = "this system's C library cannot show them"
    return f"native stacks of a crash: none, for {why}"
