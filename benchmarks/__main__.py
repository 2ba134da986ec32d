"""``python -m benchmarks``: what recording costs, against the plain loop, beside what it may cost."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import clew
from benchmarks import interleave, memory
from benchmarks.modes import MODES
from benchmarks.trainings import MAKERS

_RESULTS = Path(__file__).parent / "results"
_SECONDS = 120
_QUICK_SECONDS = 15


def main() -> int:
    """Measure, print the table and write the result file; the exit code is 1 when a limit is passed."""
    args = _parse()
    torch.set_num_threads(args.threads)
    keeps_memory = not args.returning and interleave.keep_memory()
    seconds = args.seconds or (_QUICK_SECONDS if args.quick else _SECONDS)
    print(
        f"clew {clew.__version__}, torch {torch.__version__}, {args.threads} thread(s), {seconds} seconds a line, "
        f"malloc {'keeps' if keeps_memory else 'gives back'} what is freed"
    )
    print(
        "ratio of the recorded to the plain step, in one process, in turns: median [quartiles] of the rounds;\n"
        "cpu in all: all recorded steps to all plain ones, with what clew's threads and rare steps take, and its\n"
        "standard error: this is held against the limit; fastest: the fastest quarter of single steps on each side.\n"
    )
    print(
        f"{'training':9}{'mode':9}{'plain ms':>9}   {'wall':22}{'cpu':22}{'cpu in all':15}{'fastest':>8}{'limit':>7}"
    )
    speed = [
        _measure_speed(name, mode, seconds)
        for name in args.trainings
        for mode in MODES
        if mode.name in args.modes
    ]
    peaks = [] if args.no_memory else _measure_memory(args)
    _write(args, {"seconds": seconds, "keeps_memory": keeps_memory, "speed": speed, "memory": peaks})
    return 0 if all(row["holds"] for row in [*speed, *peaks]) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds: a first look, not a result")
    parser.add_argument("--seconds", type=int, help=f"seconds to measure for each line ({_SECONDS})")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (1)")
    parser.add_argument("--trainings", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    names = [mode.name for mode in MODES]
    parser.add_argument("--modes", nargs="+", choices=names, default=names)
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory")
    parser.add_argument(
        "--returning",
        action="store_true",
        help="let malloc give memory back between steps, as chance will have it",
    )
    parser.add_argument("--write", type=Path, help="result file (results/latest.json unless --quick)")
    return parser.parse_args()


def _measure_speed(name: str, mode: Any, seconds: int) -> dict[str, Any]:
    cost = interleave.measure(name, mode, seconds=seconds)
    limit = mode.limits[name]
    wall, cpu = (
        f"{middle:.3f} [{low:.3f} {high:.3f}]"
        for middle, (low, high) in ((cost.wall, cost.wall_quartiles), (cost.cpu, cost.cpu_quartiles))
    )
    holds = cost.cpu_total <= limit
    print(
        f"{name:9}{mode.name:9}{cost.plain_ms:9.2f}   {wall:22}{cpu:22}"
        f"{f'{cost.cpu_total:.3f} ± {cost.cpu_error:.3f}':15}{cost.undisturbed:8.3f}{limit:7.2f}  {_say(holds)}",
        flush=True,
    )
    return {"training": name, "mode": mode.name, "limit": limit, "holds": holds, **asdict(cost)}


def _measure_memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"\npeak memory in MB\n{'training':9}{'mode':9}{'plain':>9}{'recorded':>10}{'limit':>9}")
    rows = []
    for name in args.trainings:
        plain = memory.run_apart(name, "plain", threads=args.threads)["peak_bytes"]
        for mode in (mode for mode in MODES if mode.name in args.modes):
            peak = memory.measure(name, mode, plain, threads=args.threads)
            holds = peak.recorded_bytes <= peak.limit_bytes
            numbers = [value / 1e6 for value in asdict(peak).values()]
            print(
                "{:9}{:9}{:9.0f}{:10.0f}{:9.0f}  {}".format(name, mode.name, *numbers, _say(holds)),
                flush=True,
            )
            rows.append({"training": name, "mode": mode.name, "holds": holds, **asdict(peak)})
    return rows


def _say(holds: bool) -> str:
    return "ok" if holds else "OVER"


def _write(args: argparse.Namespace, measured: dict[str, Any]) -> None:
    path = args.write or (None if args.quick else _RESULTS / "latest.json")
    if path is None:
        return
    result = {
        "when": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "clew": clew.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "torch_threads": args.threads},
        **measured,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    raise SystemExit(main())
