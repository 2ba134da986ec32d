"""What a watchpoint that fires does, beyond being told: a snapshot, or the debugger's prompt between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from clew.capture.settings import Settings
    from clew.capture.torch.recorder import Recorder
    from clew.model.finding import Finding


def choose_action(
    settings: Settings, find_recorder: Callable[[], Recorder]
) -> Callable[[Finding], None] | None:
    """Return what the settings want to be done about a hit; None where capture itself does it, or telling is all."""
    if not settings.watch or settings.on_hit in ("log", "stop"):
        return None
    if settings.on_hit == "snapshot":
        if settings.snapshots == "off":
            raise UsageError(
                "a hit cannot take a snapshot when they are off", next_step="write snapshots=auto"
            )
        return None
    if settings.on_hit == "pause":
        return _choose_pause(find_recorder)
    raise UsageError(
        "'call' needs a function", next_step="give it in Python: clew.watch(…, on_hit=my_function)"
    )


def _choose_pause(find_recorder: Callable[[], Recorder]) -> Callable[[Finding], None]:
    from clew.render.prompt import is_interactive

    if not is_interactive():
        raise UsageError(
            "a pause needs somebody to talk to, and standard input is no terminal",
            next_step="write --on-hit stop, or run it in a terminal",
        )

    def pause(finding: Finding) -> None:
        from clew.api.shell import open_shell

        reason = f"{finding.rule} hit at step {finding.step}: {finding.title}"
        open_shell(find_recorder(), reason, frame=_find_user_frame(), extra={"finding": finding})

    return pause


def _find_user_frame() -> FrameType | None:
    from clew.replay.frames import is_user_file
    from clew.replay.reenter import frames_outside_tools

    frames = frames_outside_tools()
    own = [frame for frame in frames if is_user_file(frame.f_code.co_filename)]
    return next(iter(own or frames), None)
