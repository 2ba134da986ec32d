"""From the step to the operation: both scripts execute the step again; the first operation that differs is named."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from clew.compare.operation import Operation, find_operation

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.fc1(x)
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rerun")
    changes = {"plain": ("", ""), "tanh": ("F.gelu(h)", 'F.gelu(h, approximate="tanh")')}
    for name, (old, new) in changes.items():
        text = textwrap.dedent(SCRIPT)
        (folder / f"{name}.py").write_text(text.replace(old, new) if old else text)
        words = [
            "run",
            "--budget",
            "off",
            "--no-status",
            "--no-doctor",
            "--out",
            str(folder),
            "--name",
            f"run-{name}",
        ]
        subprocess.run(
            [sys.executable, "-m", "clew", *words, f"{name}.py"], check=True, cwd=folder, capture_output=True
        )
    return folder


def test_the_operation_its_line_and_its_arguments_are_named(runs):
    words = ["diff", "run-plain", "run-tanh", "--root", str(runs), "--rerun", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "clew", *words], check=False, cwd=runs, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    operation = found["operation"]
    assert operation is not None, found["notes"]
    assert operation["op"].endswith("gelu")
    assert operation["line"] == "plain.py:13"
    assert operation["line_b"] == "tanh.py:13"
    assert operation["same_inputs"] is True
    assert "'tanh'" in found["sentence"]
    assert any("executed again: identical" in note for note in found["notes"])


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
