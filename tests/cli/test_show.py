"""``clew ls`` and ``clew show``: what people read about their runs."""

import json
import os
import re
import subprocess
import sys

import pytest

from clew.cli import main


@pytest.fixture
def look(runs, capsys, monkeypatch):
    """Return a function that runs a command on the made-up runs and returns what it printed."""

    def run(line, *, columns=80, code=0):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main([*line.split(), "--root", str(runs)]) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    return run


def hide_size(text):
    """Return the text without sizes on disk: those belong to the version of Arrow."""
    return re.sub(r"\d[\d.]* [kM]?B\b", lambda found: "#".rjust(len(found[0])), text)


@pytest.mark.parametrize("columns", [80, 45])
def test_the_list_of_runs(look, golden, columns):
    text = look("ls", columns=columns)
    golden(f"ls_{columns}.txt", hide_size(text))
    assert text.index("broken") < text.index("fine"), "newest first"
    assert max(map(len, text.splitlines())) <= columns


def test_the_list_of_runs_for_programs(look):
    broken, fine = json.loads(look("ls --json"))
    assert (broken["name"], broken["state"], broken["loss"]) == ("20261115-152501-broken", "died", "NaN")
    assert (fine["state"], fine["steps"], fine["exit_code"]) == ("complete", 40, 0)
    assert fine["size_bytes"] > 1000
    assert fine["loss"] == pytest.approx(0.1485, rel=1e-3)


def test_an_empty_folder_says_how_to_begin(capsys, tmp_path):
    assert main(["ls", "--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"  no runs in {tmp_path}; record one with: clew run train.py\n"


@pytest.mark.parametrize("columns", [100, 80, 40])
@pytest.mark.parametrize("name", ["fine", "broken"])
def test_the_page_of_a_run(look, runs, golden, name, columns):
    run = {"fine": "20261115-142501", "broken": "latest"}[name]
    text = look(f"show {run}", columns=columns).replace(str(runs), "RUNS")
    if columns > 40:
        golden(f"show_{name}_{columns}.txt", hide_size(text))
    assert max(map(len, text.splitlines())) <= columns


def test_shares_of_time_add_up(look):
    blocks = json.loads(look("show latest --json"))["blocks"]
    times = next(
        block for block in blocks if block["type"] == "Table" and "share" in block["columns"][1]["key"]
    )
    assert sum(row["share"] for row in times["rows"]) == pytest.approx(1)
    assert sum(row["total_seconds"] for row in times["rows"]) == pytest.approx(60 * 4e-3)


def test_sites_are_sorted_by_what_is_wrong_with_them(look):
    blocks = json.loads(look("show latest --json"))["blocks"]
    sites = next(
        block for block in blocks if block["type"] == "Table" and block["columns"][0]["key"] == "site"
    )
    assert [(row["site"], row["health"]) for row in sites["rows"]] == [
        ("fc2", "NaN in grad_output, step 50"),
        ("fc1", "exploding 8103× in param, step 45"),
        ("(net)", "all zero in output, step 45"),
        ("relu", "dead, 99 % zero in output, step 45"),
        ("batch.0", "ordinary"),
    ]
    ratios = {row["site"]: row["update_ratio"] for row in sites["rows"]}
    assert ratios["fc2"] == pytest.approx(1)
    assert ratios["batch.0"] is None


def test_the_first_bad_record_leads_the_page_and_its_next_step_works(look):
    text = look("show latest", columns=120)
    assert "✗ NaN first seen at step 50: grad_output of fc2" in text
    command = re.search(r"next: clew (show \S+ --site fc2 --step 48:51)", text)[1]
    rows = [line.split() for line in look(command).splitlines()[2:]]
    assert {row[0] for row in rows} == {"50"}, "48 and 49 were thinned"
    assert {row[1] for row in rows} == {"fc2"}


@pytest.mark.parametrize("columns", [80, 40])
def test_filters_turn_the_page_into_a_table(look, golden, columns):
    text = look("show latest --site fc* --kind grad,param --step 45:56:5", columns=columns)
    golden(f"show_table_{columns}.txt", text)
    lines = text.splitlines()[2:]
    rows = [line for line in lines if line.split()[0].isdigit()]
    assert len(rows) == 3 * 4
    assert max(map(len, text.splitlines())) <= columns


def test_a_single_statistic_is_drawn_over_all_steps(look, golden):
    text = look("show latest --site fc1.weight --kind param --stat abs_max")
    golden("show_curve.txt", text)
    assert "fc1.weight param abs_max (log scale)" in text
    assert "step 0" in text
    assert re.search(r"^ +55  fc1.weight  param ", text, re.MULTILINE)


def test_the_limit_of_rows_is_said(look):
    text = look("show latest --step 0:20", columns=120)
    assert text.splitlines()[-1].strip() == (
        "the last 50 of 280 rows; --limit 0 shows all, clew export 20261115-152501-broken writes them"
    )
    assert len(look("show latest --step 0:20 --limit 0", columns=120).splitlines()) == 282


def test_statistics_for_programs(look):
    page = json.loads(look("show latest --site fc2 --kind grad_output --step 50 --json"))
    (row,) = page["blocks"][1]["rows"]
    assert (row["step"], row["nan"], row["mean"]) == (50, 128, "NaN")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("show nothing", "there is no run 'nothing'"),
        ("show 20261115", "'20261115' is the beginning of 2 runs"),
        ("show latest --site fc9", "no site is called or matches 'fc9'"),
        ("show latest --kind grads", "did you mean 'grad'?"),
        ("show latest --stat l3", "unknown stat 'l3'\n  next:  did you mean 'l2'?"),
        ("show latest --step 9-12", "'9-12' is no range of steps"),
        ("show latest --rank 7", "the run has no rank 7"),
        ("show latest --rank x", "argument --rank: invalid int value: 'x'"),
        ("show latest --limit -1", "'-1' is no number of rows"),
        ("show latest --step 5:2", "there is no step in '5:2'"),
        ("show latest --step :0", "there is no step in ':0'"),
        ("show latest --step 1 --limit -3", "'-3' is no number of rows"),
    ],
)
def test_a_wrong_choice_says_what_there_is(look, line, message):
    assert message in look(line, code=2)


def test_the_folder_of_runs_is_that_of_the_settings(runs, capsys, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("CLEW_OUT", str(runs))
        assert main(["ls"]) == 0
    assert "20261115-142501-fine" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_error(runs):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "clew", "show", "latest", "--root", str(runs)]
    done = subprocess.run(command, check=False, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
