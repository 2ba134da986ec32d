"""Runs are found by path, name, beginning of a name or 'latest', and listed without being opened."""

import json
import time

import pytest

import clew
from clew.api.read import find_run
from clew.errors import RunNotFound
from clew.model.record import RunInfo
from clew.store.writer import Writer
from clew.testing.runs import make_record, make_run


@pytest.fixture
def root(tmp_path):
    for day, name in enumerate(["20260101-mlp", "20260102-cnn", "20260103-mlp"]):
        info = RunInfo(name, started=f"2026-01-0{day + 1}T10:00:00", command=["train.py", "--lr", "1"])
        make_run(tmp_path / "runs" / name, steps=day + 2, info=info)
    (tmp_path / "runs/notes").mkdir()
    (tmp_path / "runs/readme.txt").write_text("not a run")
    return tmp_path / "runs"


def test_a_run_is_opened_by_path_name_beginning_or_latest(root, monkeypatch):
    assert clew.open_run(root / "20260102-cnn").last_step == 2
    assert clew.open_run("20260102-cnn", root=root).name == "20260102-cnn"
    assert clew.open_run("20260103", root=root).name == "20260103-mlp"
    assert clew.open_run("latest", root=root).name == "20260103-mlp"
    monkeypatch.chdir(root.parent)
    assert clew.open_run("20260101-mlp").last_step == 1
    assert find_run("runs/20260101-mlp").name == "20260101-mlp"


def test_a_name_that_fits_none_or_several_is_answered_in_words(root, tmp_path):
    with pytest.raises(RunNotFound) as several:
        clew.open_run("202601", root=root)
    assert several.value.what == "'202601' is the beginning of 3 runs"
    assert several.value.next_step == "write more of the name: 20260101-mlp, 20260102-cnn, 20260103-mlp"
    with pytest.raises(RunNotFound) as wrong:
        clew.open_run("20260102-cmm", root=root)
    assert wrong.value.what == "there is no run '20260102-cmm'"
    assert wrong.value.next_step == "did you mean '20260102-cnn'?"
    with pytest.raises(RunNotFound) as empty:
        clew.open_run("latest", root=tmp_path / "nowhere")
    assert empty.value.what == "there is no run yet"
    with pytest.raises(RunNotFound, match="there is no run 'x'"):
        clew.open_run("x", root=tmp_path / "nowhere")


def test_runs_are_listed_newest_first(root):
    listed = clew.list_runs(root)
    assert [run.name for run in listed] == ["20260103-mlp", "20260102-cnn", "20260101-mlp"]
    newest = listed[0]
    assert (newest.state, newest.steps, newest.last_step, newest.loss) == ("complete", 4, 3, 0.25)
    assert newest.command == ("train.py", "--lr", "1")
    assert newest.size_bytes == clew.open_run(newest.path).size_bytes
    assert clew.list_runs(root / "nowhere") == []


def test_a_damaged_or_newer_run_does_not_break_the_list(root):
    (root / "20260101-mlp/run.json").write_text("{")
    content = json.loads((root / "20260102-cnn/run.json").read_text())
    (root / "20260102-cnn/run.json").write_text(json.dumps({**content, "format": 99}))
    (root / "20260103-mlp/rank0/summary.json").write_text("[]")
    by_name = {run.name: run for run in clew.list_runs(root)}
    assert by_name["20260101-mlp"].state == by_name["20260102-cnn"].state == "unknown"
    assert by_name["20260101-mlp"].problem.startswith("run.json cannot be read")
    assert by_name["20260102-cnn"].problem.startswith("the run has format 99")
    assert by_name["20260103-mlp"].steps == 0


def test_a_growing_run_is_listed_with_what_was_flushed(tmp_path):
    writer = Writer(tmp_path / "runs/a", RunInfo("a", started="2026-01-01"), flush_seconds=60)
    writer.put(make_record(0))
    writer.flush()
    (listed,) = clew.list_runs(tmp_path / "runs")
    assert (listed.state, listed.steps, listed.loss) == ("recording", 1, 1.0)
    writer.close("complete")


def test_the_latest_run_is_the_one_that_started_last(tmp_path):
    make_run(tmp_path / "b", info=RunInfo("b", started="2026-03-01T00:00:00"))
    time.sleep(0.01)
    make_run(tmp_path / "a", info=RunInfo("a", started="2026-02-01T00:00:00"))
    assert clew.open_run("latest", root=tmp_path).name == "b"
