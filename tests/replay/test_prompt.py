"""The prompt on a real terminal, the same through a file of commands, and the view over the whole screen."""

import io
import json
import re
import sys

import pytest
from pty_terminal import ESCAPES, Pty

from clew.cli import main
from clew.render.full_screen import FullScreen, can_draw
from clew.render.prompt import Script
from clew.replay.reply import Reply

TRAIN = """import torch

torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 5)
        self.last = torch.nn.Linear(5, 3, bias=False)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(h)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in [torch.ones(6, 4), torch.zeros(6, 4)]:
    optimizer.zero_grad()
    out = model(x)
    loss = torch.log(out.abs() * x.abs().sum()).mean()
    loss.backward()
    optimizer.step()
print("done")
"""
PLAIN = """import torch, clew
def f(x):
    h = x * 2
    return clew.breakpoint(h, x) + 1
print(f(torch.ones(2)))
"""


@pytest.fixture(scope="module")
def project(zygote, tmp_path_factory):
    """Return a folder with a script and the run of it."""
    folder = tmp_path_factory.mktemp("prompt")
    (folder / "train.py").write_text(TRAIN)
    done = zygote.clew(folder, "run", "--no-status", "--name", "run", "train.py")
    assert done.code == 0, done.stderr
    return folder


def test_a_conversation_on_a_terminal(project):
    """Breakpoint, completion, Ctrl-C, a value, and the training goes on to its end."""
    words = [
        sys.executable,
        "-m",
        "clew",
        "run",
        "--no-status",
        "--name",
        "talk",
        "--break",
        "last:forward",
        "train.py",
    ]
    terminal = Pty(words, project)
    assert "step 0: after last (forward)" in terminal.wait_for("(clew) ")
    terminal.type("out.shap\t\n")
    assert "torch.Size([6, 3])" in terminal.wait_for("(clew) ")
    terminal.type("half a li")
    terminal.wait_for("half a li")
    terminal.interrupt("interrupted")
    terminal.type("1 +\n")
    terminal.wait_for("no Python expression")
    terminal.wait_for("(clew) ")
    terminal.type("shell\n")
    terminal.wait_for(">>> ")
    terminal.type("torch.rand(1).shape\n")
    terminal.wait_for("torch.Size([1])")
    terminal.wait_for(">>> ")  # a Ctrl-D typed before the prompt would be lost
    terminal.type("\x04")
    terminal.wait_for("(clew) ")
    terminal.type("continue\n")
    assert "step 1: after last (forward)" in terminal.wait_for("(clew) ")
    terminal.type("\x04")
    terminal.wait_for("done")
    terminal.wait_for("recorded")
    assert terminal.close() == 0


