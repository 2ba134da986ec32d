"""The fence around clew: a fault of ours is recorded and told once, and never reaches the user's training."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from clew.logs import room_log
from clew.model.record import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_FAULTS = 100
_log = room_log("capture")


class Guard:
    """Keeps the faults of one recording, and which places have been switched off because of them."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told: set[str] = set()
        self._fresh: list[Fault] = []
        self.total = 0
        self.switched_off: set[str] = set()

    def fault(self, error: BaseException, where: str, *, step: int) -> None:
        """Record an error of ours at a place and switch that place off."""
        self.total += 1
        self.switched_off.add(where)
        _log.warning("fault at %s in step %d, switched off there", where, step, exc_info=error)
        if self.total <= MAX_FAULTS:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._fresh.append(Fault(step, where, f"{type(error).__name__}: {error}", text))
        self.tell_once(where, f"clew: fault at {where}, switched off there; training goes on ({error})")

    def tell_once(self, key: str, message: str) -> None:
        """Say something to the user, once for each key; a broken terminal is not worth an exception."""
        if key in self._told:
            return
        self._told.add(key)
        try:
            self._tell(message)
        except Exception:  # noqa: BLE001 - telling is a courtesy
            return

    def take(self) -> tuple[Fault, ...]:
        """Hand over the faults since the last call."""
        fresh, self._fresh = tuple(self._fresh), []
        return fresh
