"""Every loop runs plain and under clew: whatever it prints, computes and leaves is the same bit for bit."""

from __future__ import annotations

import re
import socket
import sys
from collections import Counter

import pytest
from loop import Loop, read_loops

import clew
from zygote import Ending, Job, run_apart

LOOPS = read_loops()
DIGESTS = 9
EVERYTHING = ("--budget", "off", "--kinds", "all", "--snapshots", "every:2")


TORN_DOWN = "terminate called without an active exception"
"""What torch says, now and then and without clew, when threads of its process groups are still there at the exit."""


def pytest_generate_tests(metafunc):
    if "loop" in metafunc.fixturenames:
        wanted = [
            loop for loop in LOOPS if "watch" in loop.promises or "watch" not in metafunc.function.__name__
        ]
        metafunc.parametrize("loop", wanted, ids=[loop.name for loop in wanted])


def test_run(loop: Loop, zygote, tmp_path):
    skip_where_missing(loop)
    under_clew = ["-m", "clew", "run", *EVERYTHING, "--out", str(tmp_path / "runs"), str(loop.path)]
    jobs = [job(tmp_path / "plain", [str(loop.path)], loop), job(tmp_path / "clew", under_clew, loop)]
    plain, under_clew = run_apart(*jobs) if "process" in loop.promises else zygote.run(*jobs)
    if TORN_DOWN in plain.stderr:
        plain = run_apart(job(tmp_path / "again", [str(loop.path)], loop))[0]
    assert_is_a_training(plain)
    assert_same(plain, under_clew, speaks=loop.promises.get("stderr") == "clew")
    if "gap" in loop.promises:
        with pytest.raises(AssertionError):  # delete the line of the header when this fails
            assert_recorded(loop, tmp_path / "runs", plain.stdout)
    else:
        assert_recorded(loop, tmp_path / "runs", plain.stdout)


def job(folder, argv: list[str], loop: Loop) -> Job:
    folder.mkdir()
    return Job(folder, launch(argv) if loop.promises.get("launch") == "torchrun" else argv, {})


def launch(argv: list[str]) -> list[str]:
    """Return the arguments of python that make torchrun start two processes of ``python *argv``."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    own = ["--nproc-per-node=2", "--master-addr=localhost", f"--master-port={port}", "--no-python"]
    return ["-m", "torch.distributed.run", *own, sys.executable, *argv]


def test_watch(loop: Loop, zygote, tmp_path):
    """Plain, watched and plain again in one process: all alike, and nothing is left of the watch."""
    skip_where_missing(loop)
    script = str(loop.path.parent.parent / "thrice.py")
    (ending,) = zygote.run(job(tmp_path / "all", [script, str(loop.path), str(tmp_path / "runs")], loop))
    assert ending.code == 0, ending.stderr
    first, watched, last = ending.stdout.split("=== end of training ===\n")[:3]
    assert watched == first
    assert last == first
    assert_recorded(loop, tmp_path / "runs", watched)


def skip_where_missing(loop: Loop) -> None:
    if loop.missing:
        pytest.skip(f"{loop.name} needs {', '.join(loop.missing)}")


def assert_is_a_training(plain: Ending) -> None:
    assert plain.code == 0, plain.stderr
    assert len(re.findall(r"^digest ", plain.stdout, re.MULTILINE)) >= DIGESTS
    assert len(re.findall(r"^loss ", plain.stdout, re.MULTILINE)) >= 3


def assert_same(plain: Ending, under_clew: Ending, *, speaks: bool) -> None:
    """Compare both sides; ``speaks`` where clew has found a fault and explains it on standard error."""
    assert under_clew.code == plain.code, under_clew.stderr
    assert under_clew.stdout == plain.stdout
    assert speaks or under_clew.own_stderr == plain.stderr
    left = sorted(path.name for path in under_clew.folder.iterdir())
    assert left == sorted(path.name for path in plain.folder.iterdir())


def assert_recorded(loop: Loop, runs, printed: str) -> None:
    """The record holds what the header of the loop promises; a record of nothing would prove nothing."""
    (folder,) = runs.iterdir()
    run = clew.open_run(folder)
    assert (run.state, run.faults(), run.problems) == ("complete", [], [])
    partial = run.scalars("clew.partial").get("clew.partial", ())  # what came after the last step
    assert_steps(loop.promises["steps"], len(run.steps) - len(partial))
    assert run.ranks == list(range(int(loop.promises.get("ranks", "1"))))
    table = run.stats()
    assert (table["count"] > 0).all(), [row for row in table if row["count"] <= 0]
    assert_no_row_twice(table)
    seen = set(zip(table["site"].tolist(), table["kind"].tolist(), strict=True))
    names = {site for site, _ in seen}
    for wanted in loop.words("sites"):
        assert any(has_name(site, wanted) for site in names), f"no record at {wanted}: {sorted(names)}"
    missing = set(loop.words("kinds")) - {kind for _, kind in seen}
    assert not missing, f"no record of {missing}: {sorted(seen)}"
    scalars = run.scalars()
    assert not set(loop.words("scalars")) - set(scalars), sorted(scalars)
    assert_losses(loop, run, printed)


def assert_no_row_twice(table) -> None:
    """Rank, step, site, kind, mode and ordinal are the key of every table: no two rows share it."""
    keys = ("rank", "step", "site", "kind", "mode", "ordinal")
    counts = Counter(zip(*(table[name].tolist() for name in keys), strict=True))
    twice = [key for key, count in counts.items() if count > 1]
    assert not twice, twice[:8]


def assert_steps(promised: str, steps: int) -> None:
    if promised.startswith(">="):
        assert steps >= int(promised.removeprefix(">="))
    else:
        assert steps == int(promised)


def assert_losses(loop: Loop, run, printed: str) -> None:
    """What was recorded as the loss is, to the last bit, something the script printed."""
    if "loss" in loop.words("scalars") and loop.promises.get("losses") != "not printed":
        known = {float.fromhex(text) for text in re.findall(r"^loss (\S+)$", printed, re.MULTILINE)}
        recorded = set(run.scalars("loss")["loss"].values.tolist())
        assert recorded
        assert recorded <= known


def has_name(site: str, wanted: str) -> bool:
    site = re.sub(r"\[.*$", "", site)  # one leaf of an output
    return site == wanted or site.endswith("." + wanted)
