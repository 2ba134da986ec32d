"""``CLEW_LOG``: what clew says of its own work, and that a script sees nothing of it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from clew import logs
from clew.cli import main
from clew.errors import UsageError

SCRIPT = """
import logging
logging.basicConfig(level=logging.DEBUG, format="%(name)s %(message)s")
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
logging.info("done")
"""


@pytest.fixture(autouse=True)
def quiet_again():
    yield
    logs.configure({})


def _run(folder, **environment):
    (folder / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "clew", "run", "train.py"]
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()


def test_a_script_that_logs_everything_sees_nothing_of_clew(tmp_path):
    lines = _run(tmp_path)
    assert "root done" in lines
    assert not [line for line in lines if line.startswith("clew.")]


def test_the_log_goes_to_stderr_or_to_a_file_of_the_rank(tmp_path):
    lines = _run(tmp_path, CLEW_LOG="store=debug", CLEW_LOG_FILE="clew.log", RANK="1")
    assert not [line for line in lines if "clew.store" in line]
    written = (tmp_path / "clew.log.rank1").read_text()
    assert "DEBUG clew.store: writing" in written
    assert "ends: complete" in written


def test_levels_by_room(capsys):
    logs.configure({"CLEW_LOG": "warning,replay=debug"})
    logs.room_log("replay").debug("seen")
    logs.room_log("store").info("not seen")
    logs.room_log("store").warning("seen too")
    shown = capsys.readouterr().err
    assert "DEBUG clew.replay: seen" in shown
    assert "not seen" not in shown
    assert "WARNING clew.store: seen too" in shown


def test_without_the_variable_nothing_is_enabled():
    logs.configure({})
    assert not any(logs.room_log(room).isEnabledFor(logging.CRITICAL) for room in logs.ROOMS)
    assert not logging.getLogger("clew").handlers


@pytest.mark.parametrize(
    ("text", "message"),
    [("loud", "'loud' is no level"), ("stor=info", "'stor' is no room"), ("replay=", "'' is no level")],
)
def test_a_wrong_word_is_an_error(text, message):
    with pytest.raises(UsageError, match=message):
        logs.parse_levels(text)


def test_the_command_line_says_what_is_wrong_with_it(monkeypatch, capsys):
    monkeypatch.setenv("CLEW_LOG", "inf")
    assert main(["ls"]) == 2
    assert "did you mean 'info'?" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="cannot write the log"):
        logs.configure({"CLEW_LOG": "info", "CLEW_LOG_FILE": str(tmp_path / "none" / "clew.log")})
