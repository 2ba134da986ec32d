"""``clew graph``: from a script, a run, an exported program or a saved graph to a picture."""

import re
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
import torch._dynamo  # torch.export imports it late, and it wraps torch.manual_seed
from torch import nn

import clew
from clew.cli import main
from clew.model.record import RunInfo
from clew.stats import reference
from clew.store.writer import Writer
from clew.testing.runs import make_run, make_sites, make_tensor
from clew.views.graph_run import graph_of_run

SCRIPT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return x + torch.relu(self.fc(self.norm(x)))

def make_model():
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "net.py").write_text(SCRIPT)
    yield tmp_path
    sys.modules.pop("net", None)


def words(path):
    root = ET.fromstring(path.read_text())
    return ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_model_of_a_script_is_drawn(folder, capsys):
    assert main(["graph", "net.py:make_model", "--input", "4,8", "-o", "net.svg"]) == 0
    assert capsys.readouterr().out == "net.svg: 9 operations\n"
    shown = words(folder / "net.svg")
    for text in ("Sequential", "Block", "norm", "layer_norm", "weight 8×8", "4×8", "relu", "add"):
        assert text in shown


def test_depth_colour_and_verbosity_are_options(folder):
    main(["graph", "net.py:make_model", "--input", "4,8", "-o", "a.svg", "--depth", "1"])
    assert "norm" not in words(folder / "a.svg")
    main(["graph", "net.py:make_model", "--input", "4,8", "-o", "a.svg", "--color", "std", "--verbose"])
    shown = words(folder / "a.svg")
    assert any(re.fullmatch(r"std [\d.]+", text) for text in shown)
    assert "needs a gradient" in shown
    main(["graph", "net.py:make_model", "--input", "4,8", "-o", "a.svg", "--color", "health"])
    assert "fine" in words(folder / "a.svg")


def test_a_saved_graph_is_drawn_without_the_model(folder):
    main(["graph", "net.py:make_model", "--input", "4,8", "-o", "net.json"])
    assert main(["graph", "net.json", "-o", "net.dot"]) == 0
    assert (folder / "net.dot").read_text().startswith('digraph "Sequential"')


@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_is_loaded_only_when_trusted(folder, capsys):
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    torch.export.save(torch.export.export(model, (torch.randn(2, 8),)), folder / "net.pt2")
    assert main(["graph", "net.pt2", "-o", "net.svg"]) == 2
    assert "an exported program can run code when it is loaded" in capsys.readouterr().err
    assert not (folder / "net.svg").exists()
    assert main(["graph", "net.pt2", "-o", "net.svg", "--trust"]) == 0
    assert "linear" in words(folder / "net.svg")


def test_a_run_is_coloured_by_a_statistic_of_a_step(folder):
    make_run(folder / "runs" / "made", steps=4)
    options = ["--step", "2", "--kind", "output", "--stat", "abs_max", "-o", "run.svg"]
    assert main(["graph", str(folder / "runs" / "made"), *options]) == 0
    shown = words(folder / "run.svg")
    assert "made, output at step 2" in shown
    for site in ("fc1", "fc2"):
        largest = np.abs(make_tensor(2, site, "output")).max()
        assert any(text == f"abs_max {largest:.4g}" for text in shown), shown
    assert any("order of execution" in text for text in shown)


def test_statistics_of_parameters_are_those_of_all_a_module_holds(folder):
    make_run(folder / "made", steps=3)
    graph = graph_of_run(clew.open_run(folder / "made"), kind="grad", step=1)
    first = next(tensor for tensor in graph.tensors if tensor.name == "fc1" and tensor.role == "value")
    both = np.concatenate([make_tensor(1, f"fc1.{name}", "grad").ravel() for name in ("weight", "bias")])
    expected = dict(zip(clew.model.schema.STAT_NAMES, reference.summarise(both), strict=True))
    assert first.stats == pytest.approx(expected, rel=1e-5)


