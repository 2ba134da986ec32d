"""Lets another terminal of the same user stop a training, look around in it and let it go on.

A socket in the rank's folder that only its owner may use; a thread waits there and costs nothing until somebody
comes. Lines of JSON go both ways. What is typed over there is executed by the training's own thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import traceback
import weakref
from typing import TYPE_CHECKING, Any, Final

from clew.replay.debugger import Debugger
from clew.replay.frames import is_user_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from clew.replay.live import Breaker
    from clew.replay.live_world import LiveWorld
    from clew.replay.reply import Reply

FILE: Final = "control.sock"
_PATIENCE_SECONDS: Final = 3.0
_living: Final[weakref.WeakSet[Control]] = weakref.WeakSet()


class Control:
    """The training's side. ``talk`` is called by the training's thread when it has stopped for somebody."""

    def __init__(self, folder: Path, breaker: Breaker, *, tell: Callable[[str], None]) -> None:
        self._folder = folder
        self._breaker = breaker
        self._tell = tell
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        # Who is there, who wants a stop and whether there is one change together: both threads go by all three.
        self._change = threading.Condition()
        self._guest: Guest | None = None
        self._is_asked = False
        self._is_stopped = False
        self._known: list[Any] = []
        self._main = threading.get_ident()

    @property
    def is_wanted(self) -> bool:
        """Whether the next stop is for somebody at another terminal."""
        return self._is_asked or self._guest is not None

    def start(self) -> None:
        """Listen; where no socket can be made, nobody can come and nothing else is lost."""
        try:
            self._socket = _listen(self._folder)
        except OSError:
            return
        _living.add(self)
        self._thread = threading.Thread(target=self._serve, name="clew-control", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let everybody go and take the socket away."""
        listening, self._socket = self._socket, None
        if listening is None:
            return
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        with contextlib.suppress(OSError):
            (self._folder / FILE).unlink()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._guest is not None:
            self._guest.close("the training has ended")

    def abandon(self) -> None:
        """Close the copies of the sockets in a forked process, which has no part in this."""
        for each in (self._socket, self._guest.connection if self._guest is not None else None):
            if each is not None and each.fileno() >= 0:
                os.close(each.detach())

    # ---------------------------------------------------------------- the training's thread

    def talk(self, world: LiveWorld) -> str:
        """Serve whoever comes until the training may go on."""
        from clew.render.prompt import converse

        with self._change:
            self._is_stopped = True
            self._change.notify_all()
        try:
            guest = self._guest or self._await_guest(world)
            if guest is None:
                return self._let_go("continue")
            guest.debugger = Debugger(world)
            return self._let_go(converse(guest.debugger, guest, at_end="detach"))
        finally:
            self._is_stopped = False

    def _await_guest(self, world: LiveWorld) -> Guest | None:
        self._tell(
            f"clew: paused, {world.spot.title}; 'clew attach' looks around, 'clew pause --off' goes on"
        )
        with self._change:
            self._change.wait_for(lambda: self._guest is not None or not self._is_asked)
            return self._guest

    def _let_go(self, how: str) -> str:
        """Keep the guest for the next stop where there will be one; whoever leaves takes their breakpoints along."""
        with self._change:
            # Whoever comes from here on finds a training that goes on, and asks it to stop anew.
            self._is_asked = self._is_stopped = False
            stays = how in ("step", "next", "finish") or (
                how == "continue" and bool(self._breaker.breakpoints)
            )
            if self._guest is not None and stays:
                return how
            guest, self._guest = self._guest, None
            if guest is not None:
                self._breaker.breakpoints[:] = [p for p in self._breaker.breakpoints if p in self._known]
        if guest is not None:
            guest.close("the training goes on")
        self._tell("clew: going on")
        return "continue"

    # ---------------------------------------------------------------- the listening thread

    def _serve(self) -> None:
        while (listening := self._socket) is not None:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            guest = Guest(connection)
            with contextlib.suppress(OSError, ValueError):
                if _is_same_user(connection):
                    self._greet(guest)
                    continue
            guest.close("")

    def _greet(self, guest: Guest) -> None:
        # Somebody who says nothing must not keep others out.
        guest.connection.settimeout(_PATIENCE_SECONDS)
        ask = guest.receive().get("ask")
        guest.connection.settimeout(None)
        if ask == "resume":
            guest.close("the training goes on" if self._resume() else "the training was not paused")
        elif self._ask_to_stop(guest):
            if ask == "pause":
                self._say_where(guest)
            else:
                self._let_in(guest)

    def _resume(self) -> bool:
        """Take a pause back; return whether the training stood still."""
        with self._change:
            # One that was let go before may not have woken up yet.
            was_stopped = self._is_stopped and self.is_wanted
            self._is_asked = False
            self._breaker.unpause()
            self._change.notify_all()
            return was_stopped

    def _ask_to_stop(self, guest: Guest) -> bool:
        """Ask the training to stop for a guest and wait a little; one is enough at a time."""
        with self._change:
            if self._guest is not None:
                guest.close("somebody is attached already")
                return False
            self._is_asked = True
            if not self._is_stopped:
                self._breaker.pause("paused by another terminal")
            is_there = self._change.wait_for(lambda: self._is_stopped, _PATIENCE_SECONDS)
        if not is_there:
            guest.send(
                note="the training has not come to a model call yet; it is at " + _where_is(self._main)
            )
        return True

    def _let_in(self, guest: Guest) -> None:
        with self._change:
            self._guest = guest
            self._known = list(self._breaker.breakpoints)
            self._change.notify_all()

    def _say_where(self, guest: Guest) -> None:
        step = self._breaker.recorder.step
        said = f"paused at step {step}" if self._is_stopped else "asked: it stops at its next model call"
        guest.close(said)


