"""``clew pprint`` of a recorded run and of a saved graph."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import clew
from clew.cli import main


@pytest.fixture
def run(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with clew.watch(model, optimizer, out=str(tmp_path / "runs"), every=1) as recorded:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
    return str(recorded.path)


def _rows(capsys, *words):
    assert main(["pprint", *words, "--to", "json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_a_run_is_a_table_with_the_numbers_of_its_last_step(run, capsys):
    rows = _rows(capsys, run)
    series = clew.open_run(run).series("0", "output", "mean")
    assert list(rows) == ["0", "1", "2"]
    assert rows["0"]["outputs"][0]["data"]["mean"] == pytest.approx(series.values[-1])
    assert rows["0"]["outputs"][0]["grad"]["zero"] > 0
    assert rows["0"]["parameters"] == 40
    assert all(row["needs_grad"] for row in rows.values())


def test_a_step_of_a_run_can_be_asked_for(run, capsys):
    series = clew.open_run(run).series("0", "output", "mean")
    assert _rows(capsys, run, "--step", "0")["0"]["outputs"][0]["data"]["mean"] == pytest.approx(
        series.values[0]
    )


def test_the_table_of_a_run_claims_no_cost_that_was_not_recorded(run, capsys):
    assert main(["pprint", run]) == 0
    shown = capsys.readouterr().out
    assert "multiply-adds" not in shown
    assert "output grad" in shown


def test_the_table_of_a_run_as_csv_leaves_the_median_empty(run, capsys):
    assert main(["pprint", run, "--to", "csv"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    column = head.split(",").index("output_data_std") + 1
    assert head.split(",")[column] == "output_data_median"
    assert lines


def test_a_saved_graph_is_printed_again(tmp_path, capsys):
    path = tmp_path / "net.json"
    clew.trace(nn.Sequential(nn.Linear(4, 3)), torch.zeros(2, 4)).save(path)
    assert _rows(capsys, str(path))["0"]["macs"] == 24


@pytest.mark.parametrize("words", [["--input", "2,4"], ["--backward"], ["--eval"]])
def test_what_belongs_to_a_model_is_refused_for_a_run(run, words, capsys):
    assert main(["pprint", run, *words]) == 2
    assert f"{words[0]} belongs to a model" in capsys.readouterr().err


def test_a_step_is_refused_for_a_model(capsys):
    assert main(["pprint", "torch.nn:Identity", "--step", "3"]) == 2
    assert "--step belongs to a recorded run" in capsys.readouterr().err
