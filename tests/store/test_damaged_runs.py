"""Runs that were cut, garbled, half deleted or made by another version: named in words, and the rest readable."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import clew
from clew.errors import RunNotFound, RunTooNew
from clew.model.record import RunInfo
from clew.model.schema import FORMAT_VERSION
from clew.query import Run
from clew.render.terminal import Screen, lower
from clew.store import layout, manifest
from clew.store.summary import Summary, read_summary
from clew.store.writer import Writer
from clew.testing.runs import ROWS, make_record, make_run, make_sites
from clew.views.run_page import make_page


@pytest.fixture(scope="module")
def parts_run(tmp_path_factory):
    """A complete run of 12 steps in several parts."""
    folder = tmp_path_factory.mktemp("damaged") / "run"
    writer = Writer(folder, RunInfo("run"), part_rows=4 * len(ROWS))
    writer.add_sites(make_sites())
    for step in range(12):
        writer.put(make_record(step, extras=True))
        writer.flush()
    writer.close("complete")
    return folder


@pytest.fixture(scope="module")
def tail_run(tmp_path_factory):
    """The copy of a run of 6 steps, each flushed, that was never closed."""
    folder = tmp_path_factory.mktemp("damaged") / "run"
    writer = Writer(folder, RunInfo("run"), flush_seconds=60)
    writer.add_sites(make_sites())
    for step in range(6):
        writer.put(make_record(step))
        writer.flush()
    shutil.copytree(folder, folder.with_name("copy"))
    writer.close("complete")
    return folder.with_name("copy")


@pytest.fixture
def copy(tmp_path):
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))


def exact(steps):
    return np.concatenate([make_record(step).values[:, 13] for step in steps]).astype(np.float32)


def test_a_tail_cut_at_any_byte_shows_the_whole_batches_before_the_cut(tail_run, copy):
    folder = copy(tail_run)
    tail = folder / "rank0/stats/tail-000000.arrows"
    content = tail.read_bytes()
    seen = []
    for cut in [*range(0, len(content), 37), len(content) - 1, len(content)]:
        tail.write_bytes(content[:cut])
        run = Run(folder)
        table = run.stats(columns=["l2"])
        seen.append(len(table) // len(ROWS))
        assert np.array_equal(table["l2"], exact(range(seen[-1]))) if seen[-1] else len(table) == 0
        assert not [problem for problem in run.problems if "stats" in problem]
    assert seen == sorted(seen)
    assert set(seen) == set(range(7))


def test_garbage_in_a_tail_never_gives_wrong_numbers(tail_run, copy):
    folder = copy(tail_run)
    tail = folder / "rank0/stats/tail-000000.arrows"
    content = tail.read_bytes()
    dice = np.random.default_rng(5)
    named = 0
    for _ in range(150):
        garbled = bytearray(content)
        at = int(dice.integers(0, len(content)))
        garbled[at : at + 8] = dice.bytes(8)
        tail.write_bytes(garbled)
        run = Run(folder)
        table = run.stats(columns=["l2"])
        steps = np.unique(table["step"]).tolist()
        assert np.array_equal(table["l2"], exact(steps)) if steps else len(table) == 0
        named += any("tail-000000.arrows is damaged" in problem for problem in run.problems)
    assert named > 75


def test_a_part_cut_anywhere_is_named_and_the_other_parts_are_read(parts_run, copy):
    folder = copy(parts_run)
    part = folder / "rank0/stats/part-000001.parquet"
    content = part.read_bytes()
    for cut in [0, 1, 7, *range(50, len(content), len(content) // 12), len(content) - 1]:
        part.write_bytes(content[:cut])
        run = Run(folder)
        assert np.array_equal(run.stats(columns=["l2"])["l2"], exact([0, 1, 2, 3, 8, 9, 10, 11]))
        assert len(run.problems) == 1
        assert run.problems[0].startswith("rank0/stats/part-000001.parquet is damaged and left out: ")


def test_garbage_in_a_part_is_named_or_harmless(parts_run, copy):
    folder = copy(parts_run)
    part = folder / "rank0/stats/part-000001.parquet"
    content = part.read_bytes()
    dice = np.random.default_rng(6)
    named = 0
    for _ in range(120):
        garbled = bytearray(content)
        at = int(dice.integers(0, len(content)))
        garbled[at : at + 6] = dice.bytes(6)
        part.write_bytes(garbled)
        run = Run(folder)
        table = run.stats(columns=["l2", "mean", "hash"])
        steps = [step for step in range(12) if step in set(table["step"].tolist())]
        damaged = any("part-000001" in problem for problem in run.problems)
        named += damaged
        assert steps == ([0, 1, 2, 3, 8, 9, 10, 11] if damaged else list(range(12)))
        assert np.array_equal(table["l2"], exact(steps))
    assert named > 40


def test_a_part_whose_columns_were_renamed_is_named(parts_run, copy):
    folder = copy(parts_run)
    part = folder / "rank0/stats/part-000001.parquet"
    body, footer = part.read_bytes()[:-20_000], part.read_bytes()[-20_000:]
    part.write_bytes(body + footer.replace(b"site", b"sitx").replace(b"l2", b"l3"))
    run = Run(folder)
    assert np.array_equal(run.stats(columns=["l2"])["l2"], exact([0, 1, 2, 3, 8, 9, 10, 11]))
    assert run.problems[0].startswith("rank0/stats/part-000001.parquet is damaged and left out: ")


def test_a_table_that_is_gone_is_an_empty_one(parts_run, copy):
    folder = copy(parts_run)
    shutil.rmtree(folder / "rank0/stats")
    run = Run(folder)
    assert len(run.stats()) == 0
    assert len(run.scalar("loss")) == 12


@pytest.mark.parametrize("text", [None, "", "{", '{"sites": 7}', '{"sites": [{"id": "x"}]}', "[]"])
def test_without_its_sites_a_run_calls_them_by_number(parts_run, copy, text):
    folder = copy(parts_run)
    path = folder / "rank0/sites.json"
    path.unlink() if text is None else path.write_text(text)
    run = Run(folder)
    assert [site.name for site in run.sites] == [f"site{number}" for number in range(6)]
    assert np.array_equal(run.series("site0", "output", "l2").values, exact(range(12))[:: len(ROWS)])
    (problem,) = run.problems
    assert problem.startswith(f"rank0/sites.json is {'missing' if text is None else 'damaged'}")
    assert problem.endswith("sites are called by number")


@pytest.mark.parametrize("text", [None, "", '{"format": ', "[1]", '{"format": "1"}'])
def test_without_its_manifest_a_run_is_readable(parts_run, copy, text):
    folder = copy(parts_run)
    path = folder / "run.json"
    path.unlink() if text is None else path.write_text(text)
    run = Run(folder)
    assert run.state == "unknown"
    assert run.info.name == "copy"
    assert len(run.steps) == 12
    assert "run.json is" in run.problems[0]
    assert "what ran and how it ended is not known" in run.problems[0]
    page = lower(make_page(run), Screen(width=300))
    assert "unknown" in page
    assert not any(word in page for word in ("died", "killed", "ended without a word"))


def test_a_rank_whose_folder_is_gone_is_named(parts_run, copy):
    folder = copy(parts_run)
    shutil.rmtree(folder / "rank0")
    run = Run(folder)
    assert run.problems == ["rank0/ is missing: all that rank 0 recorded was in it"]
    assert len(run.steps) == 0
    page = lower(make_page(run), Screen(width=300))
    assert "rank0/ is missing" in page
    assert "no model was called" not in page
    (listed,) = clew.list_runs(folder.parent)
    assert listed.problem == run.problems[0]


def test_a_run_of_a_newer_format_is_refused_with_the_way_out(parts_run, copy):
    folder = copy(parts_run)
    content = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**content, "format": FORMAT_VERSION + 1}))
    with pytest.raises(RunTooNew) as caught:
        Run(folder)
    assert str(caught.value).splitlines() == [
        f"the run has format {FORMAT_VERSION + 1}, this clew reads up to format {FORMAT_VERSION}",
        f"  where: {folder}/run.json",
        "  next:  install a newer clew: pip install --upgrade clew",
    ]


def test_fields_that_a_later_clew_added_are_ignored(parts_run, copy):
    folder = copy(parts_run)
    content = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**content, "colour": "red", "process": {"mood": 1}}))
    run = Run(folder)
    assert run.state == "complete"
    assert run.problems == []


def test_a_torn_last_line_of_faults_is_dropped(parts_run, copy):
    folder = copy(parts_run)
    good = json.dumps({"step": 1, "where": "x", "error": "e", "traceback": ""})
    (folder / "rank0/faults.jsonl").write_text(f'{good}\n{good}\n{{"step": 2, "wh')
    assert [fault.step for fault in Run(folder).faults()] == [1, 1]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nothing", "there is no such run"),
        ("file", "this is a file, not the folder of a run"),
        ("empty", "there is no run in this folder"),
    ],
)
def test_what_is_no_run_is_said_to_be_none(tmp_path, name, what):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunNotFound) as caught:
        Run(tmp_path / name)
    assert caught.value.what == what
    assert caught.value.where == str(tmp_path / name)
    assert "clew ls" in caught.value.next_step


def state_of(folder, **process):
    """Return the state of a run still marked as recording, written by the given process."""
    found = manifest.read_manifest(folder, 0)
    found.info.state = "recording"
    for name, value in process.items():
        setattr(found.process, name, value)
    return manifest.resolve_state(folder, found)


def test_only_a_lock_that_is_held_means_recording(tmp_path):
    writer = Writer(tmp_path / "run", RunInfo("run"))
    assert Run(tmp_path / "run").state == "recording"
    copy = Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))
    assert Run(copy).state == "died", "a copy has no writer"
    assert state_of(copy, host="elsewhere", boot="other") == "died"
    assert state_of(tmp_path / "run", host="elsewhere", boot="other") == "recording"
    writer.close("complete")
    assert Run(tmp_path / "run").state == "complete"


def test_another_machine_cannot_see_the_lock_of_a_shared_folder(tmp_path):
    writer = Writer(tmp_path / "run", RunInfo("run"))
    lock = (layout.rank_folder(tmp_path / "run", 0) / layout.LOCK).stat().st_ino
    writer.close("complete")
    folder = tmp_path / "run"
    path = layout.rank_folder(folder, 0) / layout.LOCK
    path.write_text("")
    assert state_of(folder, host="elsewhere", boot="other", lock=str(path.stat().st_ino)) == "recording"
    assert state_of(folder, host="elsewhere", boot="other", lock=str(lock + path.stat().st_ino)) == "died"
    assert state_of(folder, lock=str(path.stat().st_ino)) == "died", "this machine sees that nobody holds it"


def test_a_made_up_state_is_unknown(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    text = (folder / "run.json").read_text().replace('"complete"', '"resting"')
    (folder / "run.json").write_text(text)
    assert Run(folder).state == "unknown"


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("run.json", ["started"], None),
        ("run.json", ["command"], [1, 2]),
        ("run.json", ["process"], "x"),
        ("run.json", ["notes"], {"a": 1}),
        ("rank0/sites.json", ["sites", 0], "x"),
        ("rank0/sites.json", ["sites", 0, "name"], 7),
        ("rank0/sites.json", ["sites", 0, "shape"], ["x"]),
        ("rank0/sites.json", ["sites"], 3),
        ("rank0/summary.json", ["loss"], ["x"]),
        ("rank0/summary.json", ["steps"], None),
    ],
)
def test_a_value_of_the_wrong_type_is_found_on_reading(file, path, value, parts_run, copy):
    folder = copy(parts_run)
    content = whole = json.loads((folder / file).read_text())
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = value
    (folder / file).write_text(json.dumps(whole))
    run = Run(folder)
    table = run.stats(columns=["l2"])
    assert np.array_equal(table["l2"], exact(range(12)))
    assert all(isinstance(name, str) for name in table["site"])
    if file == "rank0/summary.json":
        assert read_summary(folder, 0) == Summary()
    else:
        (problem,) = run.problems
        assert problem.startswith(f"{file} is damaged (")


def test_a_later_version_may_add_fields(parts_run, copy):
    folder = copy(parts_run)
    sites = folder / "rank0/sites.json"
    content = json.loads(sites.read_text())
    content["sites"][0]["colour"] = "red"
    sites.write_text(json.dumps(content))
    assert Run(folder).problems == []
