"""A training is stopped and looked at from another process, and ends as if nobody had."""

import contextlib
import os
import socket
import stat
import subprocess
import sys
import time

import pytest
from pty_terminal import Pty

from clew.cli import main

TRAIN = """
import os, sys, time
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    if step > 20 and "wait" in sys.argv:
        time.sleep(0.02)
    if step > 20 and ("wait" not in sys.argv or os.path.exists("enough")):
        break
if "wait" in sys.argv:
    open("steps", "w").write(str(step))
"""


def start(folder, *words):
    (folder / "train.py").write_text(TRAIN)
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """Return the folder of a training that goes on until the tests are done."""
    # A long name: a socket's address has about a hundred characters.
    folder = tmp_path_factory.mktemp("long-" * 20)
    process = start(folder, "-m", "clew", "run", "--no-status", "--name", "run", "train.py", "wait")
    await_file(folder / "runs" / "run" / "rank0" / "control.sock")
    time.sleep(0.5)
    yield folder
    (folder / "enough").touch()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert not (folder / "runs" / "run" / "rank0" / "control.sock").exists(), "nothing stays behind"


def await_file(path, seconds=300.0):
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"no {path}"
        time.sleep(0.05)


def talk(folder, monkeypatch, capsys, text):
    monkeypatch.chdir(folder)
    (folder / "commands").write_text(text)
    while True:
        assert main(["attach", "run", "--commands", "commands"]) == 0
        said = capsys.readouterr()
        if "somebody is attached already" not in said.err:  # who left may not have been missed yet
            return said


def test_only_the_owner_may_come_in(training):
    mode = (training / "runs" / "run" / "rank0" / "control.sock").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_pause_stays_paused_and_off_goes_on(training, monkeypatch, capsys):
    monkeypatch.chdir(training)
    said = "asked: it stops at its next model call"
    while "asked: it stops" in said:  # on a busy machine it may take longer than somebody has patience for
        assert main(["pause", "run"]) == 0
        said = capsys.readouterr().out
    assert said.startswith("paused at step ")
    assert main(["pause", "run", "--off"]) == 0
    assert capsys.readouterr().out == "the training goes on\n"
    assert main(["pause", "run", "--off"]) == 0
    assert capsys.readouterr().out == "the training was not paused\n"


def test_looking_around_and_letting_go(training, monkeypatch, capsys):
    said = talk(
        training,
        monkeypatch,
        capsys,
        "where\nstep\nstep\nmodel[0].weight.data.zero_(); torch.rand(2).shape\ncontinue\n",
    )
    assert "paused by another terminal" in said.out
    assert "model(torch.randn(8, 4)).square().mean().backward()" in said.out
    assert "torch.Size([2])" in said.out
    assert "clew: the training goes on" in said.err


def test_breakpoints_of_a_guest_go_with_the_guest(training, monkeypatch, capsys):
    said = talk(training, monkeypatch, capsys, "break 2:forward\ncontinue\nout.shape\nquit\n")
    assert "after 2 (forward)" in said.out
    assert "torch.Size([8, 3])" in said.out
    said = talk(training, monkeypatch, capsys, "break\n")
    assert "no breakpoints" in said.out
    assert "left; the training goes on" in said.err


def test_whoever_leaves_lets_it_go_on_and_nonsense_is_not_served(training, monkeypatch, capsys):
    monkeypatch.chdir(training / "runs" / "run" / "rank0")
    for text in (b"", b"nonsense\n", b'{"ask": "attach"}\n'):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as guest:
            guest.connect("control.sock")
            guest.sendall(text)
            time.sleep(0.1)
    said = talk(training, monkeypatch, capsys, "step\n")
    assert "paused by another terminal" in said.out


def test_a_terminal_completes_the_names_over_there(training):
    terminal = Pty([sys.executable, "-m", "clew", "attach", "run"], training)
    assert "paused by another terminal" in terminal.wait_for("(clew) ")
    terminal.type("optimi\t.param_groups[0]['lr']\n")
    assert "0.1" in terminal.wait_for("(clew) ")
    terminal.type("\x04")
    terminal.wait_for("left; the training goes on")
    assert terminal.close() == 0


def test_a_training_that_has_ended_does_not_listen(zygote, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(TRAIN)
    zygote.clew(tmp_path, "run", "--no-status", "--name", "run", "train.py")
    monkeypatch.chdir(tmp_path)
    assert main(["pause", "run"]) == 2
    assert "this training has ended" in capsys.readouterr().err
    left = tmp_path / "runs" / "run" / "rank0" / "control.sock"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as dead:
        monkeypatch.chdir(left.parent)
        dead.bind("control.sock")
    monkeypatch.chdir(tmp_path)
    assert main(["pause", "run"]) == 2
    assert "nobody answers" in capsys.readouterr().err