class Guest:
    """One terminal that is attached: a front for the debugger over there."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.debugger: Debugger | None = None
        self._lines = connection.makefile("r", encoding="utf-8")

    def receive(self) -> dict[str, Any]:
        """Return the next message, an empty one when nothing more comes."""
        line = self._lines.readline()
        message = json.loads(line) if line else {}
        return message if isinstance(message, dict) else {}

    def send(self, **message: Any) -> None:
        """Send a message; a guest that is gone does not mind."""
        with contextlib.suppress(OSError):
            self.connection.sendall((json.dumps(message, default=str) + "\n").encode())

    def read(self) -> str | None:
        """Ask for a line, answering questions about names meanwhile."""
        while True:
            self.send(turn=True)
            try:
                message = self.receive()
            except (OSError, ValueError):
                return None
            if "complete" in message and self.debugger is not None:
                self.send(names=self.debugger.complete(str(message["complete"])))
                continue
            return str(message["line"]) if "line" in message else None

    def show(self, reply: Reply) -> None:
        """Send a reply."""
        self.send(reply=reply.to_json())

    def close(self, reason: str) -> None:
        """Say goodbye."""
        self.send(bye=reason)
        with contextlib.suppress(OSError):
            self._lines.close()
            self.connection.close()


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Give the path of the socket in a folder in few characters: the system takes no more than about a hundred."""
    path = str(folder / FILE)
    if len(os.fsencode(path)) < 100:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{FILE}"
    finally:
        os.close(descriptor)


def _listen(folder: Path) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("no unix sockets here")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(folder) as path:
            listening.bind(path)
            # Nobody can connect before listen(), and then only the owner.
            os.chmod(path, 0o600)  # noqa: PTH101 - the short path is no Path
            listening.listen(4)
    except BaseException:
        listening.close()
        raise
    return listening


def _is_same_user(connection: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the permission of the file is what protects it there
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", data)[1] in (os.getuid(), 0)


def _where_is(thread: int) -> str:
    """Return the line that a thread is at, without stopping it."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    own = [entry for entry in stack if is_user_file(entry.filename)] or stack
    return f"{own[-1].filename}:{own[-1].lineno} {own[-1].line or ''}".strip() if own else "an unknown place"


def _abandon_all() -> None:
    for control in list(_living):
        control.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
