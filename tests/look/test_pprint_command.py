"""``clew pprint``: a model named on the command line, its inputs in words."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
import torch._dynamo  # replaces torch.manual_seed when it is first loaded

from clew.cli import main
from clew.cli.model_argument import parse_input
from clew.errors import UsageError
from clew.model.input_spec import InputSpec

SCRIPT = """
import torch
from torch import nn
import neighbour

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 4)
        self.fc = nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids, mask=None, scale=1.0):
        h = self.drop(self.embed(ids)) * scale
        return self.fc(h if mask is None else h * mask)

def make_model():
    return Net()

def make_with_inputs():
    return Net(), torch.zeros(2, 3, dtype=torch.long)

def make_batch():
    return {"ids": torch.zeros(2, 3, dtype=torch.long), "scale": 2.0}

def make_ids():
    return torch.zeros(2, 3, dtype=torch.long)

def needs_width(width):
    return Net()

def breaks():
    raise ValueError("no such luck")

ready = nn.Sequential(nn.Linear(3, 3))

if __name__ == "__main__":
    raise SystemExit("the main part ran")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "neighbour.py").write_text("")
    path = tmp_path / "model_script.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield str(path)
    for name in ("model_script", "neighbour"):
        sys.modules.pop(name, None)


def run(capsys, *words):
    code = main(["pprint", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_prints_the_table(script, capsys):
    code, out, _ = run(capsys, f"{script}:make_model", "--input", "int64:2,16:0..100")
    assert code == 0
    assert "2×16 int64" in out
    assert "embedding" in out
    assert "the main part ran" not in out


def test_named_inputs_values_and_json(script, capsys):
    words = [
        "--input",
        "int64:2,3:0..100",
        "--input",
        "mask=2,3,1",
        "--input",
        "scale=value:0.5",
        "--to",
        "json",
    ]
    code, out, _ = run(capsys, f"{script}:Net", *words, "--summary", "--backward")
    data = json.loads(out)
    assert code == 0
    assert [row["type"] for row in data["rows"]] == ["embedding", "dropout", "mul", "mul", "linear"]
    assert data["rows"][2]["args"] == {"other": 0.5}
    assert data["rows"][-1]["outputs"][0]["grad"]["mean"] == 1


def test_a_factory_may_bring_its_inputs_and_a_model_may_be_ready(script, capsys):
    assert run(capsys, f"{script}:make_with_inputs", "--depth", "1", "--eval")[0] == 0
    assert run(capsys, f"{script}:ready", "--input", "2,3")[0] == 0


def test_a_script_called_like_a_loaded_module(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "json.py").write_text("from torch import nn\nmodel = nn.ReLU()\n")
    assert run(capsys, f"{tmp_path / 'json.py'}:model", "--input", "2,3")[0] == 0
    assert sys.modules["json"] is json
    del sys.modules["clew_script_json"]


def test_writes_a_file(script, capsys, tmp_path):
    code, out, _ = run(capsys, f"{script}:ready", "--input", "2,3", "--to", str(tmp_path / "net.csv"))
    assert (code, out) == (0, "")
    assert (tmp_path / "net.csv").read_text().startswith("name,type,")


def test_an_exported_program(capsys, tmp_path):
    program = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(1, 3),))
    torch.export.save(program, tmp_path / "net.pt2")
    code, _, err = run(capsys, str(tmp_path / "net.pt2"))
    assert code == 2
    assert "can run code when it is loaded" in err
    code, out, _ = run(capsys, str(tmp_path / "net.pt2"), "--trust")
    assert code == 0
    assert "linear" in out
    code, _, err = run(capsys, str(tmp_path / "no.pt2"), "--trust")
    assert code == 2
    assert "no exported program" in err


def test_an_array_of_a_file(script, capsys, tmp_path):
    np.save(tmp_path / "ids.npy", np.zeros((2, 5), np.int64))
    code, out, _ = run(capsys, f"{script}:Net", "--input", f"@{tmp_path / 'ids.npy'}")
    assert code == 0
    assert "2×5 int64" in out


@pytest.mark.parametrize(
    ("target", "message", "next_step"),
    [
        ("{script}:make_modle", "no 'make_modle' in", "did you mean 'make_model'?"),
        ("{script}", "names no model", "model_script.py:make_model"),
        ("missing.py:Net", "no script 'missing.py'", "the path of a Python file"),
        ("{script}:needs_width", "cannot be called without arguments", "a function without arguments"),
        ("{script}:breaks", "raised ValueError: no such luck", "call it in Python"),
        (
            "no_such_package.models:Net",
            "importing no_such_package.models raised ModuleNotFoundError",
            "imported, not run",
        ),
    ],
)
def test_models_that_cannot_be_had(script, capsys, target, message, next_step):
    code, out, err = run(capsys, target.format(script=script))
    assert (code, out) == (2, "")
    assert message in err
    assert next_step in err


def test_a_model_that_raises_tells_where(script, capsys):
    code, _, err = run(capsys, f"{script}:make_model", "--input", "2,16")
    assert code == 2
    assert "embedding in 'embed' raised RuntimeError" in err
    assert "x.long()" in err


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("4,3", InputSpec(shape=(4, 3))),
        ("7", InputSpec(shape=(7,))),
        ("float64:", InputSpec(dtype="float64")),
        ("int64:2,16:0..100", InputSpec(dtype="int64", shape=(2, 16), low=0, high=100)),
        ("x=bfloat16:2:-1..0.5", InputSpec(name="x", dtype="bfloat16", shape=(2,), low=-1, high=0.5)),
        ("mask=none", InputSpec(name="mask", kind="value", value=None)),
        ("true", InputSpec(kind="value", value=True)),
        ("value:3", InputSpec(kind="value", value=3)),
        ("text:a=b:c", InputSpec(kind="value", value="a=b:c")),
        ("@x.npy", InputSpec(kind="file", value="x.npy")),
    ],
)
def test_the_language_of_inputs(text, spec):
    assert parse_input(text) == spec


@pytest.mark.parametrize(
    "text", ["", "4,,3", "4x3", "flaot32:2", "int64:2:5", "int64:2:9..1", "2:0..1:7", "value:x"]
)
def test_words_that_are_no_input(text):
    with pytest.raises(UsageError):
        parse_input(text)


def test_made_inputs_are_of_the_kind_asked_for_and_repeat():
    from clew.api.look import make_input

    ids = make_input(parse_input("int64:50:3..5"))
    assert ids.dtype == torch.int64
    assert set(ids.tolist()) == {3, 4}
    uniform = make_input(parse_input("float16:100:-1..0.5"))
    assert uniform.dtype == torch.float16
    assert -1 <= uniform.min() < uniform.max() <= 0.5
    assert make_input(parse_input("bool:9")).dtype == torch.bool
    assert make_input(parse_input("complex64:2")).is_complex()
    assert torch.equal(make_input(parse_input("4,3")), make_input(parse_input("4,3")))


@pytest.mark.parametrize("batch", ["make_batch", "make_ids"])
def test_a_batch_may_be_named_behind_the_model(script, batch, capsys):
    assert main(["pprint", f"{script}:make_model,{batch}", "--to", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["name"] == "embed"
    assert main(["pprint", f"{script}:make_model,make_bat"]) == 2
    assert "did you mean 'make_batch'" in capsys.readouterr().err
