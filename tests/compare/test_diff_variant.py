"""A model compared with itself: compiled, in another precision, with other threads; and each module judged alone."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch
from torch import nn

import clew
from clew.api.variant import diff_variant
from clew.cli import main
from clew.errors import ClewError, UsageError

# The compiler patches torch when it is first used, and stays; that is nothing a test has left.
torch.compile(nn.Identity(), backend="eager")(torch.zeros(1))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))


@pytest.fixture(autouse=True)
def quiet_bars(monkeypatch):
    """torch's compiler draws bars, whose library leaves a thread running."""
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


@pytest.fixture
def batch():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


SCRIPT = """
import torch
import torch._dynamo
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())

def make_batch():
    return torch.linspace(-1, 1, 24).view(6, 4)

def wrong(graph, inputs):
    for node in graph.graph.nodes:
        if node.target is torch.tanh:
            node.target = torch.sigmoid
    graph.recompile()
    return graph.forward

if "wrong-tanh" not in torch._dynamo.list_backends(None):
    torch._dynamo.register_backend(wrong, name="wrong-tanh")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "pair_of_mine.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return f"{path}:make_model,make_batch"


def test_a_faulty_compiler_is_named_by_operation_and_line(script, capsys):
    code = main(["diff", "--compiled", script, "--backend", "wrong-tanh", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 1
    assert found["first"]["op"] == "tanh"
    assert found["first"]["site"] == "0"
    assert "pair_of_mine.py:12" in found["sentence"]
    assert "a is nearer to float64" in found["sentence"]


def test_a_right_compiler_gives_the_same(script, capsys):
    code = main(["diff", "--compiled", script, "--backend", "aot_eager"])
    out = capsys.readouterr().out
    assert code == 0
    assert "eager and compiled (aot_eager) are" in out


def test_an_unknown_backend_is_a_clear_error(batch):
    with pytest.raises(ClewError, match="no compiler backend 'no-such'"):
        diff_variant(make_model(), batch, backend="no-such")


def test_a_backend_without_its_compiler_is_a_clear_error(batch):
    def missing(graph, inputs):
        raise RuntimeError("No working C++ compiler found")

    torch._dynamo.register_backend(missing, name="without-compiler")
    with pytest.raises(ClewError, match="cannot be compiled") as caught:
        diff_variant(make_model(), batch, backend="without-compiler")
    assert "install a C++ compiler" in str(caught.value)


@pytest.mark.parametrize("way", ["bfloat16", "float64", "threads=2"])
def test_another_precision_or_number_of_threads_is_within_tolerance(batch, way):
    model = make_model()
    before = [p.clone() for p in model.parameters()], torch.get_num_threads(), torch.get_rng_state()
    found = diff_variant(model, batch, way=way)
    assert found.is_same, found.sentence
    assert all(torch.equal(x, y) for x, y in zip(before[0], model.parameters(), strict=True))
    assert torch.get_num_threads() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


class Coarse(nn.Module):
    """Loses far more than half precision does when it runs in it."""

    def forward(self, x):
        return (x + 1000.0) - 1000.0


def test_a_module_that_half_precision_breaks_is_named(batch):
    model = nn.Sequential(nn.Linear(4, 8), Coarse(), nn.Linear(8, 2))
    found = diff_variant(model, batch, way="bf16", isolate=True)
    assert not found.is_same
    assert (found.first.site, found.first.op) == ("1", "Coarse")
    assert "judged alone, 1 of 4 modules" in found.sentence


def test_modules_that_hold_others_may_be_as_far_off_as_all_of_them_together():
    """Forty layers in half precision, each right alone: none of the modules around them computes something else."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(14)]
    found = diff_variant(nn.Sequential(*layers), torch.randn(16, 32), way="bf16", isolate=True)
    assert found.is_same, found.sentence
    assert max(row.error for row in found.tensors if row.site == "") > 2.0**-8


def test_a_way_that_is_none_is_refused(batch):
    with pytest.raises(UsageError, match="cannot be compared with itself in 'bfloat61'"):
        diff_variant(make_model(), batch, way="bfloat61")


def test_modules_are_judged_alone(batch):
    model, other = make_model(), make_model()
    other[1].eps = 0.1
    with torch.no_grad():
        other[3].weight[0, 0] += 0.5
    with pytest.raises(AssertionError) as caught:
        clew.assert_same(model, other, batch, isolate=True)
    text = str(caught.value)
    assert "the runs part at step 0 in the weights, first at the weight of 3.weight" in text
    assert "judged alone, 1, 3 of 5 modules do" in text
    clew.assert_same(model, make_model(), batch, isolate=True)


def test_a_target_without_a_batch_says_how_to_write_it():
    with pytest.raises(UsageError, match="names no model and batch"):
        from clew.cli.model_argument import load_pair

        load_pair("train.py:make_model")


def test_two_runs_are_needed(capsys):
    assert main(["diff"]) != 0
    assert "two runs are needed" in capsys.readouterr().err
