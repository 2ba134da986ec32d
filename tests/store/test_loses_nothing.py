"""A run survives what machines do to it: kill -9, full disks, quotas, forks, readers, forbidden folders."""

import ctypes
import errno
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clew.errors import StoreFull, UsageError
from clew.model.record import RunInfo
from clew.query import Run
from clew.store import writer as writing
from clew.store.layout import claim_folder, folder_bytes
from clew.store.summary import read_summary
from clew.store.writer import Writer
from clew.testing.runs import ROWS, make_record, make_run, make_sites

HERE = Path(__file__).parent
RECORD = make_record(0)


def run_python(*arguments):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_prefix(run, at_least=0, period=1 << 30):
    """Assert that the run holds whole steps from 0 on, each with its right numbers; returns how many."""
    table = run.stats(columns=["l2", "mean"])
    steps = len(table) // len(ROWS)
    assert steps >= at_least
    assert table["step"].tolist() == np.repeat(np.arange(steps), len(ROWS)).tolist()
    for step in {0, steps // 2, steps - 1} if steps else ():
        exact = make_record(step % period).values.astype(np.float32)
        here = slice(step * len(ROWS), (step + 1) * len(ROWS))
        assert np.array_equal(table["mean"][here], exact[:, 9])
        assert np.array_equal(table["l2"][here], exact[:, 13])
    return steps


def test_kill_at_fifty_random_moments_loses_no_flushed_step(tmp_path):
    flushed = json.loads(run_python(HERE / "killed_writers.py", tmp_path, 50))
    found = []
    for number, last in enumerate(flushed):
        run = Run(tmp_path / f"run{number}")
        assert run.state == "died"
        assert run.problems == []
        found.append(check_prefix(run, at_least=last + 1))
        assert len(run.scalar("loss")) >= last + 1 if last >= 0 else True
    assert max(found) > 60, "the writers were killed too early to prove anything"
    assert len(set(found)) > 10


def noisy(step):
    """Return a record that does not compress, made faster than the exact one."""
    return replace(RECORD, step=step, values=RECORD.values * np.random.default_rng(step).random(14))


def fill(folder, **settings):
    """Write until the writer says that it will not go on, and then some more; returns what it said."""
    said = []
    writer = Writer(folder, RunInfo("run"), notice=said.append, **settings)
    writer.add_sites(make_sites())
    for step in range(5000):
        writer.put(noisy(step))
        if step % 20 == 0:
            writer.flush()
        if said:
            break
    for later in range(step + 1, step + 10):
        writer.put(noisy(later))
    writer.close("complete")
    return said


@pytest.fixture
def small_disk(tmp_path, request):
    """A file system of some kilobytes; needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    size = b"size=%dk" % request.param
    if sys.platform != "linux" or libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, size) != 0:
        pytest.skip("no right to mount a small file system")
    yield folder
    libc.umount2(bytes(folder), 2)


@pytest.mark.parametrize("small_disk", [32], indirect=True)
def test_a_disk_that_is_full_from_the_start_is_refused_in_words(small_disk):
    with pytest.raises(StoreFull) as caught:
        Writer(small_disk / "run", RunInfo("run"))
    assert caught.value.what == "the run cannot be recorded: No space left on device"
    assert caught.value.where == str(small_disk / "run")
    assert caught.value.next_step == "make room on that disk, or choose another one with --out"


@pytest.mark.parametrize("small_disk", [600], indirect=True)
def test_a_full_disk_stops_recording_with_one_notice(small_disk):
    said = fill(small_disk / "run")
    assert len(said) == 1
    assert said[0].startswith("the disk is full: nothing more is recorded")
    run = Run(small_disk / "run")
    assert run.state == "complete"
    assert len(run.steps) > 100
    assert run.steps.tolist() == list(range(len(run.steps)))
    (problem,) = run.problems
    assert problem.startswith(
        f"recording stopped early: the disk is full: nothing more is recorded after step {run.last_step:,}"
    )
    assert problem.endswith("make room there, or record elsewhere with --out")
    assert run.faults() == []
    assert read_summary(small_disk / "run", 0).steps == len(run.steps)
    assert run.scalars()["loss"].steps.tolist() == run.steps.tolist()
    assert sorted({*run.stats(columns=["l2"])["step"].tolist()}) == run.steps.tolist()


def test_a_file_that_may_not_grow_stops_recording_and_stays_readable(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import resource, sys
            sys.path.insert(0, sys.argv[2])
            from test_loses_nothing import fill
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
            print(len(fill(sys.argv[1])))
            """
        )
    )
    assert run_python(script, tmp_path / "run", HERE).strip() == "1"
    run = Run(tmp_path / "run")
    assert run.state == "complete"
    assert run.steps.tolist() == list(range(len(run.steps)))
    assert len(run.steps) > 100
    assert any("disk is full" in problem for problem in run.problems)


