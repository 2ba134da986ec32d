"""The table of a model: what it tells, that it adds up, that it fits, and its forms for machines."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clew
from clew.errors import UsageError
from clew.views.graph_table import UNUSED, make_rows


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(2)
        )
        self.head = nn.Linear(4, 5)
        self.tied = nn.Linear(4, 5)
        self.tied.weight = self.head.weight
        self.idle = nn.Linear(2, 2)

    def forward(self, x):
        h = self.stem(x)
        for part in self.body:
            h = F.relu(h + part(h))
        h = h.mean((2, 3))
        return self.head(h) + self.tied(h)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def x():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("depth", [None, 1, 2, 3])
def test_rows_add_up_to_the_totals(model, x, depth):
    graph = clew.trace(model, x)
    rows = make_rows(graph, depth)
    assert sum(row.parameters for row in rows) == sum(parameter.numel() for parameter in model.parameters())
    assert sum(row.trainable for row in rows) == graph.trainable
    assert sum(row.macs for row in rows) == graph.macs
    assert sum(row.bytes for row in rows) == graph.bytes
    assert sum(len(row.operations) for row in rows) == len(graph)
    assert rows[-1].name == UNUSED
    assert rows[-1].parameters == 6


def test_depth_gathers_modules_and_keeps_the_order(model, x):
    rows = make_rows(clew.trace(model, x), 2)
    assert [row.name for row in rows] == [
        "stem", "body.0", "add", "relu", "body.1", "add_1", "relu_1", "mean", "head",
        "tied", "add_2", UNUSED,
    ]  # fmt: skip
    gathered = rows[1]
    assert (gathered.type, gathered.parameters) == ("Sequential", 4 * 4 * 9 + 4 + 8)
    assert [tensor.shape for tensor in gathered.inputs if tensor.role != "buffer"] == [(2, 4, 8, 8)]
    assert [tensor.shape for tensor in gathered.outputs] == [(2, 4, 8, 8)]


def test_prints_in_80_columns_by_folding(model, x, capsys, golden):
    assert clew.pprint(model, x, width=80) is None
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "not enough width" not in text
    for name in ("body.1.0", "conv2d stride=(1,1)", "padding=(1,1)", "2×4×8×8", "(not used)"):
        assert name in text
    golden("pprint_80.txt", text)


def test_long_names_are_folded_not_cut(capsys):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer = nn.ModuleDict({"encoder_layer": nn.ModuleDict({"self_attention": nn.ReLU()})})

        def forward(self, x):
            return self.transformer["encoder_layer"]["self_attention"](x)

    clew.pprint(Deep(), torch.ones(2), width=80)
    text = capsys.readouterr().out
    names = [line.strip() for line in text.splitlines()[2:5]]
    assert [name.split()[0] for name in names] == ["transformer.", "encoder_layer.", "self_attention"]
    assert "…" not in text


def test_large_models_are_folded_not_cut(capsys):
    with torch.device("meta"):
        layers = {
            "multi_head_attention_output_projection": nn.Linear(4096, 50_257),
            "normalisation_after_attention": nn.LayerNorm(50_257),
        }
        model = nn.Sequential(OrderedDict(transformer_encoder=nn.Sequential(OrderedDict(layers))))
        x = torch.empty(64, 1024, 4096)
    clew.pprint(model, x, width=80)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert re.search(r"64×1024×50257 +206 M +13\.5 T", text)
    assert re.search(r"multiply-adds +13,490,[\d,]+\n", text)
    assert "  normalisation_after_\n" in text
    clew.pprint(model, x, width=140)
    assert "projection" in capsys.readouterr().out
    clew.pprint(model, x, width=240)
    assert re.search(
        r"\.multi_head_attention_output_projection +linear .* 205,[\d,]+ ", capsys.readouterr().out
    )


def test_long_labels_of_statistics_take_two_lines(capsys):
    model = nn.Sequential(OrderedDict(transformer_encoder_block=nn.Linear(2, 2)))
    clew.pprint(model, torch.ones(1, 2), summary=True, width=80)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"\n    input data  .*\n      transformer_encoder_block.bias  ", text)


def test_printing_draws_nothing_from_the_random_numbers_of_python():
    code = "import random; before = random.getstate(); import clew.render.terminal; print(before == random.getstate())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_wide_screens_get_one_line_per_row(model, x, capsys):
    clew.pprint(model, x, width=200)
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if "body.0.0 " in line)
    assert re.search(
        r"conv2d +2×4×8×8 +2×4×8×8 +148 +18,432 +\S+ kB +yes +test_pprint.py:\d+ +stride=\(1,1\)", line
    )


def test_totals_are_printed(model, x, capsys):
    clew.pprint(model, x, depth=1)
    text = capsys.readouterr().out
    total = sum(parameter.numel() for parameter in model.parameters())
    assert re.search(rf"parameters +{total:,}\n", text)
    assert "parameters that took no part in this pass: idle.weight, idle.bias" in text


def test_summary_tells_values_and_gradients_in_80_columns(model, x, capsys):
    clew.pprint(model, x, summary=True, backward=True, width=80, loss=lambda out: out.square().mean())
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "input data x",
        "output data",
        "input grad head.weight",
        "output grad",
        "min/median",
        "std/Inf",
    ):
        assert words in text
    assert "no loss was given" not in text


def test_numbers_of_the_summary_are_right(model, x):
    data = json.loads(
        clew.pprint(model, x, summary=True, backward=True, to="json", loss=lambda out: out.sum())
    )
    stem = next(row for row in data["rows"] if row["name"] == "stem")
    expected = model.stem(x).detach().double()
    told = stem["outputs"][0]["data"]
    assert told["min"] == pytest.approx(expected.min().item())
    assert told["max"] == pytest.approx(expected.max().item())
    assert told["mean"] == pytest.approx(expected.mean().item())
    assert told["std"] == pytest.approx(expected.std(unbiased=False).item())
    assert told["median"] == pytest.approx(expected.quantile(0.5).item())
    relu = next(row for row in data["rows"] if row["name"] == "relu")
    assert 0.2 < relu["outputs"][0]["data"]["zero"] < 0.8
    model.zero_grad()
    model(x).sum().backward()
    grad = next(each for each in stem["weights"] if each["name"] == "stem.weight")["grad"]
    assert grad["mean"] == pytest.approx(model.stem.weight.grad.mean().item(), rel=1e-4)
    model.zero_grad()


@pytest.mark.parametrize(
    "values", [[3.0], [1.0, 2.0], [1.0, 1.0, 5.0, 9.0], [2.0, 2.0, 2.0, 7.0], [4.0, -1.0, 0.0]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8])
def test_the_median_is_that_of_numpy(values, dtype):
    x = torch.tensor(values).abs().to(dtype)
    data = json.loads(clew.pprint(lambda t: t + 0, x, summary=True, to="json"))
    assert data["rows"][0]["outputs"][0]["data"]["median"] == np.median(x.numpy())


def test_a_nan_spoils_neither_its_neighbours_nor_its_own_numbers():
    x = torch.tensor([1.0, float("nan"), 3.0, float("inf"), 0.0])
    data = json.loads(clew.pprint(lambda t: (t * 2, torch.ones(2) + 1), x, summary=True, to="json"))
    bad, good = (row["outputs"][0]["data"] for row in data["rows"])
    assert bad == {"min": 0, "max": 6, "mean": pytest.approx(8 / 3), "std": pytest.approx(2.494438), "median": 2,
                   "zero": 0.2, "nan": 1, "inf": 1}  # fmt: skip
    assert good["mean"] == 2
    assert good["nan"] == 0


def test_bad_numbers_stand_out_on_the_screen(capsys):
    clew.pprint(lambda t: t.log(), torch.tensor([-1.0, 0.0, 1.0]), summary=True, width=150)
    line = next(line for line in capsys.readouterr().out.splitlines() if "output data" in line)
    assert line.split()[-2:] == ["1", "1"]


def test_json_and_csv_hold_every_row(model, x):
    records = json.loads(clew.pprint(model, x, to="json"))
    lines = list(csv.DictReader(io.StringIO(clew.pprint(model, x, to="csv"))))
    assert [row["name"] for row in records["rows"]] == [line["name"] for line in lines]
    assert records["totals"]["parameters"] == sum(int(line["parameters"]) for line in lines)
    stem = records["rows"][0]
    assert stem["args"] == {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1}
    assert stem["inputs"][0] == {
        "name": "x",
        "role": "input",
        "shape": [2, 3, 8, 8],
        "dtype": "float32",
        "needs_grad": False,
    }
    assert lines[0]["outputs"] == "float32(2,4,8,8)"
    measured = list(csv.DictReader(io.StringIO(clew.pprint(model, x, to="csv", summary=True))))
    assert float(measured[0]["output_data_max"]) > 0


def test_html_and_notebook_are_escaped_and_self_contained(model, x, tmp_path):
    graph = clew.trace(model, x, summary=True)
    page = graph.pprint(to=tmp_path / "net.html")
    assert (tmp_path / "net.html").read_text(encoding="utf-8") == page
    assert page.startswith("<!doctype html>")
    assert "http" not in page
    fragment = graph._repr_html_()
    assert fragment.startswith('<div class="clew">')
    assert "body.1.0" in fragment
    odd = clew.trace(nn.Sequential().append(nn.ReLU()), torch.ones(1))
    assert "<script" not in type(odd)("<script>", odd.operations, odd.tensors)._repr_html_()


def test_a_notebook_shows_a_large_graph_by_modules():
    model = nn.Sequential(*(nn.Sequential(*(nn.ReLU() for _ in range(40))) for _ in range(10)))
    graph = clew.trace(model, torch.ones(1))
    fragment = graph._repr_html_()
    assert fragment.count("<tr>") < 50
    assert "Sequential" in fragment


def test_a_graph_in_place_of_a_model(model, x, capsys):
    graph = clew.trace(model, x)
    clew.pprint(graph, depth=1)
    first = capsys.readouterr().out
    graph.pprint(depth=1)
    assert capsys.readouterr().out == first


def test_repeated_modules_count_their_calls_once():
    shared = nn.Linear(3, 3)
    graph = clew.trace(nn.Sequential(shared, nn.ReLU(), shared), torch.ones(1, 3))
    rows = make_rows(graph, 1)
    assert [(row.name, row.calls, row.parameters) for row in rows] == [("0", 2, 12), ("1", 1, 0)]


def test_wrong_arguments_are_refused(model, x):
    with pytest.raises(UsageError, match="to='jsn' is no form of the table") as caught:
        clew.pprint(model, x, to="jsn")
    assert caught.value.next_step == "did you mean 'json'?"
    with pytest.raises(UsageError, match="depth=0 is no depth"):
        clew.pprint(model, x, depth=0)


def test_nothing_in_the_output_needs_a_gradient():
    with pytest.raises(UsageError, match="nothing in the output depends on a tensor that needs a gradient"):
        clew.pprint(nn.ReLU(), torch.ones(2), backward=True)
