"""How long a comparison takes, and what memory: `python -m benchmarks.compare_speed`.

Two runs of 1,000 steps with 500 tensors each: the same, apart in the last step, apart by rounding in all of them, and
with all modules renamed. The limit: under 5 s each.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

import clew
from clew.model.record import RunInfo, Scalar, Site, StepRecord
from clew.model.schema import KIND_INDEX, STAT_NAMES
from clew.store.writer import Writer

LIMIT_SECONDS = 5.0
STEPS, MODULES = 1000, 100
MODULE_KINDS = ("output", "grad_output")
PARAMETER_KINDS = ("param", "grad", "update")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_speed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="clew-bench-") as folder:
        place = Path(folder)
        write_run(place / "plain")
        others = {
            "the same": write_run(place / "same"),
            "apart in the last step": write_run(place / "last", changed_from=STEPS - 1, factor=1.01),
            "apart by rounding": write_run(place / "rounding", changed_from=1, factor=1 + 1e-8),
            "renamed": write_run(place / "renamed", prefix="net.block"),
        }
        before = peak_bytes()
        worst = 0.0
        for name, other in others.items():
            seconds = min(measure(place / "plain", other) for _ in range(args.rounds))
            worst = max(worst, seconds)
            grown = (peak_bytes() - before) / 1e6
            print(f"{name:24}{seconds:8.2f} s   peak of the process grew by {grown:.0f} MB")
    return 0 if worst < LIMIT_SECONDS else 1


def measure(a: Path, b: Path) -> float:
    start = time.perf_counter()
    found = clew.diff(a, b)
    seconds = time.perf_counter() - start
    assert found.steps["compared"] == STEPS, found.sentence
    return seconds


def peak_bytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_run(folder: Path, *, changed_from: int = STEPS, factor: float = 1.0, prefix: str = "layer") -> Path:
    """Write a run of made-up statistics, multiplied by a factor from a step on."""
    writer = Writer(folder, RunInfo(name=folder.name))
    writer.add_sites(make_sites(prefix))
    rng = np.random.default_rng(0)
    modules, parameters = np.arange(MODULES), np.arange(MODULES, 2 * MODULES)
    sites = np.concatenate([*[modules] * len(MODULE_KINDS), *[parameters] * len(PARAMETER_KINDS)])
    kinds = np.repeat([KIND_INDEX[kind] for kind in (*MODULE_KINDS, *PARAMETER_KINDS)], MODULES)
    for step in range(STEPS):
        stats = np.abs(rng.standard_normal((len(sites), len(STAT_NAMES))))
        stats[:, :7] = (1024, 0, 0, 0, 0, 512, 512)
        hashes = rng.integers(1, 1 << 62, len(sites), dtype=np.uint64)
        if step >= changed_from:
            stats[:, 7:] *= factor
            hashes += np.uint64(1)
        writer.put(
            StepRecord(
                step,
                sites.astype(np.int32),
                kinds.astype(np.int8),
                np.zeros(len(sites), np.int16),
                np.zeros(len(sites), np.int8),
                stats,
                hashes,
                None,
                (Scalar("loss", 1.0),),
            )
        )
    writer.close("complete")
    return folder


def make_sites(prefix: str) -> list[Site]:
    """Return modules, each with a weight of a size of its own."""
    linear = "torch.nn.modules.linear.Linear"
    modules = [
        Site(index, f"{prefix}{index}", "module", linear, -1, (8, 8), "float32", index)
        for index in range(MODULES)
    ]
    weights = [
        Site(
            MODULES + index,
            f"{prefix}{index}.weight",
            "parameter",
            "float32",
            index,
            (8, index + 2),
            "float32",
        )
        for index in range(MODULES)
    ]
    return [*modules, *weights]


if __name__ == "__main__":
    raise SystemExit(main())
