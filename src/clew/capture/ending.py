"""Ends of the process that pass Python by: a signal that nobody handles, ``os._exit``, another program in its place.

Each is as it would have been, exit status included, after the recordings that are still going on have been saved.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Final

from clew.capture.torch.patches import Patches

if TYPE_CHECKING:
    from collections.abc import Callable

SIGNALS: Final = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGALRM", "SIGUSR2")
    if hasattr(signal, name)
)
_SAVE_SECONDS: Final = 5.0

_living: list[Ending] = []
_patches = Patches()


class Ending:
    """Has one recording saved when the process ends, until ``stop``.

    ``save`` writes what there is, given what ends the process, from any thread; it returns what takes that back,
    should the process go on after all. ``leave`` does all that is done at the end of a script, given its exit code.
    ``tell`` says what ends the process to the person who trains.
    """

    def __init__(
        self,
        save: Callable[[str], Callable[[], None]],
        leave: Callable[[str, int], None],
        *,
        tell: Callable[[str], None],
    ) -> None:
        self.save = save
        self.leave = leave
        self.tell = tell
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process of the recording, not a forked copy of it."""
        return os.getpid() == self._pid

    def start(self) -> None:
        """Begin to wait for the end."""
        if not any(each.is_here for each in _living):
            _living.clear()
            _take_over()
        _living.append(self)

    def stop(self) -> None:
        """Leave everything as it was found."""
        if self not in _living or not self.is_here:
            return
        _living.remove(self)
        if not _living:
            _patches.undo()
            native = _load_native()
            if native is not None:
                native.disarm()


def _take_over() -> None:
    _patches.undo()
    for name in ("execv", "execve"):
        if hasattr(os, name):
            _patches.replace(os, name, _make_exec)
    _patches.replace(os, "_exit", _make_exit)
    native = _load_native()
    if native is not None:
        # One that Python knows a handler of, or that is ignored, is the script's.
        native.arm(_save_all, [each for each in SIGNALS if signal.getsignal(each) is signal.SIG_DFL])


def _save_all(number: int) -> None:
    _save(signal.Signals(number).name)


def _save(end: str) -> None:
    for each in _present():
        each.save(end)
        each.tell(end)


def _present() -> list[Ending]:
    return [each for each in reversed(_living) if each.is_here]


def _make_exec(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute(*args: Any, **kwargs: Any) -> Any:
        take_back: list[Callable[[], None]] = []
        end = f"os.{original.__name__}"

        def save() -> None:
            take_back.extend([each.save(end) for each in _present()])
            if args and _can_be_executed(args[0]):
                for each in _present():
                    each.tell(end)

        _in_time(save)
        try:
            return original(*args, **kwargs)
        finally:  # it could not be done, or this line would not be reached
            for action in take_back:
                action()

    return execute


def _can_be_executed(path: Any) -> bool:
    """Return whether another program is likely to take the place of this one: a search tries many paths in vain."""
    try:
        return os.access(path, os.X_OK)
    except (TypeError, ValueError):
        return isinstance(path, int)  # an open file


def _make_exit(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(*args: Any, **kwargs: Any) -> Any:
        codes = [*args, *kwargs.values()]
        if len(codes) == 1 and isinstance(codes[0], int):
            _leave(codes[0])
        return original(*args, **kwargs)

    return leave


def _leave(code: int) -> None:
    end = f"os._exit({code})"
    if threading.current_thread() is not threading.main_thread():
        _in_time(lambda: _save(end))
        return
    for each in _present():
        _quietly(functools.partial(each.leave, end, code))


def _in_time(action: Callable[[], object]) -> None:
    """Do something, and wait for it no longer than the script would bear: somebody may stand in its way."""
    if not _present():
        return
    thread = threading.Thread(target=_quietly, args=(action,), name="clew-save", daemon=True)
    thread.start()
    thread.join(_SAVE_SECONDS)


def _quietly(action: Callable[[], object]) -> None:
    # The process is about to end, which no fault of ours may change.
    with contextlib.suppress(Exception):
        action()


def _load_native() -> Any:
    try:
        from clew.capture import _ending
    except ImportError:
        return None
    return _ending if hasattr(_ending, "arm") else None
