"""What a writer takes, a reader gives back: every number, in every state of the file."""

import json
import threading
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from clew.errors import UsageError
from clew.model.record import Fault, RunInfo, Scalar, Site, StepRecord
from clew.model.schema import FORMAT_VERSION, STAT_NAMES
from clew.query import Run
from clew.store import appender, arrange, part
from clew.store.layout import claim_folder
from clew.store.writer import Writer
from clew.testing.runs import ROWS, make_record, make_run, make_sites


def expected(steps, **record):
    return np.concatenate([make_record(step, **record).values for step in steps])


def recorded(run):
    table = run.stats()
    return np.stack([table[name] for name in STAT_NAMES], axis=1)


@pytest.mark.parametrize("part_rows", [1, 13, 500_000])
def test_every_statistic_comes_back(tmp_path, part_rows):
    writer = Writer(tmp_path / "run", RunInfo("run"), part_rows=part_rows)
    writer.add_sites(make_sites())
    for step in range(7):
        writer.put(make_record(step))
        writer.flush()
    live = recorded(Run(tmp_path / "run"))
    writer.close("complete")
    run = Run(tmp_path / "run")
    assert np.array_equal(live, expected(range(7)).astype(np.float32), equal_nan=True)
    assert np.array_equal(recorded(run), live, equal_nan=True)
    table = run.stats()
    assert list(zip(table["site"], table["kind"], strict=True))[: len(ROWS)] == list(ROWS)
    assert table["seq"].tolist() == list(range(len(ROWS))) * 7
    assert table["step"].tolist() == sorted(table["step"].tolist())
    assert run.problems == []


def test_hashes_and_histograms_come_back_also_when_only_some_steps_have_them(tmp_path):
    writer = Writer(tmp_path / "run", RunInfo("run"))
    writer.add_sites(make_sites())
    for step in range(6):
        writer.put(make_record(step, extras=step % 3 == 2))
        writer.flush()
    writer.close("complete")
    run = Run(tmp_path / "run")
    assert recorded(run).shape == (6 * len(ROWS), 14)
    hashes = run.stats(columns=["hash"])["hash"].reshape(6, -1)
    for step in range(6):
        exact = make_record(step, extras=True)
        assert np.array_equal(hashes[step], exact.hashes if step % 3 == 2 else np.zeros(len(ROWS), np.uint64))
    steps, counts = run.histograms("fc1", "output")
    assert steps.tolist() == [2, 5]
    assert np.array_equal(counts[1], make_record(5, extras=True).hists[0])


def record_of(values, step=0):
    n = len(values)
    zeros = np.zeros(n, np.int16)
    return StepRecord(
        step, np.zeros(n, np.int32), zeros.astype(np.int8), zeros, zeros.astype(np.int8), values
    )


def test_finite_stays_finite_and_small_does_not_become_zero(tmp_path):
    values = np.full((1, 14), 1e300)
    values[0, :7] = [2**40, 0, 0, 0, 2**33, 5, 0]
    values[0, 7:9] = -1e300, 1e-300
    values[0, 9] = np.nan
    values[0, 10] = 0.0
    with Closing(Writer(tmp_path / "run", RunInfo("run"))) as writer:
        writer.put(record_of(values))
        writer.put(record_of(values.copy(), 1))
    row = Run(tmp_path / "run").stats().row(0)
    assert (row["count"], row["zero"], row["negative"]) == (2**40, 2**33, 5)
    assert row["min"] == -np.finfo(np.float32).max
    assert row["max"] == np.finfo(np.float32).smallest_subnormal
    assert np.isnan(row["mean"])
    assert row["std"] == 0
    assert np.isfinite(row["l2"])


class Closing:
    def __init__(self, writer):
        self.writer = writer

    def __enter__(self):
        return self.writer

    def __exit__(self, *_):
        self.writer.close("complete")


def test_scalars_batches_and_faults_come_back(tmp_path):
    writer = Writer(tmp_path / "run", RunInfo("run"))
    record = make_record(3)
    fault = Fault(3, "capture", "boom", "Traceback …")
    writer.put(StepRecord(3, *(getattr(record, name) for name in ("sites", "kinds", "ordinals", "modes", "values")),
                          scalars=record.scalars, batches=record.batches, faults=(fault,)))  # fmt: skip
    writer.close("complete")
    run = Run(tmp_path / "run")
    assert {name: list(series) for name, series in run.scalars().items()} == {
        "loss": [(3, 0.25)],
        "lr": [(3, 0.1)],
        "lr[1]": [(3, 0.01)],
    }
    where = {"rank": 0, "step": 3, "seq": 0, "leaf": "x", "ordinal": 0, "mode": "train"}
    what = {"shape": (8, 4), "dtype": "float32", "fingerprint": 4}
    origin = {"loader": "train", "position": 3, "indices": (3, 4)}
    assert run.batches().row(0) == where | what | origin
    assert run.faults() == [fault]


