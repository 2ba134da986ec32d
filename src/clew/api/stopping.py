"""Joins a recording with what may stop it: breakpoints, a shell at a step, another terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clew.api.control import Control
from clew.api.shell import Shell
from clew.replay.breakpoint import parse_breakpoint
from clew.replay.live import Breaker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from clew.capture.crash import CrashWatch
    from clew.capture.torch.recorder import Recorder
    from clew.replay.stops import Stops


class Stopping:
    """Sets the breakpoints of a recording and listens for other terminals, until ``stop``."""

    def __init__(
        self,
        recorder: Recorder,
        rank_folder: Path,
        stops: Stops,
        *,
        tell: Callable[[str], None],
        crash: CrashWatch | None,
    ) -> None:
        self._stops = stops
        shell = Shell(tell=tell, commands=stops.commands, crash=crash)
        self.breaker = recorder.breaker = Breaker(recorder, talk=shell.talk, tell=tell)
        self._control = shell.control = Control(rank_folder, self.breaker, tell=tell)

    def start(self) -> None:
        """Set the breakpoints; each was understood when the command line was read."""
        self._control.start()
        for text in list_breaks(self._stops):
            self.breaker.add(parse_breakpoint(text))

    def stop(self) -> None:
        """Let everybody go and leave nothing behind."""
        self._control.stop()
        self.breaker.close()


def list_breaks(stops: Stops) -> list[str]:
    """Return the texts of all breakpoints that were asked for."""
    at_step = [f"step:{stops.shell_at_step}"] if stops.shell_at_step is not None else []
    return [*stops.breaks, *at_step]