def test_the_thread_that_writes_does_not_wait_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "PENDING_BYTES", 1000)
    writer, waiting, is_over = (
        Writer(tmp_path / "run", RunInfo(name="run")),
        list(range(50)),
        threading.Event(),
    )

    def hand_over():
        while waiting:
            writer.put(make_record(waiting.pop(0)))
        is_over.set()

    writer.add_sites(make_sites())
    writer.before_flush = hand_over
    try:
        assert is_over.wait(30), "nobody writes"
    finally:
        writer.close("complete", 0)
    assert Run(tmp_path / "run").steps.tolist() == list(range(50))


def test_a_quota_holds_and_the_loss_curve_goes_on_a_little(tmp_path):
    quota = 1_000_000
    said = fill(tmp_path / "run", quota_bytes=quota)
    assert len(said) == 1
    assert said[0].startswith("the quota of 1,000,000 bytes is nearly used up: only scalars")
    assert folder_bytes(tmp_path / "run") <= quota
    run = Run(tmp_path / "run")
    assert run.state == "complete"
    last = int(run.stats(columns=["l2"])["step"][-1])
    assert last > 100
    assert run.last_step > last
    assert f"only scalars are recorded from now on, after step {last:,}" in run.problems[0]
    assert run.faults() == []


def test_a_quota_holds_where_much_is_written_at_once(tmp_path):
    """A fast training leaves more than a small quota between two flushes."""
    said, quota = [], 400_000
    writer = Writer(
        tmp_path / "run", RunInfo("run"), quota_bytes=quota, flush_seconds=600, notice=said.append
    )
    writer.add_sites(make_sites())
    for step in range(2000):
        writer.put(noisy(step))
    writer.close("complete")
    assert said
    assert said[0].startswith("the quota of 400,000 bytes is nearly used up")
    assert folder_bytes(tmp_path / "run") <= quota
    assert len(set(Run(tmp_path / "run").stats(columns=["l2"])["step"].tolist())) > 20


def test_a_quota_counts_what_others_keep_in_the_folder(tmp_path):
    said = []
    writer = Writer(tmp_path / "run", RunInfo("run"), quota_bytes=1_000_000, notice=said.append)
    (tmp_path / "run/rank0/snapshots").mkdir()
    (tmp_path / "run/rank0/snapshots/big").write_bytes(bytes(2_000_000))
    writer.put(noisy(0))
    writer.flush()
    writer.close("complete")
    assert said[0].startswith("the quota of 1,000,000 bytes is used up")
    assert Run(tmp_path / "run").steps.tolist() == [0]


def test_a_folder_without_the_right_to_write_is_refused_in_words(tmp_path):
    script = textwrap.dedent(
        """
        import os, sys
        from clew.errors import StoreFull
        from clew.model.record import RunInfo
        from clew.store.writer import Writer
        from clew.store.layout import claim_folder
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        for attempt in (lambda: Writer(sys.argv[1] + "/run", RunInfo("run")), lambda: claim_folder(sys.argv[1], "x")):
            try:
                attempt()
            except StoreFull as error:
                print(error)
        """
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        said = run_python("-c", script, folder)
    assert said.count("the run cannot be recorded: Permission denied") == 2
    assert f"where: {folder}/run" in said
    assert "next:  choose a folder you may write to with --out" in said


def test_a_place_that_is_a_file_is_refused_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFull, match="Not a directory"):
        Writer(tmp_path / "file/run", RunInfo("run"))
    with pytest.raises(UsageError, match="the place for runs is a file"):
        claim_folder(tmp_path / "file", "run")


