"""Ends that pass Python by, a signal, ``os._exit``, ``os.execv``, stay as they were and lose no step of the record."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

import clew
from zygote import Job

TRAIN = """
import os, signal, sys, threading, time
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(7):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
print("trained", signal.getsignal(signal.SIGTERM), flush=True)
def later(action):
    threading.Thread(target=lambda: (time.sleep(0.05), action())).start()
def end(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
"""

# Name: the script's end, the state of the record, and what it says of the end.
ENDS = {
    "its own signal": ("end(); print('not reached', flush=True)", "died", "SIGTERM"),
    "asleep": ("later(end); time.sleep(60); print('not reached', flush=True)", "died", "SIGTERM"),
    "at work": ("later(end)\nwhile True: pass", "died", "SIGTERM"),
    "waiting for a thread": ("later(end); threading.Event().wait()", "died", "SIGTERM"),
    "hang up": ("end(signal.SIGHUP); print('not reached', flush=True)", "died", "SIGHUP"),
    "alarm": ("signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(60)", "died", "SIGALRM"),
    "handler of its own": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); end(); time.sleep(60)",
        "complete",
        "",
    ),
    "no text is flushed": ("print('in the buffer'); end()", "died", "SIGTERM"),
    "at once": ("print('in the buffer'); os._exit(7)", "complete", "os._exit(7)"),
    "at once after an exception": (
        "try: model(torch.ones(2, 2))\nexcept RuntimeError: os._exit(8)",
        "died",
        "os._exit(8)",
    ),
    "at once by a thread": ("later(lambda: os._exit(6)); time.sleep(60)", "died", "os._exit(6)"),
    "another program": ("os.execlp('sh', 'sh', '-c', 'echo other; exit 5')", "died", "os.execv"),
    "no other program": (
        "try: os.execv('/nowhere/at/all', ['all'])\nexcept OSError as error: print(error)",
        "complete",
        "",
    ),
    "a forked copy": (
        """
        for act in (end, lambda: os._exit(3), lambda: os.execv('/bin/sh', ['sh', '-c', 'exit 4'])):
            child = os.fork()
            if not child:
                act()
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        "complete",
        "",
    ),
}


@pytest.fixture(scope="module")
def endings(zygote, tmp_path_factory):
    """Run every end plain and under clew, all at once."""
    folder, jobs = tmp_path_factory.mktemp("ends"), []
    for number, (text, *_) in enumerate(ENDS.values()):
        script = folder / f"{number}.py"
        script.write_text(TRAIN + textwrap.dedent(text))
        for side, words in (("plain", []), ("clew", ["-m", "clew", "run", "--budget", "off"])):
            place = folder / f"{number}-{side}"
            place.mkdir()
            jobs.append(Job(place, [*words, str(script)]))
    done = zygote.run(*jobs)
    return dict(zip(ENDS, zip(done[::2], done[1::2], strict=True), strict=True))


if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
    del ENDS["hang up"]  # under nohup nothing ends by it


@pytest.mark.parametrize("name", ENDS)
def test_end_is_the_same_and_every_step_is_there(name, endings):
    plain, under_clew = endings[name]
    assert (under_clew.code, under_clew.stdout) == (plain.code, plain.stdout)
    assert under_clew.own_stderr == plain.stderr
    _, state, end = ENDS[name]
    (folder,) = (under_clew.folder / "runs").iterdir()
    run = clew.open_run(folder)
    assert (run.state, len(run.scalars("loss")["loss"]), run.problems) == (state, 7, [])
    said = [note for note in run.info.notes if note.startswith("ended by") and "RuntimeError" not in note]
    assert said == ([f"ended by {end}"] if end else [])
    assert bool(run.info.ended)
    if end.startswith("os.exec"):
        told = [line for line in under_clew.stderr.splitlines() if "ends the script" in line]
        assert told == [f"clew: {end} ends the script; recorded: runs/{folder.name}"]
    if name == "no other program":
        assert "ends the script" not in under_clew.stderr


NEVER_LEFT = """
import atexit, clew
watch = clew.watch(model, optimizer, out="watched", name="run", every=1)
watch.__enter__()
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("last", "state"), [("", "complete"), ("raise ValueError('mine')", "died")])
def test_a_watch_that_is_never_left_ends_with_the_program_and_has_its_steps(tmp_path, last, state):
    (tmp_path / "train.py").write_text(TRAIN + NEVER_LEFT + last)
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == bool(last), done.stderr
    run = clew.open_run(tmp_path / "watched" / "run")
    assert (run.state, run.ended_steps.tolist(), run.problems) == (state, [0, 1, 2, 3, 4], [])
    assert "ended by the end of the program: the with block of clew.watch was never left" in run.info.notes


def test_watch_leaves_signals_and_functions_as_they_were(tmp_path):
    """Also where recordings overlap: the first one that ends does not end it for the other."""
    import os

    import torch

    before = (os._exit, os.execv, os.execve)
    outer = clew.watch(torch.nn.Linear(2, 2), out=str(tmp_path), name="outer")
    with outer, clew.watch(torch.nn.Linear(2, 2), out=str(tmp_path), name="inner"):
        assert os._exit is not before[0]
    assert (os._exit, os.execv, os.execve) == before
