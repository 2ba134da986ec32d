"""Living in a forked copy of the user's process: unseen by the training and by who watches its terminal."""

from __future__ import annotations

import os
import signal

from clew.capture.crash_signals import leave_none


def fall_silent() -> None:
    """Cut the copy off from the terminal, from Ctrl-C and from the stacks of the run: it is none of the training."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_none()


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything to a pipe, however little it takes at once."""
    while data:
        data = data[os.write(descriptor, data) :]
