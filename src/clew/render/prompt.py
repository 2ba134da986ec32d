"""Fronts of a debugger: a prompt on the terminal, commands from a file, replies as text or JSON."""

from __future__ import annotations

import code
import contextlib
import importlib.util
import json
import sys
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from clew.render.terminal import Screen, lower
from clew.replay.reply import Reply
from clew.views.debug_page import make_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

PROMPT = "(clew) "


class Debugger(Protocol):
    """What a front talks to."""

    def enter(self) -> Reply:
        """Return where the program stands."""

    def execute(self, line: str) -> Reply:
        """Execute one line."""

    def complete(self, text: str) -> list[str]:
        """Return how a beginning may go on."""

    def interact(self, run: Callable[[dict[str, Any]], object]) -> None:
        """Let a shell run with the names of the place."""


class Front(Protocol):
    """Where lines come from and replies go. ``read`` gives None when there are no more lines."""

    def read(self) -> str | None:
        """Return the next line, without its end."""

    def show(self, reply: Reply) -> None:
        """Show a reply."""


def converse(debugger: Debugger, front: Front, *, at_end: str = "quit", first: Iterable[Reply] = ()) -> str:
    """Let a front talk to a debugger until it says how the program goes on; ``at_end`` when the lines run out."""
    for reply in (*first, debugger.enter()):
        front.show(reply)
    while True:
        try:
            line = front.read()
            reply = debugger.execute(at_end if line is None else line)
            front.show(reply)
        except KeyboardInterrupt:
            front.show(Reply("text", {"text": "interrupted; 'quit' leaves, 'continue' goes on"}))
            continue
        if reply.resume:
            return reply.resume


class Terminal:
    """A plain prompt; with editing, history and completion where Python has readline."""

    def __init__(self, debugger: Debugger, *, output: TextIO | None = None) -> None:
        self._debugger = debugger
        self._output = output or _choose_output()
        self._readline = _load_readline()

    def read(self) -> str | None:
        """Ask for a line; a shell is opened on the way."""
        while (line := self._ask()) is not None and line.strip() == "shell":
            self._debugger.interact(_open_python)
        return line

    def _ask(self) -> str | None:
        try:
            with self._completing():
                if self._output is sys.stdout:
                    return input(PROMPT)
                self._output.write(PROMPT)
                self._output.flush()
                line = sys.stdin.readline()
                return line.rstrip("\n") if line else None
        except EOFError:
            self._output.write("\n")
            return None

    def show(self, reply: Reply) -> None:
        """Draw a reply."""
        page = make_page(reply.to_json())
        if page.blocks:
            self._output.write(lower(page, Screen.of(self._output)))
            self._output.flush()

    @contextlib.contextmanager
    def _completing(self) -> Iterator[None]:
        """Complete names of the debugger while a line is read, and leave readline as the script had it."""
        readline = self._readline
        if readline is None:
            yield
            return
        before = readline.get_completer(), readline.get_completer_delims()
        readline.set_completer(self._complete)
        readline.set_completer_delims(" \t\n()[]{}+-*/=<>,:'\"")
        readline.parse_and_bind("tab: complete")
        try:
            yield
        finally:
            readline.set_completer(before[0])
            readline.set_completer_delims(before[1])

    def _complete(self, text: str, state: int) -> str | None:
        found = self._debugger.complete(text)
        return found[state] if state < len(found) else None


class Script:
    """Commands from a file or a list, replies as the text of a terminal, with each command shown before its reply."""

    def __init__(self, lines: Iterable[str], output: TextIO, *, as_json: bool = False) -> None:
        self._lines = iter([line.strip() for line in lines])
        self._output = output
        self._as_json = as_json
        self._command = ""

    def read(self) -> str | None:
        """Return the next command; comments and empty lines are left out."""
        self._command = next((line for line in self._lines if line and not line.startswith("#")), "")
        if self._command and not self._as_json:
            self._output.write(f"{PROMPT}{self._command}\n")
        return self._command or None

    def show(self, reply: Reply) -> None:
        """Write a reply, in JSON one object a line."""
        data = reply.to_json()
        if self._as_json:
            command: dict[str, Any] = {"command": self._command} if self._command else {}
            text = json.dumps(_plain({**command, **data}), allow_nan=False, default=str) + "\n"
        else:
            page = make_page(data)
            text = lower(page, Screen.of(self._output)) if page.blocks else ""
        self._output.write(text)
        self._output.flush()


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become texts, as everywhere in clew."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):  # noqa: PLR0124 - NaN
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value


def is_interactive() -> bool:
    """Return whether somebody sits at the other end of standard input."""
    try:
        return sys.stdin is not None and sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())
    except (AttributeError, ValueError):
        return False


def _choose_output() -> TextIO:
    """Return standard output, or standard error where the script's output goes into a file."""
    return sys.stdout if sys.stdout.isatty() else sys.stderr


def _open_python(names: dict[str, Any]) -> None:
    """Run IPython, or Python's own console where there is none, until the user leaves it."""
    banner = "the names of this place are here; Ctrl-D goes back to the prompt"
    # Not within the handling of a failed import: Python would tell of it with every error that is made there.
    if importlib.util.find_spec("IPython") is None:
        code.interact(banner=banner, local=names, exitmsg="")
        return
    from IPython.terminal.embed import InteractiveShellEmbed  # noqa: T100 - the shell that was asked for
    from traitlets.config import Config

    config = Config()
    config.TerminalInteractiveShell.confirm_exit = False
    config.HistoryManager.enabled = False  # its thread would outlive the shell
    print(banner)
    shell = InteractiveShellEmbed(config=config, banner1="", user_ns=names)  # noqa: T100 - see above
    shell.mainloop(local_ns=names)
    InteractiveShellEmbed.clear_instance()


def _load_readline() -> Any:
    try:
        import readline
    except ImportError:
        return None
    return readline
