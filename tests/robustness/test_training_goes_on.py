"""A training under ``clew run`` goes on whatever happens around or inside clew, and its record stays sound."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest

import clew
from zygote import Ending, Job, Zygote, run_apart

TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(batch=None):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 3) if batch is None else batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()
"""


class Project:
    """A training script that can be run plain and under clew, and the record of it."""

    def __init__(self, zygote: Zygote, folder) -> None:
        self.zygote = zygote
        self.folder = folder
        self.script = folder / "train.py"
        self.runs = folder / "clew" / "runs"

    def write(self, text: str) -> None:
        self.script.write_text(TRAIN + textwrap.dedent(text), encoding="utf-8")

    def jobs(self, *options: str, **environment: str) -> list[Job]:
        """Return both sides, each with a working folder of its own."""
        sides = {"plain": [], "clew": ["-m", "clew", "run", "--budget", "off", *options]}
        for name in sides:
            (self.folder / name).mkdir(exist_ok=True)
        return [
            Job(self.folder / name, [*words, str(self.script)], environment) for name, words in sides.items()
        ]

    def both(self, *options: str, apart: bool = False, **environment: str) -> tuple[Ending, Ending]:
        """Run both sides and compare what the script itself printed and returned."""
        run = run_apart if apart else self.zygote.run
        plain, under_clew = run(*self.jobs(*options, **environment))
        assert under_clew.stdout == plain.stdout
        assert under_clew.own_stderr == plain.stderr
        assert under_clew.code == plain.code
        return plain, under_clew

    def run(self, *options: str) -> Ending:
        """Run the side of clew alone."""
        return self.zygote.run(self.jobs(*options)[1])[0]

    @property
    def record(self) -> clew.Run:
        """The one run there is."""
        (folder,) = self.runs.iterdir()
        return clew.open_run(folder)


@pytest.fixture
def project(zygote, tmp_path):
    return Project(zygote, tmp_path)


def test_script_that_changes_its_folder(project):
    project.write("""
        import os
        print(step())
        os.makedirs("deep", exist_ok=True)
        os.chdir("deep")
        print(step(), os.listdir("."))
        os.chdir("/")
        print(step())
    """)
    project.both("--out", "runs")
    run = project.record
    assert (run.state, run.problems, len(run.scalars("loss")["loss"])) == ("complete", [], 3)


def test_exception_inside_a_model(project):
    """The traceback of the script has no frame of clew's, though the call went through it."""
    project.write("""
        class Net(torch.nn.Module):
            def forward(self, x):
                return self.inner(x)
            def inner(self, x):
                raise ValueError("in forward")
        step()
        torch.nn.Sequential(torch.nn.ReLU(), Net())(torch.ones(2))
    """)
    plain, _ = project.both()
    assert plain.code == 1
    run = project.record
    assert run.state == "died"
    assert run.info.exit_code == 1
    assert len(run.scalars("loss")["loss"]) == 1
    assert any("ValueError: in forward" in note for note in run.info.notes)


def test_exception_inside_backward_and_optimizer(project):
    project.write("""
        import traceback
        class Bad(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2
            @staticmethod
            def backward(ctx, grad):
                raise ArithmeticError("in backward")
        print(step())
        try:
            Bad.apply(model(torch.ones(1, 3))).sum().backward()
        except ArithmeticError as error:
            print("caught", error)
        print(step())
        def closure():
            raise KeyError("in closure")
        optimizer.step(closure)
    """)
    plain, _ = project.both()
    assert "KeyError: 'in closure'" in plain.stderr


def test_forked_child_writes_nothing(project):
    """A child that the script forks trains on without a record; the parent's record stays whole."""
    project.write("""
        import os, sys
        print(step())
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            for _ in range(3):
                step()
            print("child", step())
            sys.exit(4)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(step())
    """)
    _, end = project.both()
    run = project.record
    assert (run.state, run.problems, len(run.scalars("loss")["loss"])) == ("complete", [], 2)
    assert end.stderr.count("clew: recorded") == 1


def test_subprocess_is_not_recorded(project):
    project.write("""
        import subprocess, sys
        if len(sys.argv) == 1:
            step()
            subprocess.run([sys.executable, __file__, "inner"], check=True)
        else:
            print("inner", step(), step())
    """)
    project.both()
    assert len(project.record.scalars("loss")["loss"]) == 1


def test_loader_workers_fail(project):
    project.write("""
        from torch.utils.data import DataLoader, Dataset
        class Data(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                if index == 3:
                    raise LookupError("row 3")
                return torch.ones(3) * index
        try:
            for batch in DataLoader(Data(), batch_size=1, num_workers=1):
                print(step(batch))
        except LookupError as error:
            print("caught", type(error).__name__, "row 3" in str(error))
        print(step())
    """)
    project.both()
    assert len(project.record.scalars("loss")["loss"]) == 4


