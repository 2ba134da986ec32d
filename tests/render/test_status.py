import io
import os
import pty
import subprocess
import sys
import textwrap

import pytest

from clew.render.status import StatusLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def display(text):
    """Return the lines a terminal would show: carriage return, erase to the end of line, line feed, text."""
    lines, row, column = [""], 0, 0
    position = 0
    while position < len(text):
        if text.startswith("\x1b[K", position):
            lines[row] = lines[row][:column]
            position += 3
            continue
        character = text[position]
        position += 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            lines.append("") if row == len(lines) else None
        else:
            lines[row] = lines[row].ljust(column)[:column] + character + lines[row][column + 1 :]
            column += 1
    return lines


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


@pytest.fixture
def clock():
    return Clock()


def test_the_line_shows_everything_it_is_told(terminal, clock):
    line = StatusLine(terminal, True, clock=clock)
    line.update(
        step=1234,
        steps_per_second=56.78,
        loss=0.12345,
        worst_site="fc1",
        data_wait_share=0.021,
        memory_bytes=1.2e9,
        cost_share=0.029,
    )
    assert display(terminal.getvalue()) == [
        "clew: step 1,234  56.8/s  loss 0.1235  worst fc1  data wait 2.1 %  1.20 GB"
    ], "eighty columns: the last part gives way"
    line.close()
    assert display(terminal.getvalue()) == [""]


def test_it_draws_five_times_a_second_at_most(terminal, clock):
    line = StatusLine(terminal, True, clock=clock)
    for step in range(1000):
        clock.now += 0.001
        line.update(step=step)
    line.close()
    assert terminal.getvalue().count("step") == 5


def test_prints_of_the_script_stand_alone(terminal, clock):
    line = StatusLine(terminal, True, clock=clock)
    for step in range(3):
        clock.now += 1
        line.update(step=step, loss=0.5)
        print(f"epoch {step}", file=terminal)
    print("warning", file=terminal)
    line.close()
    assert display(terminal.getvalue()) == ["epoch 0", "epoch 1", "epoch 2", "warning", ""]


def test_nothing_is_drawn_into_an_unfinished_line(terminal, clock):
    line = StatusLine(terminal, True, clock=clock)
    print("\r 10%|###", end="", file=terminal)
    clock.now += 1
    line.update(step=1)
    print("\r 20%|######", end="", file=terminal)
    assert display(terminal.getvalue()) == [" 20%|######"]
    print(file=terminal)
    clock.now += 1
    line.update(step=2)
    assert display(terminal.getvalue()) == [" 20%|######", "clew: step 2"]
    line.close()


def test_a_message_of_ours_stands_above_the_line(terminal, clock):
    line = StatusLine(terminal, True, clock=clock)
    line.update(step=1)
    line.message("clew: fault at fc1")
    clock.now += 1
    line.update(step=2)
    assert display(terminal.getvalue()) == ["clew: fault at fc1", "clew: step 2"]
    line.close()


def test_streams_are_given_back(terminal, clock):
    line = StatusLine(terminal, True, clock=clock)
    assert "write" in vars(terminal)
    line.close()
    line.close()
    assert not {"write", "flush"} & set(vars(terminal))


def test_a_cover_of_the_script_survives_ours(terminal, clock):
    heard = []
    first = terminal.write
    terminal.write = lambda text: heard.append(text) or first(text)
    mine = terminal.write
    line = StatusLine(terminal, True, clock=clock)
    line.close()
    assert terminal.write is mine
    line = StatusLine(terminal, True, clock=clock)
    below = terminal.write
    terminal.write = over = lambda text: heard.append(text) or below(text)
    line.close()
    assert terminal.write is over
    print("still here", file=terminal)
    assert display(terminal.getvalue()) == ["still here", ""]


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_without_a_terminal_nothing_is_drawn_or_covered(stream, clock):
    line = StatusLine(stream, True, clock=clock)
    line.update(step=1)
    assert not line.enabled
    assert not line.is_due
    assert stream is None or stream.getvalue() == ""
    line.message("clew: still said")
    assert stream is None or stream.getvalue() == "clew: still said\n"
    line.close()


def test_a_terminal_that_went_away_is_no_error(terminal, clock):
    line = StatusLine(terminal, True, clock=clock)
    terminal.close()
    line.update(step=1)
    line.message("lost")
    line.close()
    assert not line.enabled


SCRIPT = """
    import subprocess, sys
    from clew.render.status import StatusLine
    clock = iter(range(10**6)).__next__
    before = type(sys.stdout), id(sys.stdout), sys.stdout.isatty(), sys.stdout.encoding
    line = StatusLine(sys.stderr, True, clock=clock)
    assert before == (type(sys.stdout), id(sys.stdout), sys.stdout.isatty(), sys.stdout.encoding)
    line.update(step=1, loss=0.25)
    print("hello")
    line.update(step=2, loss=0.25)
    sys.stdout.write("from stdout\\n")
    line.update(step=3)
    sys.stdout.flush()
    subprocess.run(["echo", "from a subprocess"])
    line.update(step=4)
    try:
        raise ValueError("boom")
    finally:
        line.close()
"""


def test_on_a_real_terminal_the_script_reads_as_if_alone():
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    output = b""
    while chunk := _read(master):
        output += chunk
    os.close(master)
    assert process.wait() == 1
    assert b"step 1" in output
    lines = display(output.decode())
    assert lines[:3] == ["hello", "from stdout", "from a subprocess"]
    assert lines[3] == "Traceback (most recent call last):"
    assert lines[-2:] == ["ValueError: boom", ""]


def _read(descriptor):
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""


LONG = (
    "clew: error O01 missing-zero-grad: the gradients of earlier steps are never cleared\n"
    "        change: call SGD.zero_grad() once for each SGD.step() at /home/me/a/very/long/path/of/a/project/train.py:5"
)


def test_what_is_said_fits_into_the_terminal(terminal):
    StatusLine(terminal, False).message(LONG)
    assert terminal.getvalue() == (
        "clew: error O01 missing-zero-grad: the gradients of earlier steps are never\n"
        "      cleared\n"
        "        change: call SGD.zero_grad() once for each SGD.step() at\n"
        "        /home/me/a/very/long/path/of/a/project/train.py:5\n"
    )


def test_what_is_said_into_a_pipe_stays_whole():
    pipe = io.StringIO()
    StatusLine(pipe, False).message(LONG)
    assert pipe.getvalue() == LONG + "\n"


@pytest.mark.parametrize(
    ("written", "start"),
    [("\r3/4", "\n"), ("all\n", ""), ("bar\r\x1b[K", ""), ("\x1b[2K\r", ""), ("", "")],
)
def test_a_message_begins_on_a_line_of_its_own(monkeypatch, written, start):
    class Pipe(io.StringIO):
        pass

    pipe, other = Pipe(), Pipe()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(sys, "stdout", other)
    line = StatusLine(pipe, False, follows=True)
    print(written, end="", file=pipe)
    print("elsewhere", end="", file=other)
    line.message("clew: one")
    line.message("clew: two")
    line.close()
    assert pipe.getvalue() == f"{written}{start}clew: one\nclew: two\n"
    assert not {"write", "flush"} & {*vars(pipe), *vars(other)}