def test_a_folder_that_could_not_be_begun_is_no_run(tmp_path, monkeypatch):
    def fail(_path, _data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(StoreFull, match="No space left"):
        Writer(tmp_path / "run", RunInfo("run"))
    assert not (tmp_path / "run" / "rank0").exists()


def test_two_writers_never_share_a_folder(tmp_path):
    first = Writer(tmp_path / "run", RunInfo("run"))
    with pytest.raises(UsageError, match="another run is being recorded in this folder") as caught:
        Writer(tmp_path / "run", RunInfo("run"))
    assert "another --name or --out" in caught.value.next_step
    other_rank = Writer(tmp_path / "run", RunInfo("run", rank=1, world_size=2))
    first.close("complete")
    other_rank.close("complete")
    with pytest.raises(UsageError, match="another run was recorded in this folder"):
        Writer(tmp_path / "run", RunInfo("run"))
    assert Run(tmp_path / "run").ranks == [0, 1]


GROW = """
import sys
from dataclasses import replace
from clew.model.record import RunInfo
from clew.store.writer import Writer
from clew.testing.runs import make_record, make_sites

writer = Writer(sys.argv[1], RunInfo("run"), flush_seconds=0.01, part_rows=6000)
writer.add_sites(make_sites())
records = [make_record(step) for step in range(64)]
print("ready", flush=True)
for step, _ in enumerate(sys.stdin):
    writer.put(replace(records[step % 64], step=step))
writer.close("complete")
"""


def count_parts(folder):
    return len(list((folder / "rank0/stats").glob("part-*")))


def test_a_reader_that_opens_a_growing_run_a_thousand_times_always_sees_a_prefix(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", GROW, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        writer.stdout.readline()
        seen, sizes = 0, set()
        for opened in range(20_000):  # a busy machine may leave the writer little time
            if opened >= 1000 and len(sizes) > 50 and count_parts(folder) > 3:
                break
            if opened < 1000:
                writer.stdin.write("\n\n\n")
                writer.stdin.flush()
            run = Run(folder)
            assert run.state == "recording"
            steps = run.series("fc1", "output", "l2").steps if run.sites else np.zeros(0, np.int64)
            assert np.array_equal(steps, np.arange(len(steps)))
            assert len(steps) >= seen
            seen = len(steps)
            sizes.add(seen)
            if opened % 50 == 0:
                assert run.problems == []
                check_prefix(run, period=64)
        assert count_parts(folder) > 3, "no part was sealed meanwhile"
    assert len(sizes) > 50, "the run did not grow while it was read"
    assert check_prefix(Run(folder), period=64) == 3000
    assert Run(folder).state == "complete"


FORK = """
import os, sys, time
from clew.model.record import RunInfo
from clew.store.writer import Writer
from clew.testing.runs import make_record, make_sites

writer = Writer(sys.argv[1], RunInfo("run"), flush_seconds=60)
writer.add_sites(make_sites())
writer.put(make_record(0))
child = os.fork()
if child == 0:
    writer.put(make_record(1))
    writer.flush()
    writer.log("from the child")
    writer.close("died")
    sys.exit(0)  # runs the handlers of the interpreter's exit as well
os.waitpid(child, 0)
before = sorted(os.listdir(sys.argv[1] + "/rank0"))
writer.put(make_record(1))
"""


def test_a_forked_child_touches_nothing(tmp_path):
    run_python("-W", "ignore", "-c", FORK + "print(before)\nwriter.close('complete')", tmp_path / "run")
    run = Run(tmp_path / "run")
    assert run.state == "complete"
    assert check_prefix(run) == 2
    assert not (tmp_path / "run/rank0/log.txt").exists()


def test_a_child_that_outlives_a_killed_parent_does_not_keep_the_run_alive(tmp_path):
    script = FORK + textwrap.dedent(
        """
        writer.flush()
        sleeper = os.fork()
        if sleeper == 0:
            os.closerange(0, 3)
            time.sleep(30)
            os._exit(0)
        print(sleeper, flush=True)
        os._exit(0)
        """
    )
    sleeper = int(run_python("-W", "ignore", "-c", script, tmp_path / "run"))
    try:
        os.kill(sleeper, 0)
        assert Run(tmp_path / "run").state == "died"
        assert check_prefix(Run(tmp_path / "run")) == 2
    finally:
        os.kill(sleeper, 9)


def test_a_writer_that_nobody_closed_is_flushed_at_exit(tmp_path):
    script = FORK.partition("child =")[0] + "print('leaving')"
    run_python("-c", script, tmp_path / "run")
    run = Run(tmp_path / "run")
    assert run.state == "died"
    assert check_prefix(run) == 1


def test_a_fault_inside_the_store_stops_recording_and_not_the_training(tmp_path):
    said = []
    writer = Writer(tmp_path / "run", RunInfo("run"), notice=said.append)
    writer.put(make_record(0))
    writer.flush()
    writer.put(replace(make_record(1), values=np.zeros((3, 2))))
    writer.flush()
    writer.put(make_record(2))
    writer.close("complete")
    assert len(said) == 1
    assert said[0].startswith("clew failed to write the record (IndexError: ")
    assert "\n" not in said[0]
    run = Run(tmp_path / "run")
    assert run.last_step == 0
    assert any("clew failed to write" in problem for problem in run.problems)
    assert run.faults()[0].traceback.startswith("Traceback")


def test_many_ranks_write_side_by_side(tmp_path):
    for rank in (1, 0, 3):
        make_run(tmp_path / "run", steps=4, rank=rank)
    run = Run(tmp_path / "run")
    assert run.ranks == [0, 1, 3]
    assert len(run.stats(step=2)) == 3 * len(ROWS)
