"""Comparing: two recorded runs, one script run twice, two models on one batch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clew.errors import ClewError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from clew.compare.diff import Diff
    from clew.query import Run

    RunChoice = Run | str | PathLike[str]


def diff(
    a: RunChoice,
    b: RunChoice,
    *,
    names: Mapping[str, str] | str | PathLike[str] | None = None,
    baseline: Iterable[RunChoice] | None = None,
    root: str | PathLike[str] = "runs",
    rerun: bool = False,
) -> Diff:
    """Compare two runs and return the first place where they part, with the class of its cause.

    ``names``: a map from sites of ``a`` to sites of ``b``, or the TOML file that holds one. ``baseline``: two runs that
    should be equal; what differs by no more than they do counts as equal. ``rerun``: execute the step in which they
    part again, by both scripts, and name the first operation that differs.
    """
    from clew.compare.align_map import expand_map, read_map
    from clew.compare.diff import diff_runs

    first, second = _open(a, root), _open(b, root)
    mapped = None
    if names is not None:
        given, where = (
            (read_map(Path(names)), str(names)) if isinstance(names, (str, PathLike)) else (names, "")
        )
        sides = ([site.name for site in run.sites] for run in (first, second))
        mapped = expand_map(given, *sides, where=where)
    pair = [_open(each, root) for each in baseline] if baseline is not None else None
    found = diff_runs(first, second, names=mapped, baseline=(pair[0], pair[1]) if pair else None)
    if not rerun:
        return found
    from clew.api.rerun import refine

    return refine(found, first, second)


def _open(run: RunChoice, root: Any) -> Run:
    from clew.api.read import open_run
    from clew.query import Run

    return run if isinstance(run, Run) else open_run(run, root=root)


def run_twice(words: list[str], out: Path) -> tuple[Run, Run]:
    """Run a script, or ``-m`` and a module, twice with every step recorded, and return the two runs."""
    return _run_recorded(words, out, "first"), _run_recorded(words, out, "second")


def _run_recorded(words: list[str], out: Path, name: str) -> Run:
    from clew.query import Run

    options = [
        "--budget",
        "off",
        "--no-status",
        "--no-doctor",
        "--no-histograms",
        "--out",
        str(out),
        "--name",
        name,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "clew", "run", *options, *words], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("clew:")][
            -1:
        ]
        raise ClewError(
            f"the script ended with exit code {done.returncode}"
            + "".join(f": {line.strip()}" for line in last),
            where=" ".join(words),
            next_step=f"clew run {' '.join(words)}",
        )
    if not (out / name).exists():
        raise ClewError(
            "the script recorded nothing to compare: it never imported torch", where=" ".join(words)
        )
    return Run(out / name)


def assert_same(
    model_a: Any,
    model_b: Any,
    batch: Any,
    *,
    names: Mapping[str, str] | None = None,
    isolate: bool = False,
) -> None:
    """Raise AssertionError, with the verdict, unless two models do the same to a batch.

    Both are called with the batch (a tuple gives several arguments, a dict keyword arguments) from the same random
    state; their weights, the output of each module and the results are compared. What rounding explains is the same.
    ``isolate``: each module of the second is given what that of the first was given, so that it is judged alone.
    Afterwards buffers and random states are as they were.
    """
    from clew.api.both_models import record_calls
    from clew.compare.diff import diff_runs
    from clew.query import Run

    with tempfile.TemporaryDirectory() as folder:
        paths = record_calls({"a": model_a, "b": model_b}, batch, Path(folder))
        found = diff_runs(*(Run(path) for path in paths), names=dict(names or {}))
    told = _tell_slices(model_a, model_b, batch, found)
    if found.is_same and not told:
        return
    if found.is_same:
        raise AssertionError(told)
    if isolate:
        from clew.api.apart import judge_apart

        tops = {"(model)": ""}
        paired = {tops.get(x, x): tops.get(y, y) for x, y in found.alignment.names.items()}
        apart = judge_apart(model_a, model_b, batch, names=paired)
        raise AssertionError(f"{found.sentence}\neach module alone: {apart.sentence}")
    raise AssertionError("\n".join(each for each in (found.sentence, told) if each))


def _tell_slices(model_a: Any, model_b: Any, batch: Any, found: Diff) -> str:
    """Return which slice of a fused tensor is not the part it stands for; statistics of a whole cannot tell."""
    if not found.alignment.fused:
        return ""
    from clew.api.fused_models import compare_slices

    rows = compare_slices(model_a, model_b, batch, found.alignment.fused)
    wrong = [row for row in rows if row.verdict == "different"]
    if not wrong:
        return ""
    first = wrong[0]
    kind = "weight" if first.kind == "param" else first.kind
    return (
        f"the models differ in {len(wrong)} of {len(rows)} slices of fused tensors, first in the {kind} {first.site} "
        f"and {first.site_b}: relative error {first.error:.2g}"
    )
