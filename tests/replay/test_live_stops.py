"""A training stops where it was asked to, and what is typed there leaves no trace in it."""

import textwrap

import pytest

from clew.cli import main
from zygote import Job

TRAIN = """
import hashlib, random
import numpy as np
import torch
import clew
torch.manual_seed(0); random.seed(0); np.random.seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.b = torch.nn.Linear(5, 3)
    def forward(self, x):
        h = self.a(x)
        h = torch.relu(self.norm(h))
        return self.b(torch.nn.functional.dropout(h, 0.2))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
np.random.randn()
for i in range(5):
    x = torch.randn(8, 4) + random.random() + np.random.randn()
    optimizer.zero_grad()
    loss = clew.breakpoint(model(x).square().mean())
    loss.backward()  # BACKWARD
    optimizer.step()
state = [*model.state_dict().values(), torch.rand(3), torch.tensor([random.random(), np.random.randn()])]
print("END", hashlib.sha256(b"".join(t.numpy().tobytes() for t in state)).hexdigest())
"""
DISTURB = """
torch.rand(5); model.a.weight.data.zero_(); model.norm.running_mean.fill_(7)
model(torch.randn(4, 4)).sum().backward()
optimizer.step(); optimizer.zero_grad(); model.eval()
random.random(); np.random.randn()
mine = 3
"""
CLEW_RUN = ["-m", "clew", "run", "--no-status", "--name", "run"]
LINE = next(number for number, line in enumerate(TRAIN.splitlines(), 1) if "# BACKWARD" in line)


@pytest.fixture
def run(zygote, tmp_path):
    """Return a function that runs the training under clew with options and commands, beside a plain one."""

    def start(*options, commands="", script=TRAIN):
        (tmp_path / "train.py").write_text(script)
        (tmp_path / "commands").write_text(textwrap.dedent(commands))
        given = ["--commands", "commands"] if commands else []
        words = ["-m", "clew", "run", "--no-status", "--name", "run", *options, *given, "train.py"]
        (tmp_path / "plain").mkdir(exist_ok=True)
        (tmp_path / "plain" / "train.py").write_text(script)
        jobs = [Job(tmp_path, words, {}), Job(tmp_path / "plain", ["train.py"], {})]
        stopped, plain = zygote.run(*jobs)
        assert last_line(stopped.stdout) == last_line(plain.stdout), stopped.stderr
        return stopped

    return start


def last_line(text):
    lines = [line for line in text.splitlines() if line.startswith("END")]
    assert lines, text
    return lines[-1]


def titles(text):
    return [line for line in text.splitlines() if line.startswith("step ")]


def test_stops_everywhere_and_a_heavy_hand_leave_no_trace(run):
    done = run(
        "--break", "a:forward if step == 1",
        "--break", "b:backward if step == 2",
        "--break", "b.*:update before if step == 3",
        commands=(DISTURB + "c\n") * 3,
    )  # fmt: skip
    assert titles(done.stdout) == [
        "step 1: after a (forward)",
        "step 2: the gradient arrives at b (backward)",
        "step 3: before the update of b.weight",
    ]
    assert "Error" not in done.stdout


def test_conditions_see_values_and_change_nothing(run):
    done = run(
        "--break", "norm:forward if stats.abs_max > 1e9 or torch.rand(1) > 2 or out.mul_(0).sum() > 1",
        "--break", "a:forward before if args[0].shape == (8, 4) and step == 4",
        commands="args[0].shape\nc",
    )  # fmt: skip
    assert titles(done.stdout) == ["step 4: before a (forward)"]
    assert "torch.Size([8, 4])" in done.stdout


def test_stepping_through_modules(run):
    done = run("--shell-at-step", "1", commands="step\nstep\nnext\nfinish\nwhere\ndetach")
    assert titles(done.stdout)[:5] == [
        "step 1 begins",
        "step 1: before (model) (forward)",
        "step 1: before a (forward)",
        "step 1: after a (forward)",
        "step 1: after (model) (forward)",
    ]
    assert "loss = clew.breakpoint(model(x).square().mean())" in done.stdout


def test_a_line_an_operation_and_a_watched_value(run):
    done = run(
        "--break", f"train.py:{LINE} if i == 2",
        "--break", "op:relu before if step == 3",
        commands="float(loss) > 0\nc\nsite\nbreak off 2\nbreak off 1\nwatch step\nc\nc\ndetach",
    )  # fmt: skip
    assert titles(done.stdout)[:3] == [
        f"step 2: at train.py:{LINE}",
        "step 3: before relu in (model)",
        "step 4: before (model) (forward)",
    ]
    assert "fused paths are off" in done.stderr


