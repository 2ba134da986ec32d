"""``clew run`` from end to end: the demo, as a pipe and as a person on a terminal see it."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clew.cli import main
from zygote import Job

DEMO = Path(__file__).parents[2] / "examples" / "demo_broken.py"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the folder in which the demo was recorded, and how that went."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "clew.toml").write_text('out = "records"\nevery = 1\n')
    command = [sys.executable, "-m", "clew", "run", "--name", "demo", str(DEMO)]
    return folder, subprocess.run(
        command, check=False, cwd=folder, capture_output=True, text=True, timeout=300
    )


def test_the_script_speaks_on_stdout_and_clew_on_stderr(recorded, zygote, tmp_path):
    _, done = recorded
    assert done.returncode == 0
    (plain,) = zygote.run(Job(tmp_path, [str(DEMO)]))
    assert done.stdout == plain.stdout
    lines = done.stderr.splitlines()
    assert re.fullmatch(r"why step \d+ went wrong", lines[0])
    last = lines[
        next(i for i, line in enumerate(lines) if line.startswith("clew: recorded records/demo, ")) :
    ]
    assert re.fullmatch(r"clew: 320 steps, last loss NaN, cost of clew \S+ %", last[1])
    assert re.fullmatch(r"clew: worst site: .+ \((NaN|Inf) in \w+ at step \d+\)", last[2])
    assert re.search(r"N0\d", last[4])
    assert last[-1] == "clew: next: clew doctor records/demo"


def test_clew_speaks_where_it_began_to_however_the_script_leaves_its_streams(zygote, tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys, torch\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(2):\n"
        "    model(torch.ones(2, 3)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "sys.stdout = sys.stderr = open(os.devnull, 'w')\n"
    )
    ending = zygote.clew(tmp_path, "run", "train.py")
    assert ending.code == 0
    assert "clew: 2 steps" in ending.stderr


def test_the_record_names_where_it_went_wrong(recorded, monkeypatch, capsys):
    monkeypatch.chdir(recorded[0])
    assert main(["ls", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["name"], run["state"], run["steps"], run["loss"]) == ("demo", "complete", 320, "NaN")
    assert main(["show"]) == 0
    page = capsys.readouterr().out
    assert "NaN first seen at step" in page or "inf first seen at step" in page
    for site in ("fc1", "fc2", "head"):
        assert re.search(rf"^  {site} +(NaN|inf) in ", page, re.MULTILINE)


def test_on_a_terminal_a_line_shows_where_training_stands(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch\n"
        "net = torch.nn.Linear(4, 1)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for step in range(60):\n"
        "    opt.zero_grad(); net(torch.ones(2, 4)).sum().backward(); opt.step(); time.sleep(0.01)\n"
        "print('done')\n"
        "print('\\r60/60', end='', flush=True)\n"
    )
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "clew", "run", str(script)]
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        command, cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            chunk = os.read(master, 4096)
        except OSError:
            break
        shown += chunk
    os.close(master)
    assert process.wait() == 0
    text = shown.decode()
    assert re.search(r"\r\x1b\[Kclew: step \d+ .*loss -?\d", text)
    assert "\r\x1b[Kdone\r\n" in text, "the line is gone before the script prints"
    assert "\r60/60\r\nclew: recorded " in text, "clew's words begin on a line of their own"
    assert text.rstrip().splitlines()[-1].startswith("clew: next: clew show ")


@pytest.mark.parametrize(("last", "start"), [("2/2", "2/2\n"), ("2/2\\n", "2/2\n"), ("", "")])
def test_in_a_pipe_the_summary_begins_on_a_line_of_its_own(zygote, tmp_path, last, start):
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(2):\n"
        "    model(torch.ones(2, 3)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        f"sys.stderr.write('{last}')\n"
        "print(end='no line')\n"
        "sys.stderr = None\n"
    )
    ending = zygote.clew(tmp_path, "run", "--name", "run", "train.py")
    assert ending.stderr.startswith(f"{start}clew: recorded runs/run")
    assert ending.stdout == "no line"
