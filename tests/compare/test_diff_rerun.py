"""From the step to the operation: both scripts execute the step again; the first operation that differs is named."""

from __future__ import annotations

import json
import textwrap

import pytest

from clew.compare.operation import Operation, find_operation
from zygote import Job

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn

library = torch.library.Library("mine", "DEF")
library.define("scale(Tensor x) -> Tensor")
library.impl("scale", lambda x: x * 0.5, "CPU")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.fc1(torch.ops.mine.scale(x))
        h = F.gelu(h)
        return self.fc2(h)

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(5, 4) * step).square().mean().backward()
    optimizer.step()
"""

CHANGES = {
    "plain": ("", ""),
    "tanh": ("F.gelu(h)", 'F.gelu(h, approximate="tanh")'),
    # Another kernel under the same name, wrong in single precision only.
    "kernel": ("x * 0.5", "x * (0.5 if x.dtype == torch.float64 else 0.51)"),
}


@pytest.fixture(scope="module")
def runs(zygote, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rerun")
    words = ["--budget", "off", "--no-status", "--no-doctor", "--out", str(folder)]
    jobs = []
    for name, (old, new) in CHANGES.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(SCRIPT).replace(old, new, int(bool(old))))
        (folder / name).mkdir()
        script = str(folder / f"{name}.py")
        jobs.append(Job(folder / name, ["-m", "clew", "run", *words, "--name", f"run-{name}", script]))
    assert [done.code for done in zygote.run(*jobs)] == [0, 0, 0]
    return folder


@pytest.fixture
def rerun(runs, zygote):
    def rerun(name):
        words = ["diff", "run-plain", f"run-{name}", "--root", str(runs), "--rerun", "--json"]
        done = zygote.clew(runs, *words)
        assert done.code == 1, done.stderr
        return json.loads(done.stdout)

    return rerun


def test_the_operation_its_line_and_its_arguments_are_named(rerun):
    found = rerun("tanh")
    operation = found["operation"]
    assert operation is not None, found
    assert operation["op"].endswith("gelu")
    assert operation["line"] == "plain.py:17"
    assert operation["line_b"] == "tanh.py:17"
    assert operation["same_inputs"] is True
    assert operation["referee"] == ""
    assert "'tanh'" in found["sentence"]
    assert any("executed again: identical" in note for note in found["notes"])


def test_float64_is_the_referee_of_an_operation_that_was_given_the_same(rerun):
    found = rerun("kernel")
    operation = found["operation"]
    assert operation is not None, found
    assert (operation["op"], operation["same_inputs"]) == ("scale", True)
    assert operation["referee"].startswith("a is nearer to float64 (relative error 0 in a, 0.02 in b")
    assert operation["referee"] in found["sentence"]


def op(name, inputs, outputs, **more):
    return Operation(
        name, more.get("phase", "forward"), more.get("site", ""), f"train.py:{len(name)}", inputs, outputs,
        more.get("arguments", ""),
    )  # fmt: skip


def test_origin_and_amplification_are_told_apart():
    a = [op("mm", (1, 2), (3,)), op("gelu", (3,), (4,)), op("mm", (4, 5), (6,))]
    b = [op("mm", (1, 2), (3,)), op("gelu", (3,), (40,)), op("mm", (40, 5), (60,))]
    found = find_operation(a, b, {})
    assert (found.op, found.same_inputs, found.at) == ("gelu", True, (1, 1))
    b = [op("mm", (1, 20), (30,)), *b[1:]]
    found = find_operation(a, b, {})
    assert (found.op, found.same_inputs) == ("mm", False)
    assert "given something else already" in found.sentence


def test_an_operation_of_one_side_is_named_when_what_follows_differs():
    a = [op("mm", (1, 2), (3,)), op("sum", (3,), (4,))]
    b = [op("mm", (1, 2), (3,)), op("dropout", (3,), (7,)), op("sum", (7,), (8,))]
    found = find_operation(a, b, {})
    assert (found.op, found.side) == ("dropout", "b")
    assert "only run b executes it" in found.sentence


def test_an_operation_that_changes_nothing_is_no_difference():
    a = [op("mm", (1, 2), (3,)), op("sum", (3,), (4,))]
    b = [op("mm", (1, 2), (3,)), op("view", (3,), (3,)), op("sum", (3,), (4,))]
    assert find_operation(a, b, {}) is None


def test_the_referee_says_which_side_is_nearer_to_float64():
    import numpy as np

    from clew.compare.referee import say_referee

    exact = np.linspace(1.0, 2.0, 50)
    near, far = exact.astype(np.float32), (exact * 1.001).astype(np.float32)
    assert say_referee(near, far, exact).startswith("a is nearer to float64 (relative error")
    assert say_referee(far, near, exact).startswith("b is nearer")
    assert "equally near" in say_referee(near, near, exact)
