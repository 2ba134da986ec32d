"""``python -m benchmarks.doctor_cost``: what the doctor costs, in the first steps and over a run of 500.

Four kinds of steps take turns in one process: plain; recorded without anything that looks for the doctor; recorded with
its probes, which is what ``doctor=False`` leaves (the run can be judged later); and with its rules live. The first 20
steps are those of many short watches, their opening and closing not counted; of each of the twenty the lower quartile
over the watches counts, so that what a busy machine adds now and then does not. The 500 are those of a whole run with
the default settings, with and without the doctor, against as many plain steps around them.

Every training that is measured replaces its row in the result file; one measured without the 500 steps has none there.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime
import itertools
import json
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch

import clew
from benchmarks.trainings import MAKERS, Training, make

if TYPE_CHECKING:
    from collections.abc import Iterator

_RESULT: Final = Path(__file__).parent / "results" / "doctor_cost.json"
_FIRST: Final = 20
_WHOLE: Final = 500
_RUNS: Final = {"mlp": 7, "loader": 7, "cnn": 1, "gpt": 1}
_ROUNDS: Final = {"mlp": 40, "loader": 40, "cnn": 5, "gpt": 5}
_LIMITS: Final = {"first": 1.10, "whole": 1.03}
_SESSION: Final = "clew.capture.torch.session"


class _Idle:
    """Stands where a probe would be."""

    def __init__(self, *_: Any) -> None:
        pass

    def install(self, patches: Any) -> None:
        """Look at nothing."""


@contextlib.contextmanager
def _without_probes() -> Iterator[None]:
    with (
        patch(f"{_SESSION}.make_loop_probes", lambda *_: ()),
        patch(f"{_SESSION}.StatsProbe", _Idle),
        patch(f"{_SESSION}.ObjectiveProbe", _Idle),
    ):
        yield


def main() -> int:
    """Measure, print the table and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doctor_cost", description=__doc__)
    parser.add_argument("--trainings", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--rounds", type=int, help="turns of the first 20 steps")
    parser.add_argument("--no-whole", action="store_true", help="leave out the 500 steps")
    parser.add_argument(
        "--probes", type=int, metavar="N", help="the N dearest functions of the first steps instead"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.probes:
        for name in args.trainings:
            _profile(name, args.probes)
        return 0
    print(
        f"clew {clew.__version__}: processor time of a step over that of the plain one, in turns\n\n"
        f"{'training':9}{'plain ms':>9}   {f'first {_FIRST}':8}{'recorded':>9}{'probes':>8}{'rules':>8}"
        f"{'doctor':>8}   over {_WHOLE}: recorded  rules  doctor"
    )
    rows = [_measure(name, args) for name in args.trainings]
    _write(rows)
    return 0


def _measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    rounds = args.rounds or _ROUNDS[name]
    plain, ratios = _measure_first(name, rounds)
    doctor = 1 + ratios["rules"] - ratios["recorded"]
    print(
        f"{name:9}{plain * 1000:9.2f}   {'':8}{ratios['recorded']:9.3f}{ratios['probes']:8.3f}{ratios['rules']:8.3f}"
        f"{doctor:8.3f}",
        end="",
        flush=True,
    )
    whole = None if args.no_whole else _measure_whole(name)
    if whole is not None:
        whole["doctor"] = 1 + whole["rules"] - whole["recorded"]
        print(f"{whole['recorded']:20.3f}{whole['rules']:7.3f}{whole['doctor']:8.3f}", end="")
    print(flush=True)
    return {
        "training": name,
        "when": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "clew": clew.__version__,
        "torch": torch.__version__,
        "rounds": rounds,
        "plain_ms": plain * 1000,
        "first": ratios,
        "doctor": doctor,
        "whole": whole,
    }


# ---------------------------------------------------------------- the first steps


def _measure_first(name: str, rounds: int) -> tuple[float, dict[str, float]]:
    """Return the plain seconds of a step, and the ratio of each other kind to it: lower quartiles of each step."""
    training = make(name)
    for _ in range(3):
        training.step()
    kinds = ["plain", "recorded", "probes", "rules"]
    spent: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for turn in range(rounds):
        for kind in kinds[turn % 4 :] + kinds[: turn % 4]:
            spent[kind].append(_time_first(training, kind))
    usual = {kind: sum(map(_find_quartile, zip(*spent[kind], strict=True))) for kind in kinds}
    return usual["plain"] / _FIRST, {kind: usual[kind] / usual["plain"] for kind in kinds[1:]}


def _find_quartile(values: tuple[float, ...]) -> float:
    return sorted(values)[len(values) // 4]


def _time_first(training: Training, kind: str) -> list[float]:
    """Return the seconds of each of the first steps."""
    if kind == "plain":
        return _time_each(training)
    probes = _without_probes() if kind == "recorded" else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, probes:
        watch = _watch(training, folder, doctor=kind == "rules")
        with watch:
            return _time_each(training)


def _watch(training: Training, folder: str, *, doctor: bool = True) -> clew.Watch:
    return clew.watch(
        {"model": training.model}, training.optimizer, out=folder, name="run", status=False, doctor=doctor
    )


def _time_each(training: Training) -> list[float]:
    marks = [time.process_time()]
    for _ in range(_FIRST):
        training.step()
        marks.append(time.process_time())
    return [after - before for before, after in itertools.pairwise(marks)]


def _time_steps(training: Training, steps: int) -> float:
    start = time.process_time()
    for _ in range(steps):
        training.step()
    return time.process_time() - start


# ---------------------------------------------------------------- a whole run


def _measure_whole(name: str) -> dict[str, float]:
    """Return what 500 steps of one watch cost against as many plain ones, half of them before and half after."""
    training = make(name)
    _time_steps(training, 3)
    ratios: dict[str, list[float]] = {"recorded": [], "rules": []}
    for turn in range(2 * _RUNS[name]):
        kind = list(ratios)[turn % 2]
        plain = _time_steps(training, _WHOLE // 2)
        probes = _without_probes() if kind == "recorded" else contextlib.nullcontext()
        with (
            tempfile.TemporaryDirectory() as folder,
            probes,
            _watch(training, folder, doctor=kind == "rules"),
        ):
            watched = _time_steps(training, _WHOLE)
        plain += _time_steps(training, _WHOLE - _WHOLE // 2)
        ratios[kind].append(watched / plain)
    return {kind: statistics.median(found) for kind, found in ratios.items()}


# ---------------------------------------------------------------- where it goes


def _profile(name: str, most: int) -> None:
    """Print the dearest functions of the probes in the first steps of a few watches, in microseconds a step."""
    training = make(name)
    _time_steps(training, 3)
    profile = cProfile.Profile()
    watches = 8 if name in ("mlp", "loader") else 2
    for _ in range(watches):
        with tempfile.TemporaryDirectory() as folder, _watch(training, folder):
            profile.enable()
            _time_steps(training, _FIRST)
            profile.disable()
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    rows = [
        (total, calls, f"{Path(file).stem}.{function}")
        for (file, _, function), (_, calls, _, total, _) in stats.items()
        if "/probe_" in file
    ]
    print(f"{name}: µs a step, calls a step, function (with what it calls)")
    for total, calls, function in sorted(rows, reverse=True)[:most]:
        steps = watches * _FIRST
        print(f"{total / steps * 1e6:9.1f}{calls / steps:8.2f}  {function}")


def _write(rows: list[dict[str, Any]]) -> None:
    stored = json.loads(_RESULT.read_text(encoding="utf-8"))["rows"] if _RESULT.is_file() else []
    by_name = {row["training"]: row for row in [*stored, *rows]}
    result = {"limits": _LIMITS, "rows": [by_name[name] for name in MAKERS if name in by_name]}
    _RESULT.parent.mkdir(exist_ok=True)
    _RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
