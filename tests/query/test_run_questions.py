"""What one asks a run, and the answers, against tensors that can be made again."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from clew.errors import MissingExtra, UsageError
from clew.model.record import RunInfo, StepRecord
from clew.model.schema import KIND_INDEX, STAT_NAMES
from clew.query import Run
from clew.query.merge import STORED, merge_by_step
from clew.stats import reference
from clew.store.writer import Writer
from clew.testing.runs import ROWS, make_record, make_run, make_sites, make_tensor
from clew.views.health import examine
from clew.views.run_page import make_page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(make_run(tmp_path_factory.mktemp("questions") / "small", steps=30, extras=True))


def close(a, b):
    return np.allclose(a, b, rtol=1e-6, atol=0, equal_nan=True)


def test_what_a_run_says_of_itself(run):
    assert (run.name, run.state, run.ranks, run.problems, run.last_step) == ("small", "complete", [0], [], 29)
    assert run.steps.tolist() == list(range(30))
    assert run.info.started == "2026-01-01T00:00:00+0000"
    assert run.size_bytes > 1000
    assert [site.name for site in run.sites][:3] == ["fc1", "fc1.weight", "fc1.bias"]
    assert run.sites[1].parent == 0
    assert repr(run).endswith("complete, 30 steps, 6 sites)")


@pytest.mark.parametrize("stat", STAT_NAMES)
def test_a_series_of_every_statistic(run, stat):
    series = run.series("fc2", "output", stat)
    exact = [
        reference.summarise(make_tensor(step, "fc2", "output"))[STAT_NAMES.index(stat)] for step in range(30)
    ]
    assert series.steps.tolist() == list(range(30))
    assert close(series.values, exact)
    assert series.values.dtype == np.float64
    assert series.last == series.values[-1]
    assert series.name == f"fc2 output {stat}"


@pytest.mark.parametrize(("stat", "q"), [("median", 0.5), ("p05", 0.05), ("p95", 0.95), ("p99.9", 0.999)])
def test_quantiles_come_from_the_histogram(run, stat, q):
    tensor = make_tensor(4, "fc1", "output")
    exact = reference.quantile(reference.histogram(tensor), reference.summarise(tensor), q)
    assert close(run.series("fc1", "output", stat).values[4], exact)


def test_a_module_answers_for_its_parameters(run):
    whole = np.concatenate([make_tensor(7, f"fc1.{name}", "grad").ravel() for name in ("weight", "bias")])
    exact = reference.summarise(whole)
    for stat in STAT_NAMES:
        assert close(run.series("fc1", "grad", stat).values[7], exact[STAT_NAMES.index(stat)]), stat
    with pytest.raises(UsageError, match="'fc1' has several parameters") as caught:
        run.series("fc1", "grad", "median")
    assert "fc1.weight, fc1.bias" in caught.value.next_step


def test_merging_by_step_obeys_the_law_of_the_reference():
    dice = np.random.default_rng(3)
    tensors = [[dice.standard_normal(dice.integers(0, 9)) for _ in range(4)] for _ in range(25)]
    for group in tensors:
        for tensor in group:
            tensor[dice.random(len(tensor)) < 0.3] = dice.choice([np.nan, np.inf, -np.inf, 0.0])
    rows = np.array([reference.summarise(tensor) for group in tensors for tensor in group])
    columns = {name: rows[:, STAT_NAMES.index(name)] for name in STORED}
    merged = merge_by_step({"step": np.repeat(np.arange(25), 4), **columns})
    exact = np.array(
        [reference.merge([reference.summarise(tensor) for tensor in group]) for group in tensors]
    )
    for name in STORED:
        assert np.allclose(merged[name], exact[:, STAT_NAMES.index(name)], equal_nan=True), name


def test_evaluation_between_training_steps_does_not_disturb_a_series(tmp_path):
    writer = Writer(tmp_path / "run", RunInfo("run"))
    writer.add_sites(make_sites())
    record = make_record(0)
    both = [
        np.concatenate([getattr(record, name)] * 2)
        for name in ("sites", "kinds", "ordinals", "modes", "values")
    ]
    both[3][len(ROWS) :] = 1
    both[4][len(ROWS) :] = 5.0
    writer.put(StepRecord(0, *both))
    writer.close("complete")
    run = Run(tmp_path / "run")
    train = reference.summarise(make_tensor(0, "fc1", "output"))[13]
    assert close(run.series("fc1", "output", "l2").values, [train])
    assert run.series("fc1", "output", "l2", mode="eval").values.tolist() == [5.0]
    assert len(run.stats(mode="eval")) == len(ROWS)
    assert set(run.stats(mode="eval")["mode"]) == {"eval"}


@pytest.mark.parametrize("shift", [0, 1])
def test_an_evaluation_before_each_step_leaves_the_series_of_training_whole(tmp_path, shift):
    """Also in runs of older versions, in which the call of training was the second one of its module."""
    writer = Writer(tmp_path / "run", RunInfo("run"))
    writer.add_sites(make_sites())
    for step in range(6):
        record = make_record(step, extras=True)
        names = ("sites", "kinds", "ordinals", "modes", "values", "hashes", "hists")
        columns = {name: np.concatenate([getattr(record, name)] * (1 + step % 2)) for name in names}
        if step % 2:  # evaluation, then training
            columns["modes"][: len(ROWS)] = 1
            columns["values"][: len(ROWS), 4:] = 5.0  # all but the counts of elements that are not finite
            columns["ordinals"][len(ROWS) :] += shift
        writer.put(StepRecord(step, **columns))
    writer.close("complete")
    run = Run(tmp_path / "run")
    for kind in ("output", "grad"):
        site = "fc1" if kind == "output" else "fc1.weight"
        exact = [reference.summarise(make_tensor(step, site, kind)) for step in range(6)]
        series = run.series(site, kind, "l2")
        assert series.steps.tolist() == list(range(6))
        assert close(series.values, [row[STAT_NAMES.index("l2")] for row in exact])
        assert run.series(site, kind, "l2", mode="train").steps.tolist() == list(range(6))
        assert run.series(site, kind, "l2", mode="eval").values.tolist() == [5.0] * 3
        medians = [
            reference.quantile(reference.histogram(make_tensor(step, site, kind)), row, 0.5)
            for step, row in enumerate(exact)
        ]
        assert close(run.series(site, kind, "median").values, medians)
        steps, counts = run.histograms(site, kind)
        assert steps.tolist() == list(range(6))
        assert counts[3].tolist() == reference.histogram(make_tensor(3, site, kind)).tolist()
    shown = {health.site.name: health.output_std for health in examine(run).sites}
    assert close(shown["fc1"], reference.summarise(make_tensor(5, "fc1", "output"))[STAT_NAMES.index("std")])


def test_wrong_words_are_answered_with_the_nearest_right_one(run):
    cases = [
        (lambda: run.series("fc3", "grad", "l2"), "no site is called or matches 'fc3'", "did you mean 'fc"),
        (lambda: run.series("fc1", "grads", "l2"), "unknown kind 'grads'", "did you mean 'grad'?"),
        (lambda: run.series("fc1", "grad", "l3"), "unknown stat 'l3'", "did you mean 'l2'?"),
        (lambda: run.series("fc1", "grad", "l2", mode="training"), "unknown mode 'training'", "'train'?"),
        (lambda: run.series("fc1", "grad", "l2", rank=4), "the run has no rank 4", "ranks: [0]"),
        (lambda: run.scalar("losss"), "unknown scalar 'losss'", "did you mean 'loss'?"),
        (lambda: run.stats(columns=["meen"]), "unknown column 'meen'", "did you mean 'mean'?"),
        (lambda: run.stats(step=-1), "step -1 is not understood", "slice(100, 200)"),
        (lambda: run.stats(step="last"), "step 'last' is not understood", "'latest'"),
        (lambda: run.stats(step=slice(9, 3, -1)), "is not understood", "slice"),
        (lambda: run.find("qqq*"), "no site is called or matches 'qqq*'", "there are: fc1, fc1.weight"),
        (lambda: run.latest()["meen"], "the table has no column 'meen'", "did you mean 'mean'?"),
    ]
    for question, what, advice in cases:
        with pytest.raises(UsageError) as caught:
            question()
        assert what in caught.value.what
        assert advice in caught.value.next_step


def names(sites):
    return [site.name for site in sites]


def test_sites_are_found_by_pattern_kind_and_role(run):
    assert names(run.find("fc?")) == ["fc1", "fc2"]
    assert names(run.find("*.{weight,bias}")) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert names(run.find("*", kind="grad")) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert names(run.find(role="module")) == ["fc1", "fc2"]
    assert run.find("fc1", kind="update") == []
    assert run.kinds("fc2") == ["output", "grad_output"]


def test_square_brackets_in_a_name_are_plain_letters(tmp_path):
    from clew.model.record import Site

    writer = Writer(tmp_path / "run", RunInfo("run"))
    writer.add_sites([Site(0, "lstm[0]", "leaf"), Site(1, "lstm0", "leaf")])
    writer.close("complete")
    assert names(Run(tmp_path / "run").find("lstm[0]")) == ["lstm[0]"]
    assert names(Run(tmp_path / "run").find("*[0]")) == ["lstm[0]"]


def test_tables_by_site_kind_and_step(run):
    assert len(run.stats()) == 30 * len(ROWS)
    assert run.stats("fc1", "output", step=5)["step"].tolist() == [5]
    assert run.stats("fc1", "output", step=slice(5, 9))["step"].tolist() == [5, 6, 7, 8]
    assert run.stats("fc1", "output", step=slice(20, None, 4))["step"].tolist() == [20, 24, 28]
    assert run.stats("fc1", "output", step=range(1, 6, 2))["step"].tolist() == [1, 3, 5]
    assert run.stats("fc1", "output", step=99)["step"].tolist() == []
    assert run.stats(["fc1", run.sites[3]], ["output", "grad_output"], step=0)["seq"].tolist() == [0, 1, 2, 3]
    latest = run.latest()
    assert latest["step"].tolist() == [29] * len(ROWS)
    assert list(zip(latest["site"], latest["kind"], strict=True)) == list(ROWS)
    assert set(run.stats(step=3, columns=["l2"]).columns) == {
        "rank", "step", "seq", "site", "kind", "ordinal", "mode", "l2",
    }  # fmt: skip


def test_a_table_is_columns_rows_and_arrow(run):
    table = run.stats("fc*", "output", step=2)
    assert len(table) == 2
    rows = list(table)
    assert rows[0] == table.row(0)
    assert rows[1]["site"] == "fc2"
    assert isinstance(rows[0]["count"], int) and isinstance(rows[0]["mean"], float)
    assert table.codes("kind").tolist() == [KIND_INDEX["output"]] * 2
    assert table.take(table["site"] == "fc2").row(0) == rows[1]
    assert table.to_arrow().to_pylist() == rows
    assert "mean" in table and "meen" not in table
    assert repr(table).startswith("Table(2 rows: rank, step, seq")


def test_pandas_is_used_when_it_is_there(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match="to_pandas needs pandas"):
        run.latest().to_pandas()
    monkeypatch.undo()
    pandas = pytest.importorskip("pandas")
    frame = run.latest().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["site"].tolist() == run.latest()["site"].tolist()


@pytest.fixture(scope="module")
def sick(tmp_path_factory):
    """A run in several parts whose step 17 has a NaN in three places."""
    folder = tmp_path_factory.mktemp("sick") / "run"
    writer = Writer(folder, RunInfo("run"), part_rows=5 * len(ROWS), flush_seconds=60)
    writer.add_sites(make_sites())
    for step in range(24):
        bad = [("fc1", "grad_output"), ("fc1.weight", "grad"), ("fc2", "grad_output")] if step >= 17 else []
        writer.put(make_record(step, broken=bad))
        writer.flush()
    writer.close("died")
    return Run(folder)


def test_the_first_nonfinite_row_in_order_of_execution(sick):
    row = sick.first_nonfinite()
    assert (row["step"], row["site"], row["kind"], row["nan"]) == (17, "fc2", "grad_output", 1)
    assert sick.first_nonfinite("grad")["site"] == "fc1.weight"
    assert sick.first_nonfinite(site="fc1")["kind"] == "grad_output"
    assert sick.first_nonfinite(["param", "output"]) is None


def test_the_first_row_of_any_kind(sick):
    row = sick.first(lambda table: table["abs_max"] > 2.5, kind="output")
    exact = next(
        (step, site)
        for step in range(24)
        for site in ("fc1", "fc2")
        if np.abs(make_tensor(step, site, "output")).max() > 2.5
    )
    assert (row["step"], row["site"]) == exact
    assert sick.first(lambda table: table["abs_max"] > 2.5, kind="output", columns=["abs_max"]) == row
    assert sick.first(lambda table: table["l2"] > 1e9) is None


def test_ranks_are_joined_by_the_name_of_the_site(tmp_path):
    folder = make_run(tmp_path / "run", steps=3)
    writer = Writer(folder, RunInfo("run", rank=1, world_size=2, notes=["ended by os._exit(9)"]))
    shuffled = list(reversed(make_sites()))
    order = {site.id: number for number, site in enumerate(shuffled)}
    writer.add_sites(replace(site, id=order[site.id], parent=order.get(site.parent, -1)) for site in shuffled)
    for step in range(3):
        record = make_record(step, rank=1)
        record.sites[:] = [order[site] for site in record.sites]
        writer.put(record)
    writer.close("complete")
    run = Run(folder)
    assert run.ranks == [0, 1]
    assert len(run.sites) == 6
    for rank in (0, 1):
        exact = reference.summarise(make_tensor(2, "fc2", "output", rank=rank))[13]
        assert close(run.series("fc2", "output", "l2", rank=rank).values[2], exact)
        weight = np.concatenate(
            [make_tensor(1, f"fc2.{leaf}", "grad", rank=rank).ravel() for leaf in ("weight", "bias")]
        )
        assert close(run.series("fc2", "grad", "l2", rank=rank).values[1], np.linalg.norm(weight))
    table = run.stats("fc1", "output")
    assert list(zip(table["step"], table["rank"], strict=True)) == [(s, r) for s in range(3) for r in (0, 1)]
    assert len(run.stats(rank=1)) == 3 * len(ROWS)
    assert {rank: info.rank for rank, info in run.infos.items()} == {0: 0, 1: 1}
    assert "rank 1 ended by os._exit(9)" in [getattr(block, "text", "") for block in make_page(run).blocks]
    assert run.batches(rank=1)["rank"].tolist() == [1, 1, 1]
    assert len(run.batches()) == 6


def test_scalars_by_name(run):
    assert sorted(run.scalars()) == ["loss", "lr", "lr[1]"]
    assert sorted(run.scalars("lr")) == ["lr", "lr[1]"]
    assert run.scalar("lr[1]").values.tolist() == [0.01] * 30
    assert close(run.scalar("loss").values, 1 / np.arange(1, 31))
    assert run.scalars("nothing") == {}


def test_histograms_of_a_growing_run(tmp_path):
    writer = Writer(tmp_path / "run", RunInfo("run"), flush_seconds=60)
    writer.add_sites(make_sites())
    for step in range(8):
        writer.put(make_record(step, extras=step >= 4))
        writer.flush()
    run = Run(tmp_path / "run")
    steps, counts = run.histograms("fc2", "output")
    assert steps.tolist() == [4, 5, 6, 7]
    assert np.array_equal(counts[0], make_record(4, extras=True).hists[1])
    assert run.series("fc2", "output", "median").steps.tolist() == [4, 5, 6, 7]
    assert len(run.series("fc2", "output", "l2")) == 8
    writer.close("complete")


def test_a_run_shows_what_there_was_until_it_is_refreshed(tmp_path):
    writer = Writer(tmp_path / "run", RunInfo("run"), flush_seconds=60)
    run = Run(tmp_path / "run")
    assert (run.last_step, run.sites, len(run.steps), run.first_nonfinite()) == (-1, [], 0, None)
    assert run.scalars() == {}
    writer.add_sites(make_sites())
    writer.put(make_record(0))
    writer.flush()
    assert run.last_step == -1
    run.refresh()
    assert run.last_step == 0
    assert len(run.stats()) == len(ROWS)
    writer.close("complete")
    run.refresh()
    assert run.state == "complete"
    assert len(run.stats()) == len(ROWS)


def test_following_a_run_gives_every_step_once(tmp_path):
    writer = Writer(tmp_path / "run", RunInfo("run"), flush_seconds=0.005, part_rows=5 * len(ROWS))
    writer.add_sites(make_sites())

    def write():
        for step in range(40):
            writer.put(make_record(step))
            time.sleep(0.002)
        writer.close("complete")

    thread = threading.Thread(target=write)
    thread.start()
    pieces = list(Run(tmp_path / "run").follow(poll_seconds=0.01))
    thread.join()
    steps = np.concatenate([piece["step"] for piece in pieces])
    assert steps.tolist() == np.repeat(np.arange(40), len(ROWS)).tolist()


def test_reading_needs_no_framework(tmp_path):
    folder = make_run(tmp_path / "run", steps=2)
    script = (
        "import sys, clew; run = clew.open_run(sys.argv[1]); run.series('fc1', 'grad', 'l2'); run.latest();"
        "run.scalars(); assert not {'torch', 'jax', 'rich', 'pandas'} & set(sys.modules), sys.modules.keys()"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, env=environment)


def test_a_table_gives_rows_and_pieces_by_number(run):
    table = run.stats(kind="grad")
    rows = list(table)
    assert table[0] == rows[0]
    assert table[np.int64(1)] == table.row(1) == rows[1]
    assert table[-1] == rows[-1]
    assert list(table[1:3]) == rows[1:3]
    assert list(table[::-1]) == rows[::-1]
    with pytest.raises(IndexError, match=f"the table has {len(rows)} rows, and no row {len(rows)}"):
        table[len(rows)]
    with pytest.raises(UsageError, match="the table has no column 'None'"):
        table[None]
