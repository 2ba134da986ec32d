"""What the run folder costs: CPU for each step, bytes on disk, time to read. `--full` writes 100,000 steps.

The numbers are like those of a training: sizes and scales that differ between tensors, drift slowly and are noisy in
every digit. CPU is that of the whole process, background threads included, without the making of the numbers.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from clew.model.record import RunInfo, Scalar, Site, StepRecord
from clew.model.schema import HIST_BINS, KINDS, STAT_NAMES
from clew.query import Run
from clew.store.layout import folder_bytes
from clew.store.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMITS = {"cpu": 250.0, "bytes": 1.5e9, "series": 0.3, "latest": 0.3}
TARGET_STEPS, TARGET_TENSORS = 100_000, 500


class Training:
    """Makes step records of a pretended training."""

    def __init__(self, tensors: int, *, rich: bool = False) -> None:
        self.rng = np.random.default_rng(0)
        self.tensors = tensors
        self.rich = rich
        self.count = self.rng.integers(256, 600_000, tensors)
        self.scale = 10 ** self.rng.uniform(-4, 1, tensors)
        self.sites = np.arange(tensors, dtype=np.int32)
        self.kinds = (self.sites % 4 + 1).astype(np.int8)
        self.ordinals = np.zeros(tensors, np.int16)
        self.modes = np.zeros(tensors, np.int8)

    def step(self, number: int) -> StepRecord:
        noise = self.rng.standard_normal((tensors := self.tensors, 6))
        std = self.scale * (1 + 0.1 * np.sin(number / 300 + self.sites)) * (1 + 0.05 * noise[:, 0])
        values = np.zeros((tensors, len(STAT_NAMES)))
        zero = np.rint(self.count * 0.1 + np.sqrt(self.count * 0.09) * noise[:, 1])
        negative = np.rint((self.count - zero) * 0.5 + np.sqrt(self.count * 0.2) * noise[:, 2])
        values[:, 0], values[:, 4], values[:, 5] = self.count, zero, negative
        values[:, 6] = self.count - zero - negative
        values[:, 7], values[:, 8] = -std * (3 + 0.3 * noise[:, 3]), std * (3 + 0.3 * noise[:, 4])
        values[:, 9], values[:, 10] = std * 0.05 * noise[:, 5], std
        values[:, 11], values[:, 13] = std * (0.8 + 0.01 * noise[:, 1]), std * np.sqrt(self.count)
        values[:, 12] = np.maximum(-values[:, 7], values[:, 8])
        scalars = [
            Scalar("loss", float(noise[0, 0])),
            *(Scalar(f"time.{i}", float(noise[0, i])) for i in range(5)),
        ]
        return StepRecord(
            number, self.sites, self.kinds, self.ordinals, self.modes, values, *self._extras(), tuple(scalars)
        )

    def _extras(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        if not self.rich:
            return None, None
        hashes = self.rng.integers(1, 1 << 63, self.tensors, np.uint64)
        magnitudes = np.zeros((self.tensors, HIST_BINS), np.uint32)
        shape = 30_000 * 0.5 ** np.arange(16)
        magnitudes[:, 10:26] = self.rng.poisson(shape, (self.tensors, 16))
        magnitudes[:, 74:90] = self.rng.poisson(shape, (self.tensors, 16))
        return hashes, magnitudes


def write(folder: Path, training: Training, steps: int) -> Iterator[float]:
    """Write a run and yield the CPU seconds of each tenth of it; the last one holds the closing as well."""
    writer = Writer(folder, RunInfo("bench"))
    writer.add_sites(Site(i, f"layers.{i}", "module", shape=(128, 256)) for i in range(training.tensors))
    edges = set(np.linspace(0, steps, 11).astype(int)[1:-1].tolist())
    making, start = 0.0, time.process_time()
    for number in range(steps):
        if number in edges:
            yield time.process_time() - start - making
            making, start = 0.0, time.process_time()
        before = time.thread_time()
        record = training.step(number)
        making += time.thread_time() - before
        writer.put(record)
    writer.close("complete")
    yield time.process_time() - start - making


def timed(action: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def read(folder: Path, tensors: int) -> tuple[float, float]:
    """Return the seconds for opening and one series, and for opening and the latest step."""

    def latest() -> None:
        assert len(Run(folder).latest()) == tensors

    def series() -> None:
        assert len(Run(folder).series("layers.77", KINDS[77 % 4 + 1], "l2"))

    assert not Run(folder).problems, Run(folder).problems
    return timed(series), timed(latest)


def report(folder: Path, tensors: int, steps: int, *, rich: bool = False) -> None:
    training = Training(tensors, rich=rich)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cpu = [seconds / (steps / 10) * 1e6 for seconds in write(folder, training, steps)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    size = folder_bytes(folder)
    series, latest = read(folder, tensors)
    scaled = size * TARGET_STEPS / steps
    label = f"{tensors} tensors x {steps:,} steps{', hashes and histograms' if rich else ''}"
    print(f"{label}")
    print(f"  writing      {np.mean(cpu):8.0f} µs CPU a step   (limit {LIMITS['cpu']:.0f} for 500 tensors)")
    print(f"    first tenths {cpu[1]:6.0f}, last {cpu[-2]:6.0f}; the tenth with the closing {cpu[-1]:6.0f}")
    print(
        f"  on disk      {scaled / 1e9:8.2f} GB for 100,000 steps  ({size / steps / tensors:.1f} bytes a row)"
    )
    print(f"  one series   {series * 1e3:8.0f} ms, opening included (limit 300)")
    print(f"  latest step  {latest * 1e3:8.0f} ms, opening included (limit 300)")
    print(f"  peak memory  {peak:8.0f} MB more while writing than before it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="100,000 steps instead of 10,000")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    steps = arguments.steps or (TARGET_STEPS if arguments.full else 10_000)
    root = Path(tempfile.mkdtemp(dir=arguments.out))
    try:
        report(root / "target", TARGET_TENSORS, steps)
        if not arguments.full:
            report(root / "half", TARGET_TENSORS // 2, steps)
            report(root / "rich", TARGET_TENSORS, max(steps // 5, 10), rich=True)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
