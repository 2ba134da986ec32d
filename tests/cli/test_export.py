"""``clew export`` and ``clew rm``: rows for other tools, and the end of a run."""

import csv
import errno
import io
import json
import math
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from clew.cli import export, main


@pytest.fixture
def write(runs, capsys):
    """Return a function that exports and gives back what went to standard output."""

    def run(line, *, code=0):
        assert main(["export", *line.split(), "--root", str(runs)]) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    return run


def test_csv_has_a_row_for_each_record(write):
    rows = list(csv.DictReader(io.StringIO(write("latest --to csv"))))
    assert len(rows) == 28 * 14
    bad = [row for row in rows if row["nan"] != "0"]
    assert {(row["step"], row["site"], row["kind"]) for row in bad} == {
        ("50", "fc2", "grad_output"),
        ("55", "fc2", "grad_output"),
    }
    assert all(math.isnan(float(row["mean"])) for row in bad)


def test_a_dash_is_standard_output_as_everywhere(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert write("latest --to csv -o -") == write("latest --to csv")
    assert not Path("-").exists()


def test_a_format_that_the_name_of_the_file_denies_is_said(runs, tmp_path, capsys):
    path = tmp_path / "x.csv"
    words = ["export", "latest", "-o", str(path), "--step", "5", "--root", str(runs)]
    assert main([*words, "--to", "json"]) == 0
    assert (
        f"clew: wrote {path} as json, as --to says, though its name ends in .csv\n" in capsys.readouterr().err
    )
    assert json.loads(path.read_text())
    assert main(words) == 0
    assert capsys.readouterr().err.endswith(f"clew: wrote {path}\n")


def test_json_is_strict_and_one_row_a_line(write):
    text = write("latest --to json --site fc2 --kind grad_output --step 45:51")
    rows = json.loads(text)
    assert [(row["step"], row["mean"]) for row in rows] == [(45, 0.005), (50, "NaN")] or rows[1][
        "mean"
    ] == "NaN"
    assert len(text.splitlines()) == len(rows) + 2
    assert json.loads(write("latest --to json --step 900")) == []


def test_parquet_holds_the_same_numbers(write, tmp_path):
    path = tmp_path / "out.parquet"
    write(f"latest -o {path}")
    table = pq.read_table(path)
    assert table.num_rows == 28 * 14
    rows = list(csv.DictReader(io.StringIO(write("latest --to csv"))))
    assert table["site"].to_pylist() == [row["site"] for row in rows]
    assert table["l2"].to_pylist() == pytest.approx([float(row["l2"]) for row in rows], nan_ok=True)


def test_pieces_make_no_difference(write, monkeypatch):
    whole = write("latest --to csv")
    monkeypatch.setattr(export, "PIECE_ROWS", 30)
    assert write("latest --to csv") == whole


def test_scalars_are_a_table_of_their_own(write):
    rows = list(csv.DictReader(io.StringIO(write("latest --to csv --table scalars --step 10:12"))))
    assert {row["name"] for row in rows if row["step"] == "10"} > {
        "loss",
        "lr",
        "memory.process",
        "time.clew",
    }
    assert {row["step"] for row in rows} == {"10", "11"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("latest", "no format was given"),
        ("latest -o out.txt", "no format was given"),
        ("latest --to parquet", "Parquet needs a file"),
        ("latest --to excel", "argument --to: invalid choice: 'excel'"),
        ("latest --to csv -o /nowhere/out.csv", "the file cannot be written: No such file or directory"),
        ("latest --to csv --table scalars --site fc1", "scalars have no site and no kind"),
    ],
)
def test_what_cannot_be_written_is_said(write, line, message):
    assert message in write(line, code=2)


def test_a_failed_export_leaves_no_file(write, tmp_path, monkeypatch):
    path = tmp_path / "out.csv"
    path.write_text("precious")
    write(f"latest --to csv --site nothing -o {path}", code=2)
    assert path.read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.csv"]


def test_a_pipe_is_written_to_and_not_replaced(write, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    got = []
    reader = threading.Thread(target=lambda: got.append(path.read_text()))
    reader.start()
    write(f"latest --to csv -o {path}")
    reader.join()
    assert path.is_fifo()
    assert got == [write("latest --to csv")]


class FullDisk(io.StringIO):
    """Standard output on a disk without room."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("command", ["export latest --to csv", "show latest", "ls"])
def test_standard_output_on_a_full_disk_is_said(command, runs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", FullDisk())
    assert main([*command.split(), "--root", str(runs)]) == 2
    assert capsys.readouterr().err == "clew: standard output cannot be written: No space left on device\n"


def talk(command, answer=""):
    """Run a command on a terminal, answer its question and return its exit code and what was shown."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm"}
    )
    os.close(slave)
    os.write(master, answer.encode())
    shown = b""
    while True:
        try:
            chunk = os.read(master, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)
    return process.wait(), shown.decode()


def test_progress_is_shown_on_a_terminal_and_gone_at_the_end(runs, tmp_path):
    path = tmp_path / "out.csv"
    code, shown = talk(
        [sys.executable, "-m", "clew", "export", "latest", "-o", str(path), "--root", str(runs)]
    )
    assert code == 0
    assert "100%" in shown
    assert shown.rstrip().endswith(f"clew: wrote {path}")
    assert len(path.read_text().splitlines()) == 28 * 14 + 1


def test_rm_asks_and_takes_no_for_an_answer(own_runs):
    command = [sys.executable, "-m", "clew", "rm", "a-first", "--root", str(own_runs)]
    code, shown = talk(command, "n\n")
    assert code == 1
    assert "a-first  3 steps" in shown
    assert "delete this run? [y/N]" in shown
    assert (own_runs / "a-first").exists()
    code, shown = talk(command, "y\n")
    assert code == 0
    assert not (own_runs / "a-first").exists()
    assert (own_runs / "b-second").exists()


def test_rm_without_anybody_to_ask_needs_yes(own_runs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    words = ["rm", "a-first", "b-second", "--root", str(own_runs)]
    assert main(words) == 2
    assert "there is nobody to ask\n  next:  --yes deletes without asking" in capsys.readouterr().err
    assert main([*words, "--yes"]) == 0
    assert list(own_runs.iterdir()) == []


@pytest.mark.parametrize("victim", ["nothing", ".", "folder"])
def test_rm_deletes_nothing_but_runs(own_runs, capsys, victim):
    folder = own_runs / "folder"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    name = str(folder) if victim == "folder" else victim
    assert main(["rm", "a-first", name, "--yes", "--root", str(own_runs)]) == 2
    assert (own_runs / "a-first").exists(), "one wrong name and nothing is deleted"
    assert (folder / "thesis.txt").exists()
    assert Path.cwd().exists()
