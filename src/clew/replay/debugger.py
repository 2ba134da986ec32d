"""A debugger without input or output: a line of text goes in, a reply comes out.

What is being debugged is a world: a replayed step in which one can go anywhere, a training that has stopped, or the
frames of an exception.
"""

from __future__ import annotations

import contextlib
import io
import re
import traceback
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from clew.errors import ClewError, UsageError, suggest
from clew.replay.expression import Scratch
from clew.replay.inspection import bin_values, describe_lines, list_statistics, save_value
from clew.replay.reply import Reply, Spot

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

MOVES: Final = ("step", "next", "continue", "finish", "back", "goto")
HELP: Final = {
    "step": ("step [N]", "go to the next operation (live: into or out of the next module)"),
    "next": ("next [N]", "go on past the modules called from here (live, at a line: to the next line)"),
    "continue": ("continue", "go on to the next breakpoint or to the end"),
    "finish": ("finish", "go on to the end of the module call that this is in"),
    "back": ("back [N]", "go back (a replayed step only)"),
    "goto": ("goto N|SITE|start|end|bad|loss", "go to an operation, the first of a site, the first bad one"),
    "up": ("up [N]", "look at the caller's line and names"),
    "down": ("down [N]", "look at the line and names further inside"),
    "where": ("where", "show the modules and the source lines around this place"),
    "queue": ("queue [N]", "show what comes next"),
    "print": ("print EXPR", "tell a value in a line for each tensor"),
    "stats": ("stats [EXPR]", "show every statistic of a tensor (out)"),
    "plot": ("plot [EXPR]", "draw how the values of a tensor are spread (out)"),
    "break": (
        "break [SPEC | off N]",
        "list breakpoints, add one (SITE:forward if …, op:NAME, FILE:LINE), remove one",
    ),
    "watch": ("watch EXPR", "stop where the value of an expression changes"),
    "save": ("save EXPR FILE", "write a tensor to FILE (.npy or .safetensors)"),
    "shell": ("shell", "open Python with the names of this place (IPython where it is installed)"),
    "quit": ("quit", "leave; a training that was started here ends (detach lets it go on)"),
    "detach": ("detach", "leave and let the program go on without breakpoints"),
    "help": ("help [COMMAND]", "show this text"),
}
SHORT: Final = {
    "s": "step", "n": "next", "c": "continue", "u": "up", "d": "down", "w": "where", "bt": "where", "q": "quit",
    "p": "print", "b": "break", "exit": "quit",
}  # fmt: skip
"""Short forms; h is left to the hidden states of the world."""
_WORD: Final = re.compile(r"\s*([a-z]+)\b\s*(.*)", re.DOTALL)
_PYTHON: Final = re.compile(r"[(.=\[+*/<>%,|&]|!=|- |(?:in|is|and|or|if|not)\b")
"""What follows a name that is used in an expression, and not a command's argument."""


T = TypeVar("T")


class World(Protocol):
    """What a debugger moves in. ``spot`` says where it stands; ``move`` goes elsewhere or says how to resume."""

    @property
    def spot(self) -> Spot:
        """The place it stands at."""

    def move(self, how: str, words: str) -> Reply:
        """Go on, go back, or tell the caller to let the program run."""

    def guard(self) -> AbstractContextManager[None]:
        """Return what a typed expression is evaluated in, so that nothing of it stays."""

    def queue(self, count: int) -> list[dict[str, Any]]:
        """Return what comes next."""

    def breakpoints(self) -> list[str]:
        """Return the texts of the breakpoints."""

    def add_break(self, text: str, *, is_watch: bool = False) -> str:
        """Add a breakpoint or a watched expression and return what was understood."""

    def remove_break(self, number: int) -> str:
        """Remove a breakpoint and return its text."""