def test_steps_with_scalars_alone_are_steps(tmp_path):
    writer = Writer(tmp_path / "run", RunInfo("run"))
    empty = record_of(np.zeros((0, 14)))
    for step in (0, 5):
        writer.put(StepRecord(step, *(getattr(empty, n) for n in ("sites", "kinds", "ordinals", "modes", "values")),
                              scalars=(Scalar("loss", float("inf")),)))  # fmt: skip
    writer.close("complete")
    run = Run(tmp_path / "run")
    assert run.steps.tolist() == [0, 5]
    assert run.scalar("loss").values.tolist() == [np.inf, np.inf]
    assert len(run.stats()) == 0
    assert run.latest().row is not None and len(run.latest()) == 0


def test_the_last_step_before_a_pause_gets_on_disk_by_itself(tmp_path):
    writer = Writer(tmp_path / "run", RunInfo("run"), flush_seconds=0.05)
    writer.add_sites(make_sites())
    writer.put(make_record(0))
    deadline = time.monotonic() + 300
    while (run := Run(tmp_path / "run")).last_step != 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert run.last_step == 0
    assert run.state == "recording"
    writer.close("complete")


def test_a_tail_of_many_small_flushes_becomes_one_batch_and_keeps_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(appender, "MERGE_AFTER", 8)
    writer = Writer(tmp_path / "run", RunInfo("run"), flush_seconds=60)
    writer.add_sites(make_sites())
    run = None
    for step in range(20):
        writer.put(make_record(step))
        writer.flush()
        run = run or Run(tmp_path / "run")
        run.refresh()
        assert run.stats(columns=["l2"])["step"][:: len(ROWS)].tolist() == list(range(step + 1))
    assert np.array_equal(recorded(Run(tmp_path / "run")), expected(range(20)).astype(np.float32))
    writer.close("complete")


def test_a_reader_that_looks_rarely_is_not_confused_by_rewritten_tails(tmp_path, monkeypatch):
    monkeypatch.setattr(appender, "MERGE_AFTER", 3)
    writer = Writer(tmp_path / "run", RunInfo("run"), flush_seconds=60)
    writer.add_sites(make_sites())
    run = Run(tmp_path / "run")
    for step in range(60):
        writer.put(make_record(step))
        writer.flush()
        if step % 11 == 10:
            run.refresh()
            assert np.array_equal(recorded(run), expected(range(step + 1)).astype(np.float32))
    assert run.problems == []
    writer.close("complete")


def irregular(step):
    """Return a record whose rows differ from step to step: some missing, some twice, another order."""
    record, dice = make_record(step), np.random.default_rng(step)
    rows = dice.integers(0, len(ROWS), dice.integers(1, 2 * len(ROWS)))
    names = ("sites", "kinds", "ordinals", "modes", "values")
    return StepRecord(step, *(getattr(record, name)[rows] for name in names))


@pytest.mark.parametrize("make", [make_record, irregular])
def test_sealing_keeps_every_row_whether_steps_are_alike_or_not(tmp_path, make):
    writer = Writer(tmp_path / "run", RunInfo("run"))
    writer.add_sites(make_sites())
    for step in (0, 1, 2, 5, 9):
        writer.put(make(step))
    writer.close("complete")
    table = Run(tmp_path / "run").stats()
    for step in (0, 1, 2, 5, 9):
        rows, record = table.take(table["step"] == step), make(step)
        assert rows["seq"].tolist() == list(range(len(record)))
        assert np.array_equal(rows.codes("site"), record.sites)
        assert np.array_equal(rows.codes("kind"), record.kinds)
        assert np.array_equal(rows["l2"], record.values[:, 13].astype(np.float32))
    keys = pq.read_table(tmp_path / "run/rank0/stats/part-000000.parquet")
    columns = [keys[name].to_numpy() for name in ("seq", "step", "ordinal", "kind", "site")]
    assert np.array_equal(np.lexsort(columns), np.arange(len(keys)))