TRAIN_THREE = "\nfor _ in range(3):\n    print(step())\n"
BROKEN_TENSOR = """
    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.Tensor.detach or "numel" in str(function) or "shape" in str(function):
                raise RuntimeError("this tensor does not want to be looked at")
            return super().__torch_function__(function, types, args, kwargs or {})
    class Shy(torch.nn.Module):
        def forward(self, x):
            return x.as_subclass(Odd)
    shy = Shy()
    def run_shy():
        shy(torch.ones(2))
    for _ in range(3):
        run_shy()
"""


def test_tensor_that_breaks_measuring(project):
    """Whatever a tensor subclass does to clew, the script never notices and the rest is recorded."""
    project.write(BROKEN_TENSOR + TRAIN_THREE)
    project.both()
    run = project.record
    assert run.state == "complete"
    assert len(run.scalars("loss")["loss"]) == 3
    assert run.find("0", kind="output")


FAULT = """
import clew.capture.torch.recorder as recorder
def broken(self, *args, **kwargs):
    raise ZeroDivisionError("injected")
recorder.Recorder.{method} = broken
"""


@pytest.mark.parametrize(
    "method",
    [
        "measure_keyed",
        "measure_updates",
        "take_loss",
        "add_scalar",
        "before_event",
        "_settle_scalars",
        "cut_rows",
        "describe",
    ],
)
def test_fault_inside_clew(method, project):
    """A fault of clew's own is in the record and told once; the training prints what it always prints."""
    project.write(FAULT.format(method=method) + TRAIN_THREE)
    plain, under_clew = project.both()
    assert plain.code == 0
    assert "injected" in under_clew.stderr
    told = re.findall(r"^clew: fault at (.+), switched off", under_clew.stderr, re.MULTILINE)
    assert told
    assert len(told) == len(set(told))
    assert "inside clew itself; training was not touched" in under_clew.stderr
    faults = project.record.faults()
    assert {fault.error for fault in faults} == {"ZeroDivisionError: injected"}
    assert all("injected" in fault.traceback for fault in faults)
    if method not in ("take_loss", "before_event"):
        assert len(project.record.scalars("loss")["loss"]) == 3


def test_fault_at_the_start(project):
    project.write(TRAIN_THREE)
    (project.folder / "sitecustomize.py").write_text(
        "import clew.capture.provenance as p\np.collect = None\n", encoding="utf-8"
    )
    plain, under_clew = project.both(apart=True, PYTHONPATH=str(project.folder))
    assert plain.code == 0
    assert "clew: not recording, fault inside clew" in under_clew.stderr


def test_no_place_for_the_record(project):
    project.write(TRAIN_THREE)
    taken = project.folder / "taken"
    taken.write_text("a file", encoding="utf-8")
    end = project.run("--out", str(taken))
    assert end.code == 2
    assert "clew: the place for runs is a file" in end.stderr
    assert end.stdout == ""


def test_record_vanishes_while_training(project):
    project.write("""
        import shutil
        print(step())
        shutil.rmtree("runs", ignore_errors=True)
        for _ in range(3):
            print(step())
    """)
    plain, _ = project.both()
    assert plain.code == 0


def test_reader_goes_away(project):
    """A pipe that closes early ends the script as it ends it under python."""
    project.write("for number in range(20000):\n    print('line', number)\nstep()\n")
    codes = []
    for job in project.jobs():
        command = [sys.executable, *job.argv]
        with subprocess.Popen(command, cwd=job.folder, stdout=-1, stderr=-1, text=True) as process:
            process.stdout.readline()
            process.stdout.close()
            stderr = process.stderr.read()
            codes.append((process.wait(timeout=300), "BrokenPipeError" in stderr))
    assert codes[1] == codes[0]


def test_training_in_a_thread_that_outlives_main(project):
    project.write("""
        import threading, time
        def work():
            for _ in range(4):
                time.sleep(0.05)
                print(step())
        threading.Thread(target=work).start()
        print("main ends")
    """)
    project.both()
    assert len(project.record.scalars("loss")["loss"]) == 4


def test_torch_is_imported_late_or_never(project):
    project.script.write_text("print('no torch here')", encoding="utf-8")
    _, end = project.both(apart=True)
    assert "the script never imported torch; nothing was recorded" in end.stderr
    assert not list(project.runs.iterdir()) if project.runs.exists() else True


def test_watch_inside_a_recorded_script(project):
    """``clew.watch`` in a script that is itself under ``clew run``: both records are there, nothing doubles."""
    project.write("""
        import clew
        with clew.watch(model, optimizer, out="inner", budget="off"):
            for _ in range(3):
                step()
        step()
    """)
    end = project.run()
    assert end.code == 0, end.stderr
    (inner,) = (project.folder / "clew" / "inner").iterdir()
    assert len(clew.open_run(inner).scalars("loss")["loss"]) == 3
    assert len(project.record.scalars("loss")["loss"]) == 4
