"""What a watchpoint that fires does, beyond being told: a shell in the middle of the training."""

from __future__ import annotations

import code
import sys
from typing import TYPE_CHECKING, Any

from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from clew.capture.settings import Settings
    from clew.model.finding import Finding


def choose_action(settings: Settings) -> Callable[[Finding], None] | None:
    """Return what the settings want to be done about a hit; None where telling, or stopping, is all."""
    if not settings.watch or settings.on_hit in ("log", "stop"):
        return None
    if settings.on_hit == "snapshot":
        if settings.snapshots == "off":
            raise UsageError(
                "a hit cannot take a snapshot when they are off", next_step="write snapshots=auto"
            )
        return None
    if settings.on_hit == "pause":
        return _choose_pause()
    raise UsageError(
        "'call' needs a function", next_step="give it in Python: clew.watch(…, on_hit=my_function)"
    )


def _choose_pause() -> Callable[[Finding], None]:
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            "a pause needs somebody to talk to, and standard input is no terminal",
            next_step="write --on-hit stop, or run it in a terminal",
        )
    return open_shell


def open_shell(finding: Finding) -> None:
    """Open a Python shell between two steps, with the names of the training; it goes on when the shell ends."""
    frame = _find_user_frame()
    names: dict[str, Any] = {**frame.f_globals, **frame.f_locals} if frame is not None else {}
    where = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
    banner = (
        f"clew: paused{where}, after step {finding.step}: {finding.rule}: {finding.title}\n"
        "clew: the names of the training are here, and this hit as 'finding'; Ctrl-D goes on, exit() ends the training"
    )
    code.interact(banner=banner, local={**names, "finding": finding}, exitmsg="clew: going on")


def _find_user_frame() -> FrameType | None:
    from clew.replay.frames import is_user_file
    from clew.replay.reenter import frames_outside_tools

    frames = frames_outside_tools()
    own = [frame for frame in frames if is_user_file(frame.f_code.co_filename)]
    return next(iter(own or frames), None)
