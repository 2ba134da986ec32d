"""Tests made of bad data, of a bad weight, of a step that is executed again for it, and of a module of one's choice."""

import runpy
import sys

import pytest
import torch._dynamo  # noqa: F401 - wraps torch.manual_seed when first imported, which is not of our doing
from safetensors.torch import load_file

from clew.cli import main
from clew.replay.process import run_in_child

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
ZERO = torch.zeros(())  # data, which the test needs and the definitions do not give
EPS = float(ZERO)
class Root(nn.Module):
    def forward(self, h):
        return torch.log(h.abs().sum(1) + EPS)  # HERE
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3, bias=False)
        self.root = Root()
    def forward(self, x):
        return self.root(self.fc(x))
"""
LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (x,) in enumerate(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=8)):
    optimizer.zero_grad()
    model(x).float().mean().backward()
    optimizer.step()
"""
BAD_DATA = HEAD + "model = nn.Linear(4, 1)\ndata = torch.randn(32, 4); data[13, 2] = float('nan')\n" + LOOP
BAD_WEIGHT = (
    HEAD
    + """
model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))
with torch.no_grad(): model[0].weight[7] = float("nan")
data = torch.arange(32) % 7; data[21] = 7
"""
    + LOOP
)
BAD_MODEL = HEAD + "model = Net()\ndata = torch.randn(32, 4); data[19] = 0\n" + LOOP


def record(script, folder, *options):
    (folder / "train.py").write_text(script)
    words = ["run", "--no-status", "--no-doctor", "--out", str(folder / "runs"), "--name", "run", *options]
    assert run_in_child(lambda child: child.answer({"code": main([*words, str(folder / "train.py")])})) == {
        "code": 0
    }


def write(folder, *options):
    target = folder / "test_it.py"
    return main(["repro", str(folder / "runs" / "run"), "-o", str(target), *options]), target


def run_test(path, step):
    folders = list(sys.path)
    try:
        runpy.run_path(str(path))[f"test_step_{step}_stays_finite"]()
    finally:
        sys.path[:] = folders
        sys.modules.pop("script", None)


@pytest.mark.parametrize(
    ("script", "step", "holds", "shape"),
    [
        (BAD_DATA, 1, "row 5 of 8 of the batch", (1, 4)),
        (BAD_WEIGHT, 0, "row 7 of 9 of the weight 0.weight", (1, 4)),
    ],
    ids=["data", "weight"],
)
def test_a_value_that_came_in_bad(script, step, holds, shape, tmp_path, capsys):
    record(script, tmp_path)
    code, target = write(tmp_path)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "a test of the tensor, which fails now" in said.out
    assert f"the data: {holds}" in said.err
    (tensor,) = load_file(target.with_suffix(".safetensors")).values()
    assert tensor.shape == shape
    with pytest.raises(AssertionError):
        run_test(target, step)
    target.write_text(target.read_text().replace("return tensor  #", "return tensor.nan_to_num()  #"))
    run_test(target, step)


def test_a_step_without_evidence_is_executed_again_for_it(tmp_path, capsys):
    record(BAD_MODEL, tmp_path, "--explain", "off", "--snapshots", "every:1")
    code, target = write(tmp_path, "--step", "2")
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "a test of the module" in said.out
    assert "1 of 8 samples that went into root" in said.err
    with pytest.raises(AssertionError):
        run_test(target, 2)
    (tmp_path / "train.py").write_text(BAD_MODEL.replace("EPS = float(ZERO)", "EPS = 1e-6"))
    run_test(target, 2)


def test_a_healthy_step_has_nothing_to_test(tmp_path, capsys):
    record(BAD_MODEL, tmp_path, "--explain", "off")
    assert write(tmp_path, "--step", "1")[0] == 2
    assert "nothing in step 1 is NaN or infinite" in capsys.readouterr().err
    assert main(["why", str(tmp_path / "runs" / "run"), "--step", "1"]) == 1
    assert "nothing in step 1 was NaN or infinite" in " ".join(capsys.readouterr().out.split())


def test_a_module_of_ones_choice(tmp_path, capsys):
    record(BAD_MODEL, tmp_path)
    code, target = write(tmp_path, "--site", "(model)")
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "1 of 8 samples that went into (model)" in said.err
    with pytest.raises(AssertionError):
        run_test(target, 2)
    assert main(["repro", str(tmp_path / "runs" / "run"), "-o", str(tmp_path / "t.py"), "--site", "fd"]) == 2
    assert "no site is called or matches 'fd'" in capsys.readouterr().err
