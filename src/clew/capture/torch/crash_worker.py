"""Stacks of the processes that load data: of those that are forked, and of those that Python starts anew.

Those started anew know nothing of clew, and torch replaces handlers of fatal signals in all of them. So they are
entered through a function of clew's, which goes on with torch's own.
"""

from __future__ import annotations

import faulthandler
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data._utils import signal_handling, worker

from clew.capture.crash_signals import FatalSignals, renew
from clew.capture.torch.patches import Patches

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.crash import CrashWatch

_original: Callable[..., None] | None = None
_kept: list[object] = []
"""What has to live as long as the process of a worker: the file, and who writes to it."""


class WorkerStacks:
    """Has the workers of every loader write their stacks into the file of a watch, until ``stop``."""

    def __init__(self, watch: CrashWatch) -> None:
        self._watch = watch
        self._patches = Patches()

    def start(self) -> None:
        """Begin with the next worker that is started; a loop of somebody else's is left alone."""
        global _original
        loop = worker._worker_loop
        origin = getattr(loop, "__module__", ""), getattr(loop, "__qualname__", "")
        if not self._watch.is_on or origin != (worker.__name__, "_worker_loop"):
            return
        _original = loop
        entry = functools.partial(enter_worker, str(self._watch.path), self._watch.number)
        self._patches.replace(worker, "_worker_loop", lambda _: entry)

    def stop(self) -> None:
        """Leave workers to torch."""
        self._patches.undo()


def enter_worker(path: str, number: int | None, *args: Any) -> None:
    """Be the process of a worker: prepare it when torch has set its handlers, and do what torch does."""
    handling: Any = signal_handling
    set_handlers = handling._set_worker_signal_handlers

    def set_all() -> None:
        set_handlers()
        handling._set_worker_signal_handlers = set_handlers
        _prepare(path, number)

    handling._set_worker_signal_handlers = set_all
    (_original or worker._worker_loop)(*args)


def _prepare(path: str, number: int | None) -> None:
    """Write stacks into the file of the run; one that cannot be opened is no reason to fail."""
    if renew():
        return  # forked: the file is open, and SIGUSR1 is heard
    try:
        file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - open for as long as the process lives
    except OSError:
        return
    signals = FatalSignals(file)
    signals.start()
    if number is not None:
        faulthandler.register(number, file, all_threads=True, chain=False)
    _kept.extend((file, signals))
