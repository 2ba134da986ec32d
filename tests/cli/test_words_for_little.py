"""What commands say where there is little to say: empty and damaged runs, choices that fit nothing, rules in a list."""

import json

import pytest
import torch

import clew
from clew.cli import main
from clew.model.record import RunInfo
from clew.render.terminal import Screen, lower
from clew.store.layout import rank_folder
from clew.store.writer import Writer
from clew.views.block import Cell, Column, Page, Table
from clew.views.no_step import NO_STEP


@pytest.fixture
def say(capsys, monkeypatch):
    """Return a function that runs a command and returns what it printed and what it said beside that."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words, code=0):
        assert main([str(word) for word in words]) == code
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def test_a_run_without_a_step_says_why_instead_of_showing_empty_tables(say, tmp_path):
    Writer(tmp_path / "empty", RunInfo("empty", ended="2026-11-15T14:26:31.000+00:00")).close("complete", 0)
    page, _ = say("show", tmp_path / "empty")
    assert NO_STEP in " ".join(page.split())
    for word in ("loss", "sites, worst first", "time", "memory"):
        assert word not in page.splitlines()


def test_a_loss_that_was_not_asked_for_is_no_missing_backward(say, tmp_path):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with clew.watch(model, optimizer, out=tmp_path, name="chosen", kinds="grad,param", status=False):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    page, _ = say("show", tmp_path / "chosen")
    assert "the kinds that were asked for leave it out" in " ".join(page.split())
    assert "nothing called backward" not in page


def test_damage_is_told_by_every_command_that_reads(say, own_runs):
    run = own_runs / "a-first"
    part = next((rank_folder(run, 0) / "stats").glob("part-*.parquet"))
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    for words in (("doctor", run), ("export", run, "--to", "csv"), ("show", run, "--kind", "grad")):
        _, beside = say(*words)
        assert beside.startswith("clew: a-first: rank0/stats/part-000000.parquet is damaged and left out"), (
            words
        )


def test_steps_that_are_not_there_are_answered_with_those_that_are(say, runs):
    page, _ = say("show", runs / "20261115-152501-broken", "--step", "9999")
    assert "no statistics fit; the run has 28 steps with statistics, from step 0 to 55" in page


def test_kinds_that_are_not_there_are_answered_with_those_that_are(say, runs):
    page, _ = say("show", runs / "20261115-152501-broken", "--kind", "buffer")
    assert "no statistics fit; at step 55 there are these kinds: batch, " in page


def test_an_output_of_several_tensors_is_answered_with_its_parts(say, tmp_path):
    model = torch.nn.GRU(3, 2)
    with clew.watch(model, out=tmp_path, name="parts", status=False) as run:
        model(torch.zeros(1, 1, 3))
    page, _ = say("show", run.path, "--site", "(model)", "--kind", "output")
    assert "no statistics fit; what (model) gives has parts: (model)[0], (model)[1]" in page


def test_a_run_in_which_nothing_was_bad_has_no_step_that_went_wrong(say, own_runs):
    page, _ = say("why", own_runs / "a-first", code=1)
    assert page.splitlines() == [
        "nothing went wrong in this run",
        "nothing in this run was NaN or infinite",
        "clew doctor a-first looks for other faults",
    ]
    verdict = json.loads(say("why", own_runs / "a-first", "--json", code=1)[0])
    assert (verdict["found"], verdict["is_sound"]) == (False, True)


def test_rules_are_listed_whole_and_told_in_full_when_asked_for(say):
    everything, _ = say("rules")
    assert "…" not in everything
    assert max(map(len, everything.splitlines())) <= 80
    some, _ = say("rules", "n01", "Dead-ReLU")
    assert [line[:3] for line in some.splitlines() if line[:1] not in (" ", "")] == ["N01", "M11"]
    assert "speaks when" in some
    rules = json.loads(say("rules", "N01", "--json")[0])["rules"]
    assert [rule["rule"] for rule in rules] == ["nonfinite-forward"]
    assert "did you mean 'N09'?" in say("rules", "N99", code=2)[1]
    assert "did you mean 'dead-relu'?" in say("rules", "ded-relu", code=2)[1]


def test_two_runs_that_called_no_model_have_nothing_to_compare(say, tmp_path):
    for name in ("a", "b"):
        Writer(tmp_path / name, RunInfo(name)).close("complete", 0)
    page, _ = say("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert "nothing can be compared: no model was called in either run" in page


def test_sentences_in_a_table_go_on_in_the_next_line():
    columns = (Column("check", "check"), Column("text", "what was seen", flexible=True, is_prose=True))
    rows = (
        (Cell("overfit"), Cell("loss 0.5913 to 0.003388 in 40 steps on the same batch")),
        (Cell("cost"), Cell("little")),
    )
    page = lower(Page("p", (Table(columns, rows),)), Screen(width=40, fits=True))
    assert [line.rstrip() for line in page.splitlines()] == [
        "  check    what was seen",
        "  overfit  loss 0.5913 to 0.003388 in 40",
        "           steps on the same batch",
        "  cost     little",
    ]