class Debugger:
    """Executes commands in a world; everything a command changes in the training is undone."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.scratch = Scratch()
        self._frame = 0
        self._last = ""

    @property
    def frame(self) -> int:
        """Which source line is looked at: 0 is the innermost."""
        return self._frame

    def enter(self) -> Reply:
        """Return where the program stands; called when it stops."""
        self._frame = 0
        return self._tell_place()

    def execute(self, line: str) -> Reply:
        """Execute one line: a command, or any Python expression. An empty line repeats the last move."""
        text = line.strip() or self._last
        text = "help" if text == "?" else text
        if not text:
            return Reply("nothing")
        command, rest = split_command(text)
        try:
            if text == "q" and ("q" in self.scratch.names or "q" in self._line_names(self.world.spot)):
                raise UsageError("'q' is a name here, and short for quit", next_step="print q, or quit")
            if not command:
                return self._evaluate(text)
            if command in MOVES:
                self._last = text
                return self._move(command, rest)
            handler: Callable[[str], Reply] = getattr(self, f"_do_{command}")
            return handler(rest)
        except ClewError as error:
            return Reply("error", {"what": error.what, "where": error.where, "next": error.next_step})

    def complete(self, text: str) -> list[str]:
        """Return how a beginning may go on: commands, names, attributes of names."""
        head, dot, tail = text.rpartition(".")
        if dot and re.fullmatch(r"[\w.]+", head):
            with contextlib.suppress(Exception):
                value = self.scratch.run(head, self.names())
                return [
                    f"{head}.{name}"
                    for name in dir(value)
                    if name.startswith(tail) and (tail or name[0] != "_")
                ]
            return []
        known = [*HELP, *self.names(), *self.scratch.names]
        return sorted({name for name in known if name.startswith(text)})

    def names(self) -> dict[str, Any]:
        """Return the names that an expression may use here."""
        spot = self.world.spot
        return {**_tools(), **self._line_names(spot), **spot.extra}

    def _line_names(self, spot: Spot) -> dict[str, Any]:
        return spot.names[self._frame] if self._frame < len(spot.names) else {}

    # ---------------------------------------------------------------- moving

    def _move(self, how: str, words: str) -> Reply:
        reply = self.world.move(how, words)
        self._frame = 0
        if reply.resume or reply.kind != "place":
            return reply
        place = self._tell_place()
        return Reply("place", {**place.data, **reply.data})

    def _tell_place(self) -> Reply:
        spot = self.world.spot
        line = spot.lines[self._frame] if self._frame < len(spot.lines) else None
        return Reply(
            "place",
            {
                "title": spot.title,
                "site": spot.site,
                "phase": spot.phase,
                "line": _line_data(line),
                "values": [row for name, value in spot.shown for row in describe_lines(name, value)],
                "notes": list(spot.notes),
            },
        )

    def _do_up(self, words: str) -> Reply:
        return self._turn(_count(words))

    def _do_down(self, words: str) -> Reply:
        return self._turn(-_count(words))

    def _turn(self, by: int) -> Reply:
        lines = self.world.spot.lines
        wanted = self._frame + by
        if not 0 <= wanted < len(lines):
            raise UsageError("there is no line further " + ("out" if by > 0 else "in"))
        self._frame = wanted
        return self._do_where("")

    def _do_where(self, _: str) -> Reply:
        spot = self.world.spot
        lines = [{**_line_data(line), "here": index == self._frame} for index, line in enumerate(spot.lines)]
        return Reply("where", {"title": spot.title, "modules": list(spot.modules), "lines": lines})

    def _do_queue(self, words: str) -> Reply:
        return Reply("queue", {"operations": self.world.queue(_count(words, usual=8))})

    # ---------------------------------------------------------------- looking

    def _evaluate(self, text: str) -> Reply:
        values, printed = self._look(
            text.removeprefix("!"), lambda value: describe_lines("", value) if value is not None else []
        )
        data: dict[str, Any] = {"values": values}
        return Reply("value", data | ({"printed": printed} if printed else {}))

    def _do_print(self, words: str) -> Reply:
        values, _ = self._look(words or "out", lambda value: describe_lines("", value))
        return Reply("value", {"values": values})

    def _do_stats(self, words: str) -> Reply:
        name = words or "out"
        rows, _ = self._look(name, lambda value: list_statistics(name, value))
        return Reply("stats", {"name": name, "rows": rows})

    def _do_plot(self, words: str) -> Reply:
        bins, _ = self._look(words or "out", bin_values)
        return Reply("plot", {"name": words or "out", **bins})

    def _do_save(self, words: str) -> Reply:
        text, _, file = words.rpartition(" ")
        if not text or not file:
            raise UsageError("save what, and where to?", next_step="save out values.npy")
        path, _ = self._look(text, lambda value: save_value(value, file))
        return Reply("text", {"text": f"wrote {text} to {path}"})

    def _look(self, text: str, tell: Callable[[Any], T]) -> tuple[T, str]:
        """Evaluate what was typed, tell its value, and undo what it did; return what was told and what it printed."""
        printed = io.StringIO()
        try:
            with self.world.guard(), contextlib.redirect_stdout(printed):
                told = tell(self.scratch.run(text, self.names()))
        except ClewError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever was typed may raise whatever it likes
            lines = traceback.format_exception_only(type(error), error)
            wrong = getattr(error, "name", None) if isinstance(error, NameError) else None
            raise UsageError(
                lines[-1].strip(),
                next_step=suggest(wrong, self._known(wrong)) if isinstance(wrong, str) else "",
            ) from None
        return told, printed.getvalue()

    def _known(self, wrong: str) -> list[str]:
        """Return what may have been meant; short names are like too many commands."""
        return [*self.names(), *(HELP if len(wrong) > 3 else ())]

    # ---------------------------------------------------------------- where to stop

    def _do_break(self, words: str) -> Reply:
        first, _, number = words.partition(" ")
        if first == "off":
            if not number.strip().isdigit():
                raise UsageError(
                    "which breakpoint?", next_step="break lists them with their numbers; break off 1"
                )
            return Reply("text", {"text": f"removed: {self.world.remove_break(int(number))}"})
        if words:
            return Reply("text", {"text": f"breakpoint: {self.world.add_break(words)}"})
        return Reply("breaks", {"breakpoints": self.world.breakpoints()})

    def _do_watch(self, words: str) -> Reply:
        if not words:
            raise UsageError("watch what?", next_step="watch out.max() > 100")
        return Reply("text", {"text": f"watching: {self.world.add_break(words, is_watch=True)}"})

    # ---------------------------------------------------------------- the rest

    def _do_help(self, words: str) -> Reply:
        name = SHORT.get(words, words)
        if name and name not in HELP:
            raise UsageError(f"no command '{words}'", next_step=suggest(words, HELP))
        chosen = {name: HELP[name]} if name else HELP
        return Reply("help", {"commands": [list(form) for form in chosen.values()]})

    def _do_shell(self, _: str) -> Reply:
        raise UsageError("a shell needs a terminal of its own", next_step="type the expression itself")

    def interact(self, run: Callable[[dict[str, Any]], object]) -> None:
        """Let a shell run with the names of this place; what it changes in the training is undone when it ends."""
        with self.world.guard():
            run({**self.names(), **self.scratch.names})

    def _do_quit(self, _: str) -> Reply:
        return Reply("bye", resume="quit")

    def _do_detach(self, _: str) -> Reply:
        return Reply("bye", resume="detach")


def split_command(text: str) -> tuple[str, str]:
    """Return the command of a line and the rest, or an empty command for a Python expression.

    A word that is a command counts as one unless it is used as a name: ``step`` moves, ``step == 3`` compares.
    """
    found = _WORD.fullmatch(text)
    if found is None or text.startswith("!"):
        return "", text
    word, rest = found[1], found[2].strip()
    name = SHORT.get(word, word)
    if name not in HELP or _PYTHON.match(rest):
        return "", text
    return name, rest


def _count(words: str, *, usual: int = 1) -> int:
    if not words:
        return usual
    if not words.isdigit():
        raise UsageError(f"'{words}' is no number")
    return int(words)


def _line_data(line: Any) -> dict[str, Any]:
    if line is None:
        return {"file": "", "line": 0, "text": "", "function": ""}
    return {"file": line.file, "line": line.number, "text": line.text, "function": line.function}


def _tools() -> dict[str, Any]:
    import math

    import torch

    return {"torch": torch, "math": math}
