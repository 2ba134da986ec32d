"""``clew replay``: a recorded step executed again, with a debugger at its end that can go back to any operation."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clew.api.replay import Execution, execute_again
from clew.api.why import choose_rank, first_bad_step
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clew.query import Run
    from clew.replay.stage import Stage
    from clew.replay.timeline import Timeline


def travel(
    run: Run,
    step: int | None,
    *,
    rank: int | None = None,
    commands: Sequence[str] | None = None,
    as_json: bool = False,
    is_full: bool = False,
    limit_bytes: int | None = None,
    window: tuple[int, int] | None = None,
) -> Execution:
    """Execute a step again and open the debugger on it; ``commands`` are executed instead of asking for some."""
    wanted = step if step is not None else _choose_step(run)

    def around(stage: Stage) -> Callable[[], Any]:
        from clew.replay.kept import DEFAULT_BYTES
        from clew.replay.timeline import TimelineLens

        lens = TimelineLens(
            stage.recorder, stage.rehearsal, limit_bytes=limit_bytes or DEFAULT_BYTES, window=window
        )
        lens.begin()
        silence = _Silence()

        def after() -> dict[str, Any]:
            timeline = lens.end()
            silence.lift()
            timeline = replace(timeline, step=stage.step, exactness=_tell(stage))
            return _open(timeline, commands, as_json=as_json, is_full=is_full)

        return after

    done = execute_again(
        run, wanted, around=around, rank=choose_rank(run, wanted) if rank is None else rank, is_loud=True
    )
    if not done.was_executed or done.result is None:
        raise UsageError(
            f"step {wanted} could not be executed again: {done.error or 'the script did not come to it'}",
            where=" ".join(run.info.command),
            next_step="; ".join(done.reasons),
        )
    return done


def _choose_step(run: Run) -> int:
    """Return the step to look at where none is named: the first bad one, else the last."""
    bad = first_bad_step(run)
    return bad if bad is not None else run.last_step


def _tell(stage: Stage) -> dict[str, Any]:
    notes = list(stage.reasons)
    place = stage.so_far.diverged_at or stage.so_far.close_at
    if place:
        notes.insert(0, f"first different: {place}")
    compared = f"{stage.so_far.losses} losses and {stage.so_far.hashes} hashes compared, way: {stage.way}"
    return {"replay": stage.so_far.exactness, "notes": [*notes, compared]}


def _open(
    timeline: Timeline, commands: Sequence[str] | None, *, as_json: bool, is_full: bool
) -> dict[str, Any]:
    """Talk, in the copy of the process that executed the step, until the user leaves."""
    from clew.render.prompt import Front, Script, Terminal, converse
    from clew.replay.debugger import Debugger
    from clew.replay.reply import Reply
    from clew.replay.travel import Travel

    verdict = {**timeline.exactness, "step": timeline.step, "operations": len(timeline.operations)}
    world = Travel(timeline)
    world.start()
    debugger = Debugger(world)
    front: Front
    if commands is not None:
        front = Script(commands, sys.stdout, as_json=as_json)
    else:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the script's own may have been replaced or closed
        front = Terminal(debugger)
        if is_full:
            from clew.render.full_screen import FullScreen, can_draw

            if can_draw(sys.stdout):
                front = FullScreen(debugger, front)
            else:
                print(
                    "clew: this terminal cannot show the whole view; the plain prompt will do",
                    file=sys.stderr,
                )
    converse(debugger, front, first=[Reply("exactness", verdict)])
    return {"operations": len(timeline.operations)}


class _Silence:
    """Keeps what the script prints in the step away from the terminal until ``lift``."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._kept = os.dup(1)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)

    def lift(self) -> None:
        """Give the terminal back."""
        sys.stdout.flush()
        os.dup2(self._kept, 1)
        os.close(self._kept)
        # The script may have put something of its own there.
        sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115 - lives to the end