def test_clew_breakpoint_on_a_terminal(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    terminal = Pty([sys.executable, "plain.py"], tmp_path)
    shown = terminal.wait_for("(clew) ")
    assert "plain.py:4" in shown
    assert "out" in shown
    terminal.type("h + x\n")
    assert "= [3, 3]" in terminal.wait_for("(clew) ")
    terminal.type("h.zero_()\nc\n")
    terminal.wait_for("tensor([3., 3.])")
    assert terminal.close() == 0


def test_a_replay_on_a_terminal(project, golden):
    """The transcript at 80 columns; going back executes nothing and gives the values of that moment."""
    terminal = Pty([sys.executable, "-m", "clew", "replay", "run"], project)
    transcript = terminal.wait_for("(clew) ")
    for line in (
        "where",
        "back",
        "stats",
        "goto first",
        "queue 3",
        "break op:log",
        "continue",
        "args[0]",
        "quit",
    ):
        terminal.type(line + "\n")
        if line != "quit":
            transcript += terminal.wait_for("(clew) ")
    assert terminal.close() == 0
    assert max(map(len, transcript.splitlines())) <= 80
    golden("replay.txt", transcript)


def replay(project, capfd, monkeypatch, text, *options):
    monkeypatch.chdir(project)
    (project / "commands").write_text(text)
    code = main(["replay", "run", "--commands", "commands", *options])
    return code, capfd.readouterr()


def test_commands_from_a_file_give_json(project, capfd, monkeypatch):
    code, captured = replay(
        project, capfd, monkeypatch, "# a comment\nout\nnonsense\n", "--json", "--step", "1"
    )
    assert code == 0
    # Under pytest the script's own print does not go to descriptor 1, where it would be kept away.
    lines = [line for line in captured.out.splitlines() if line != "done"]
    verdict, place, value, error, bye = map(json.loads, lines)
    assert (verdict["kind"], verdict["replay"]) == ("exactness", "identical"), "the verdict comes first"
    assert place["line"]["text"].startswith("loss = torch.log(")
    assert value["command"] == "out"
    assert value["values"][0]["facts"]["stats"]["neg_inf"] == 18
    assert error["kind"] == "error"
    assert bye["resume"] == "quit"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "9", "--commands", "c"], "the run has no step 9"),
        ([], "there is no terminal to talk to"),
        (["--json"], "--json needs commands"),
        (["--ops", "x", "--commands", "c"], "'x' is no range of operations"),
        (["--memory", "much", "--commands", "c"], "is not a size"),
    ],
)
def test_what_cannot_be_replayed_is_said(project, capfd, monkeypatch, words, said):
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    (project / "c").write_text("quit\n")
    assert main(["replay", "run", *words]) == 2
    assert said in capfd.readouterr().err


class Still:
    """A debugger that stands at one place and knows two operations."""

    def enter(self):
        return Reply("nothing")

    def execute(self, line):
        both = [{"index": 1, "op": "log", "site": "fc", "here": True, "bad": True}]
        return Reply(
            "queue",
            {"operations": [*both, {"index": 2, "op": "mean", "site": "", "here": False, "bad": False}]},
        )

    def complete(self, text):
        return []

    def interact(self, run):
        run({})


def test_the_view_over_the_whole_screen(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(TRAIN)
    view = FullScreen(Still(), Script([], io.StringIO()))
    line = {"file": str(file), "line": 22, "text": "", "function": "<module>"}
    values = [{"name": "out", "text": "float32[6, 3]"}]
    view.show(Reply("exactness", {"replay": "identical", "notes": [], "step": 1, "operations": 2}))
    view.show(
        Reply(
            "place",
            {
                "title": "1 of 2  log",
                "site": "fc",
                "phase": "forward",
                "line": line,
                "values": values,
                "notes": [],
            },
        )
    )
    drawn = ESCAPES.sub("", view.draw(80, 24))
    assert len(drawn.splitlines()) <= 23
    assert max(map(len, drawn.splitlines())) == 80
    assert ">  22     loss = torch.log(" in drawn
    assert re.search(r">\s+1 log fc", drawn)
    assert "float32[6, 3]" in drawn
    assert "replay: identical" in drawn
    small = ESCAPES.sub("", view.draw(40, 8))
    assert small.splitlines() == [
        "1 of 2  log",
        "train.py:22 ",
        "  out  float32[6, 3]",
    ], "no room for panels"
    view.show(Reply("text", {"text": "an answer"}))
    assert "an answer" in ESCAPES.sub("", view.draw(80, 24))
    view.show(Reply("text", {"text": "\n".join(f"line {number}" for number in range(40))}))
    drawn = ESCAPES.sub("", view.draw(80, 24))
    assert len(drawn.splitlines()) <= 23
    assert "line 13" in drawn, "a long answer takes the room of the source"
    assert "… 26 more lines" in drawn


def test_colours_can_be_switched_off_and_a_dumb_terminal_is_left_alone(monkeypatch):
    view = FullScreen(Still(), Script([], io.StringIO()))
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in view.draw(80, 24)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in view.draw(80, 24)
    screen = io.StringIO()
    assert not can_draw(screen)
    screen.isatty = lambda: True
    monkeypatch.setenv("TERM", "dumb")
    assert not can_draw(screen)
    monkeypatch.setenv("TERM", "xterm")
    assert can_draw(screen)
