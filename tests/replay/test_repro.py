"""A generated test fails on the fault, passes when the marked line is mended, and holds no more data than it needs."""

import ast
import runpy
import sys

import pytest
import torch
import torch._dynamo  # noqa: F401 - wraps torch.manual_seed when first imported, which is not of our doing
from safetensors.torch import load_file

import clew
from clew.cli import main
from clew.replay.evidence import shrink

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
EPS = 0.0
"""

LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x = torch.randn(8, 4)
    if step == 1:
        x[5] = 0
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()
"""

BACKWARD = (
    HEAD
    + """
class Root(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, h):
        return torch.sqrt(h.square().sum(1) + EPS) * self.scale  # HERE
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(4, width, bias=False)
        self.root = Root(2.0)
    def forward(self, x):
        return self.root(self.fc(x))
model = Net(3)
loss_of = lambda model, x: model(x).sum()
"""
    + LOOP
)

FORWARD = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.rnn = nn.LSTM(4, width, batch_first=True)
        self.sizes, self.act, self.dtype = (1, 2.5), torch.relu, torch.float32
        self.fc = nn.Linear(4, width, bias=False)
        self.extra = nn.ModuleList([nn.Identity()])
        self.register_buffer("offset", torch.zeros(width))
    def forward(self, x):
        h, _ = self.rnn(x.unsqueeze(1))
        h = self.act(self.fc(x).abs()).to(self.dtype) * self.sizes[1] + self.offset + 0 * h[:, 0]
        return torch.log(h + EPS)  # HERE
model = Net(3)
loss_of = lambda model, x: model(x).sum()
"""
    + LOOP
)

NORMED = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
    def forward(self, x):
        return torch.log(self.norm(self.fc(x)).abs() * (x.abs().sum(1, keepdim=True) > 0) + EPS)  # HERE
model = Net()
loss_of = lambda model, x: model(x).sum()
"""
    + LOOP
)

OUTSIDE = (
    HEAD
    + """
model = nn.Linear(4, 3, bias=False)
loss_of = lambda model, x: torch.log(model(x).abs()).sum()  # HERE
"""
    + LOOP
)