def test_backward_after_gives_what_leaves_a_module(run):
    done = run("--break", "norm:backward after if step == 1", commands="out[0].shape\nc\nc\nc\nc\nc")
    assert titles(done.stdout) == ["step 1: the gradient has passed norm (backward)"]
    assert "torch.Size([8, 5])" in done.stdout


def test_without_a_terminal_a_stop_is_told_and_the_training_goes_on(run):
    done = run("--break", "a:forward if step == 1")
    assert (
        "clew: step 1: after a (forward), stopped by a:forward if step == 1; there is no terminal"
        in done.stderr
    )
    assert done.stderr.count("clew: the breakpoint at") == 1, "clew.breakpoint says once that it is off"


def test_a_condition_that_fails_stops_once_and_is_taken_away(run):
    done = run("--break", "a:forward if out.nonsense", commands="out.shape\nbreak\nc")
    assert "is taken away: AttributeError: 'Tensor' object has no attribute 'nonsense'" in done.stderr
    assert "no breakpoints" in done.stdout
    assert titles(done.stdout) == ["step 0: after a (forward)"]


def test_quit_ends_the_training(zygote, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "commands").write_text("back\nquit\n")
    words = [*CLEW_RUN, "--break", "step:1", "--commands", "commands", "train.py"]
    [done] = zygote.run(Job(tmp_path, words, {}))
    assert done.code == 1
    assert "END" not in done.stdout
    assert "a training that goes on cannot go back" in done.stdout
    assert "clew replay RUN --step 1" in done.stdout


def test_a_post_mortem_shows_the_frames_with_values(zygote, tmp_path):
    broken = TRAIN.replace("    loss.backward()", "    loss.backward() if i < 2 else (x @ torch.ones(3, 4))")
    (tmp_path / "train.py").write_text(broken)
    (tmp_path / "commands").write_text("where\nx.shape\nerror\nstep\nbreak a:forward\nquit\n")
    words = [*CLEW_RUN, "--pdb", "--commands", "commands", "train.py"]
    [done] = zygote.run(Job(tmp_path, words, {}))
    assert done.code == 1
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x4 and 3x4)" in done.stdout
    assert "torch.Size([8, 4])" in done.stdout
    assert "the program has ended, there is nothing to step to" in done.stdout
    assert "clew: RuntimeError at step 2" in done.stderr, "the card comes as ever"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--break", "a:sideways"], "unknown phase 'sideways'"),
        (["--commands", "c"], "--commands without a place to stop"),
        (["--break", "a:forward", "--commands", "nothing"], "the commands cannot be read"),
    ],
)
def test_a_wrong_request_is_refused_before_the_script_starts(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('started')")
    assert main(["run", *words, "train.py"]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "started" not in captured.out


def test_a_place_that_does_not_exist_is_told_with_the_nearest_one(run):
    done = run(
        "--break", "aa", "--break", "op:rellu", "--break", "trian.py:3", "--break", f"train.py:{LINE + 100}",
        "--break", "norm.wait:update", "--break", "step:99", "--break", "a if out.max() > 1e9",
    )  # fmt: skip
    told = " ".join(done.stderr.split())
    assert "'aa' has nowhere to stop so far: no module is called 'aa'" in told
    assert "no operation is called 'rellu'; did you mean 'relu'?" in told
    assert "no file 'trian.py' was loaded; did you mean 'train.py'?" in told
    assert f"there is nothing to execute in line {LINE + 100}; line" in told
    assert "no parameter is called 'norm.wait'; did you mean 'norm.weight'?" in told
    assert "the training never came to the breakpoint 'step:99'" in told
    assert "out.max() > 1e9" not in told, "its place was reached"


def test_next_goes_from_line_to_line_and_watch_sees_the_names_of_the_loop(run):
    commands = "next\nnext\nmodel.a.weight.data.zero_().sum()\nbreak off 1\nwatch loss.item()\nc\nbreak nosuch\ndetach"
    done = run("--break", f"train.py:{LINE} if i == 1", commands=commands)
    places = [line for line in titles(done.stdout) if ": at train.py:" in line]
    assert [int(line.rpartition(":")[2]) for line in places] == [LINE, LINE + 1, LINE - 4]
    assert "= 0" in done.stdout, "a value is told as it was when it was looked at"
    assert "  loss.item() changed from " in done.stdout
    assert "breakpoint: nosuch (so far no module is called 'nosuch'" in done.stdout