def test_a_part_of_more_steps_than_are_turned_at_once_is_sealed(tmp_path, monkeypatch):
    monkeypatch.setattr(arrange, "TURNED_ROWS", 16)
    monkeypatch.setattr(part, "ROW_GROUP", 8)
    writer = Writer(tmp_path / "run", RunInfo("run"))
    writer.add_sites([Site(0, "fc1", "module")])
    values = np.random.default_rng(0).uniform(1, 2, (50, 1, len(STAT_NAMES))).astype(np.float32)
    values[:, :, 1:4] = 0  # no NaN, no infinity: columns that a tail leaves out
    for step in range(50):
        writer.put(record_of(values[step].astype(np.float64), step))
    writer.close("complete")
    assert not writer.stopped
    run = Run(tmp_path / "run")
    assert np.array_equal(run.stats(columns=["l2"])["l2"], values[:, 0, STAT_NAMES.index("l2")])
    (sealed,) = (tmp_path / "run").rglob("stats/part-*")
    assert pq.ParquetFile(sealed).metadata.num_row_groups == 7


def test_parts_are_parquet_that_any_tool_reads(tmp_path):
    make_run(tmp_path / "run", steps=5)
    part = tmp_path / "run/rank0/stats/part-000000.parquet"
    table = pq.read_table(part)
    assert table.num_rows == 5 * len(ROWS)
    assert "positive" not in table.column_names and "abs_max" not in table.column_names
    metadata = pq.read_metadata(part)
    assert metadata.metadata[b"clew.format"] == str(FORMAT_VERSION).encode()
    assert metadata.metadata[b"clew.kinds"].startswith(b"input,output,grad_output")
    site, step = table["site"].to_numpy(), table["step"].to_numpy()
    assert np.array_equal(np.lexsort((step, table["kind"].to_numpy(), site)), np.arange(len(site)))
    statistics = metadata.row_group(0).column(metadata.schema.names.index("nan")).statistics
    assert statistics.max == 0


def test_a_closed_folder_holds_nothing_but_the_run(tmp_path):
    folder = make_run(tmp_path / "run", steps=3)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == [
        "rank0/batches/part-000000.parquet",
        "rank0/scalars/part-000000.parquet",
        "rank0/sites.json",
        "rank0/stats/part-000000.parquet",
        "rank0/summary.json",
        "run.json",
    ]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("clew")]


def test_sites_are_written_again_only_when_they_change(tmp_path):
    writer = Writer(tmp_path / "run", RunInfo("run"))
    path = tmp_path / "run/rank0/sites.json"
    writer.add_sites(make_sites())
    writer.flush()
    first = path.stat().st_ino
    writer.add_sites(make_sites())
    writer.flush()
    assert path.stat().st_ino == first
    writer.add_sites([Site(17, "late", "module")])
    writer.flush()
    assert path.stat().st_ino != first
    writer.add_sites([Site(17, "late", "module", shape=(5,))])
    writer.close("complete")
    assert json.loads(path.read_text())["sites"][-1]["shape"] == [5]


def test_provenance_that_comes_late_is_written(tmp_path):
    info = RunInfo("run", command=["train.py"])
    writer = Writer(tmp_path / "run", info)
    info.torch = "2.13.0"
    info.seeds = {"torch": 7}
    writer.update_info(info)
    writer.flush()
    assert Run(tmp_path / "run").info.torch == "2.13.0"
    writer.close("died", 3)
    run = Run(tmp_path / "run")
    assert (run.info.seeds, run.info.exit_code, run.state) == ({"torch": 7}, 3, "died")
    assert run.info.ended


def test_ending_twice_or_writing_after_the_end_is_harmless(tmp_path):
    writer = Writer(tmp_path / "run", RunInfo("run"))
    writer.put(make_record(0))
    with pytest.raises(UsageError, match="complete or died, not as 'recording'"):
        writer.close("recording")
    writer.close("complete")
    writer.close("died")
    writer.put(make_record(1))
    writer.flush()
    writer.log("late")
    run = Run(tmp_path / "run")
    assert (run.state, run.last_step) == ("complete", 0)


def test_a_taken_name_gets_a_number(tmp_path):
    names = [claim_folder(tmp_path / "runs", "my run/x").name for _ in range(3)]
    assert names == ["my-run-x", "my-run-x-2", "my-run-x-3"]
    assert claim_folder(tmp_path, "...").name == "run"


def test_log_lines_are_kept(tmp_path):
    writer = Writer(tmp_path / "run", RunInfo("run"))
    writer.log("thinned to every 2nd step")
    writer.close("complete")
    assert (tmp_path / "run/rank0/log.txt").read_text().endswith("thinned to every 2nd step\n")