def record(script, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(script)
    with clew.watch(out=str(tmp_path / "runs"), name="run"):
        exec(compile(script, str(file), "exec"), {"__name__": "__main__"})
    return file


def run_test(path):
    """Run a generated test as it would be run by pytest, in this process."""
    known, folders = set(sys.modules), list(sys.path)
    try:
        runpy.run_path(str(path))["test_step_1_stays_finite"]()
    finally:
        sys.path[:] = folders
        for name in set(sys.modules) - known:
            del sys.modules[name]


def imports_of(file):
    nodes = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    names = [getattr(node, "module", None) or alias.name for node in nodes for alias in node.names]
    return {name.partition(".")[0] for name in names}


def write(tmp_path, *options):
    target = tmp_path / "tests" / "test_nan.py"
    code = main(["repro", str(tmp_path / "runs" / "run"), "-o", str(target), *options])
    return code, target


@pytest.mark.parametrize(
    ("script", "samples"),
    [(BACKWARD, 1), (FORWARD, 1), (NORMED, 2)],
    ids=["backward", "forward", "batch norm"],
)
def test_fails_on_the_fault_and_passes_when_the_line_is_mended(script, samples, tmp_path, capsys):
    file = record(script, tmp_path)
    code, target = write(tmp_path)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "a test of the module, which fails now" in said.out
    assert f"the data: {samples} of 8 samples that went into" in said.err
    assert f"{samples} of 8 samples" in target.read_text(), "the warning stands in the test, too"
    assert "# HERE" in target.read_text()
    assert imports_of(target) <= {*sys.stdlib_module_names, "torch", "safetensors"}
    tensors = load_file(target.with_suffix(".safetensors"))
    given = [tensor for name, tensor in tensors.items() if name.startswith("input.args")]
    assert [tensor.shape[0] for tensor in given] == [samples]
    assert not [name for name in tensors if name.startswith("op.")], "no data beyond what the test needs"
    with pytest.raises(AssertionError, match=r"train\.py"):
        run_test(target)
    file.write_text(script.replace("EPS = 0.0", "EPS = 1e-6"))
    run_test(target)


PACKAGE = """
import torch
from torch import nn
from .eps import EPS
class Root(nn.Module):
    def forward(self, h):
        return torch.sqrt(h.square().sum(1) + EPS)  # HERE
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(4, width, bias=False)
        self.root = Root()
    def forward(self, x):
        return self.root(self.fc(x))
"""


def test_a_module_from_a_package_is_imported_from_there(tmp_path, monkeypatch, capsys):
    package = tmp_path / "clew_test_nets"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "eps.py").write_text("EPS = 0.0")
    (package / "net.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    script = "from clew_test_nets.net import Net\nmodel = Net(3)\nloss_of = lambda model, x: model(x).sum()\n"
    record(HEAD + script + LOOP, tmp_path)
    for name in set(sys.modules) - known:
        del sys.modules[name]
    monkeypatch.undo()
    code, target = write(tmp_path)
    said = capsys.readouterr()
    assert (code, "a test of the module" in said.out) == (0, True), said.err
    with pytest.raises(AssertionError, match=r"net\.py"):
        run_test(target)
    (package / "eps.py").write_text("EPS = 0.000001")
    run_test(target)


def test_a_fault_outside_of_modules_becomes_a_test_of_the_operation(tmp_path, capsys):
    record(OUTSIDE, tmp_path)
    code, target = write(tmp_path)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "a test of the operation" in said.out
    assert "not possible: module: " in said.err
    (tensor,) = load_file(target.with_suffix(".safetensors")).values()
    assert tensor.shape[0] == 1
    with pytest.raises(AssertionError, match="log made -inf"):
        run_test(target)
    mended = target.read_text().replace("torch.ops.aten.log.default(*args", "torch.log(args[0] + 1e-6")
    target.write_text(mended.replace("1e-6, **kwargs)", "1e-6)"))
    run_test(target)


def test_nothing_is_written_over(tmp_path, capsys):
    record(OUTSIDE, tmp_path)
    target = tmp_path / "tests" / "test_nan.py"
    target.parent.mkdir()
    target.write_text("mine")
    assert write(tmp_path)[0] == 2
    assert "is there already" in capsys.readouterr().err
    assert target.read_text() == "mine"


def test_a_run_without_a_fault_has_nothing_to_test(tmp_path, capsys):
    record(OUTSIDE.replace("x[5] = 0", "pass"), tmp_path)
    assert write(tmp_path)[0] == 2
    assert "no evidence of a bad step is in this run" in capsys.readouterr().err
    assert main(["repro", str(tmp_path / "runs" / "run"), "--step", "7", "-o", str(tmp_path / "t.py")]) == 2
    assert "no evidence of step 7: none was kept" in capsys.readouterr().err


def test_broken_evidence_is_named(tmp_path, capsys):
    record(OUTSIDE.replace("x[5] = 0", "pass"), tmp_path)
    folder = tmp_path / "runs" / "run" / "rank0" / "repro"
    folder.mkdir()
    (folder / "step-00000001.safetensors").write_bytes(b"\x00" * 20)
    assert write(tmp_path)[0] == 2
    assert "the evidence cannot be read" in capsys.readouterr().err


def test_shrinking_finds_the_fewest_rows():
    asked = []

    def fails(rows):
        asked.append(rows)
        return {3, 12} <= set(rows)

    assert shrink(16, lambda rows: 11 in rows) == [11]
    assert shrink(16, lambda rows: 11 in rows, first=11) == [11]
    assert shrink(32, fails) == [3, 12]
    assert len(asked) <= 30
    assert len(shrink(1000, lambda rows: len(rows) >= 500)) == 500, "as far as it gets with the tries it has"
