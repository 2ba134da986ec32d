"""Who talks at a stop of a training: another terminal that is attached, this one, or a list of commands."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clew.capture.torch.recorder import Recorder
from clew.replay.debugger import Debugger
from clew.replay.live import Breaker
from clew.replay.live_world import LiveWorld, Stop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from clew.api.control import Control
    from clew.capture.crash import CrashWatch
    from clew.render.prompt import Script


class Shell:
    """Opens the prompt at each stop and says how the training goes on."""

    def __init__(
        self,
        *,
        tell: Callable[[str], None],
        commands: Sequence[str] | None = None,
        crash: CrashWatch | None = None,
    ) -> None:
        self._tell = tell
        self._crash = crash
        self._script: Script | None = None
        self.control: Control | None = None
        if commands is not None:
            from clew.render.prompt import Script

            self._script = Script(commands, sys.stdout)

    def talk(self, world: LiveWorld) -> str:
        """Talk until the training may go on; without anybody to talk to, tell where it is and go on."""
        with self._crash.standing_still() if self._crash is not None else contextlib.nullcontext():
            return self._talk(world)

    def _talk(self, world: LiveWorld) -> str:
        from clew.render.prompt import Terminal, converse, is_interactive

        if self.control is not None and self.control.is_wanted:
            return self.control.talk(world)
        debugger = Debugger(world)
        if self._script is not None:
            return converse(debugger, self._script, at_end="detach")
        if is_interactive():
            return converse(debugger, Terminal(debugger), at_end="detach")
        self._tell(_say(debugger, world))
        return "continue"


def _say(debugger: Debugger, world: LiveWorld) -> str:
    """Return one line about a stop that nobody is there to look at."""
    from clew.render.terminal import Screen, lower
    from clew.views.debug_page import make_page

    reply = debugger.enter().to_json()
    text = lower(make_page(reply), Screen(width=200)).strip().splitlines()
    first = [line.strip() for line in text]
    why = f", {world.reason}" if world.reason else ""
    values = "; ".join(line for line in first[1:] if line.startswith(("out", "args")))
    return f"clew: {first[0]}{why}; there is no terminal, so it goes on. {values}".rstrip()


def open_shell(recorder: Recorder, reason: str, *, frame: FrameType | None = None, extra: Any = None) -> None:
    """Stop the training in the thread that calls, open the prompt, and go on when the user says so.

    Without a terminal one line is told and the training goes on. Nothing evaluated at the prompt stays.
    """
    breaker = recorder.breaker
    if breaker is None:
        breaker = Breaker(recorder, talk=Shell(tell=_tell).talk, tell=_tell)
        breaker.has_steps = False
        recorder.breaker = breaker
    place = f"at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "here"
    breaker.stop_here(Stop(place, "", "", extra=dict(extra or {}), frame=frame, reason=reason))


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


class Nowhere:
    """A sink for the records of a recorder that exists for its prompt alone."""

    def add_sites(self, sites: Any) -> None:
        """Take no note of sites."""

    def put(self, record: Any) -> None:
        """Take no note of a record."""

    def update_info(self, info: Any) -> None:
        """Take no note of provenance."""

    def close(self, state: str, exit_code: int | None = None) -> None:
        """Nothing to close."""


def make_lonely_recorder() -> Recorder:
    """Return a recorder for a prompt in a program that is not being recorded."""
    from clew.capture.settings import Settings

    recorder = Recorder(Settings(status=False, doctor=False), Nowhere(), tell=_tell)
    recorder.asleep = False
    return recorder