def test_the_latest_step_is_drawn_unless_another_is_named(folder):
    make_run(folder / "made", steps=5)
    assert graph_of_run(clew.open_run(folder / "made")).name == "made, output at step 4"


def test_modules_of_a_recorded_training_nest_as_in_the_model(folder):
    import net

    model = net.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with clew.watch(model, optimizer, out=str(folder / "runs"), name="real"):
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    graph = graph_of_run(clew.open_run("real", root=folder / "runs"), kind="grad_output")
    assert [operation.name for operation in graph.operations] == ["0.norm", "0.fc", "1.norm", "1.fc", "2"]
    assert [operation.op for operation in graph.operations[:2]] == ["LayerNorm", "Linear"]
    assert {module.path for module in graph.modules} >= {"", "0", "0.fc", "1", "2"}
    assert all(graph.tensors[operation.outputs[0]].stats for operation in graph.operations)


def test_each_model_of_a_run_begins_with_what_it_was_given(folder):
    actor, critic, criterion = torch.nn.Linear(3, 2), torch.nn.Linear(5, 1), torch.nn.MSELoss()
    with clew.watch(out=str(folder / "runs"), name="two"):
        optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
        wanted = actor(torch.randn(4, 3)).mean()
        (criterion(critic(torch.randn(4, 5)), torch.zeros(4, 1)) - wanted).backward()
        optimizer.step()
    graph = graph_of_run(clew.open_run("two", root=folder / "runs"))
    names = {tensor.id: tensor.name for tensor in graph.tensors}
    first = {each.site: [names[number] for number in each.inputs][:2] for each in graph.operations}
    assert first["actor"][0] == "actor.batch.0"
    assert first["critic"][0] == "critic.batch.0"
    assert first["criterion"] == ["critic", "criterion.batch.1"]
    assert [names[number] for number in graph.outputs] == ["actor", "criterion"]


def test_a_run_without_modules_says_so(folder):
    sites = [site for site in make_sites() if site.role == "parameter"]
    writer = Writer(folder / "bare", RunInfo("bare"))
    writer.add_sites(sites)
    writer.close("complete")
    with pytest.raises(clew.ClewError, match="no module ran in bare"):
        graph_of_run(clew.open_run(folder / "bare"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["net.py:make_model", "--input", "4,8", "-o", "a.sv"], "no format 'sv' for a picture"),
        (["net.py:make_model", "--input", "4,8", "--step", "3"], "--step belongs to a recorded run"),
        (["net.py", "--input", "4,8"], "a script alone names no model"),
        (["made", "--input", "4,8"], "--input belongs to a model"),
        (["made", "--stat", "l2", "--color", "op"], "both --color and --stat say what to colour by"),
        (["made", "--step", "x", "-o", "a.svg"], "'x' is no step"),
        (["made", "--step", "77", "-o", "a.svg"], "nothing of kind 'output' was recorded at step 77"),
        (["made", "--stat", "l3", "-o", "a.svg"], "no statistic 'l3' to colour by"),
        (["made", "--kind", "outputs", "-o", "a.svg"], "outputs"),
        (["nothing", "-o", "a.svg"], "there is no run 'nothing'"),
        (["net.py:make_modle", "--input", "4,8", "-o", "a.svg"], "no 'make_modle' in net.py"),
        (["gone.json", "-o", "a.svg"], "cannot read the graph: No such file or directory"),
        (
            ["net.py:make_model", "--input", "4,9", "-o", "a.svg"],
            "layer_norm in '0.norm' raised RuntimeError",
        ),
    ],
)
def test_what_cannot_be_drawn_says_why(folder, capsys, words, text):
    make_run(folder / "runs" / "made", steps=2)
    assert main(["graph", *words]) == 2
    told = capsys.readouterr().err
    assert text in told
    assert "\n  next:  " in told
    assert not (folder / "a.svg").exists()
