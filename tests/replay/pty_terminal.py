"""A program on a terminal of its own, as a person would have it."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r|\x07")


def _take_terminal():
    """Make standard input the terminal that Ctrl-C comes from."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Pty:
    """A program on a terminal of 80 columns; what it shows is read until a text appears."""

    def __init__(self, words, folder):
        self._main, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        environment = os.environ | {
            "TERM": "xterm",
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
            "INPUTRC": os.devnull,
        }
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509 - no threads here
        )
        os.close(other)
        self.shown = ""
        self._read = 0

    def wait_for(self, text, *, seconds=300.0):
        """Read until a text appears after what was read before, and return what came with it."""
        start, until = self._read, time.monotonic() + seconds
        while text not in self.shown[start:]:
            ready, _, _ = select.select([self._main], [], [], max(until - time.monotonic(), 0))
            assert ready, f"{text!r} did not appear:\n{self.shown}"
            try:
                piece = os.read(self._main, 4096)
            except OSError:
                piece = b""
            assert piece, f"it ended before {text!r} appeared:\n{self.shown}"
            self.shown += ESCAPES.sub("", piece.decode())
        # A piece may hold more than the text: what follows belongs to the next call.
        self._read = self.shown.index(text, start) + len(text)
        return self.shown[start : self._read]

    def interrupt(self, text):
        """Press Ctrl-C until a text appears, as a person would.

        Python asks for lines with readline, and sees a Ctrl-C that comes while readline handles other keys only with
        the next key.
        """
        for _ in range(150):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.wait_for(text, seconds=2.0)
        return self.wait_for(text, seconds=0)

    def type(self, text):
        os.write(self._main, text.encode())

    def close(self):
        code = self.process.wait(timeout=300)
        os.close(self._main)
        return code

    def __del__(self):
        # A test that failed half-way must not leave its program to the next test.
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
