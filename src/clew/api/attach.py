"""The other side of ``clew attach``: a terminal that talks to a training in another process."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

from clew.api.control import FILE, short_path
from clew.errors import ClewError, UsageError
from clew.render.prompt import Front, Script, Terminal
from clew.replay.reply import Reply
from clew.store.layout import rank_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import TextIO

    from clew.query import Run


class Line:
    """A connection to a training that is going on."""

    def __init__(self, run: Run, rank: int) -> None:
        folder = rank_folder(run.path, rank)
        self._socket = _connect(folder, run)
        self._lines = self._socket.makefile("r", encoding="utf-8")

    def send(self, **message: Any) -> None:
        """Send a message."""
        try:
            self._socket.sendall((json.dumps(message) + "\n").encode())
        except OSError as error:
            raise ClewError(f"the training is gone: {error.strerror}") from None

    def receive(self) -> dict[str, Any]:
        """Return the next message; the end of the line counts as goodbye."""
        try:
            line = self._lines.readline()
        except OSError:
            line = ""
        message: dict[str, Any] = json.loads(line) if line else {"bye": "the training has ended"}
        return message

    def close(self) -> None:
        """Leave: the training goes on."""
        self._lines.close()
        self._socket.close()


def ask(run: Run, what: str, *, rank: int = 0, tell: Callable[[str], None]) -> None:
    """Ask a training to ``pause`` or to ``resume`` and tell what it says."""
    line = Line(run, rank)
    line.send(ask=what)
    try:
        while True:
            message = line.receive()
            if "bye" in message:
                tell(message["bye"])
                return
            tell(message.get("note", ""))
    finally:
        line.close()


def attach(
    run: Run,
    *,
    rank: int = 0,
    commands: Sequence[str] | None = None,
    as_json: bool = False,
    output: TextIO,
    tell: Callable[[str], None],
) -> None:
    """Stop a training and talk to it until it goes on; whoever leaves lets it go on."""
    line = Line(run, rank)
    remote = _Remote(line)
    front: Front = Terminal(remote) if commands is None else Script(commands, output, as_json=as_json)
    line.send(ask="attach")
    try:
        _follow(line, front, tell)
    except KeyboardInterrupt:
        tell("left; the training goes on")
    finally:
        line.close()


def _follow(line: Line, front: Front, tell: Callable[[str], None]) -> None:
    while True:
        message = line.receive()
        if "reply" in message:
            data = dict(message["reply"])
            front.show(Reply(data.pop("kind"), data))
        elif "turn" in message:
            words = front.read()
            if words is None:
                tell("left; the training goes on")
                return
            line.send(line=words)
        elif "note" in message:
            tell(message["note"])
        elif "bye" in message:
            tell(message["bye"])
            return


class _Remote:
    """Completes names over there; everything else goes through the line."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._known: tuple[str, list[str]] = ("", [])

    def enter(self) -> Reply:
        return Reply("nothing")

    def execute(self, _: str) -> Reply:
        return Reply("nothing")

    def interact(self, _: Callable[[dict[str, Any]], object]) -> None:
        print("clew: a shell needs the terminal of the training; type the expression itself")

    def complete(self, text: str) -> list[str]:
        if self._known[0] != text:
            self._line.send(complete=text)
            names = self._line.receive().get("names", [])
            self._line.receive()  # it is our turn again
            self._known = (text, list(names))
        return self._known[1]


def _connect(folder: Path, run: Run) -> socket.socket:
    if not (folder / FILE).exists():
        if run.state != "recording":
            next_step = f"look at it with: clew show {run.name}"
            raise UsageError("this training has ended", where=str(run.path), next_step=next_step)
        raise UsageError(
            "this training does not listen",
            where=str(run.path),
            next_step="it runs on another machine, or its folder cannot hold a socket",
        )
    if (folder / FILE).lstat().st_uid != os.getuid() and os.getuid() != 0:
        raise UsageError("this training belongs to another user", where=str(folder / FILE))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(folder) as path:
            connection.connect(path)
    except OSError as error:
        connection.close()
        raise UsageError(
            f"nobody answers: {error.strerror}",
            where=str(folder / FILE),
            next_step="the process has died, or runs on another machine",
        ) from None
    return connection
