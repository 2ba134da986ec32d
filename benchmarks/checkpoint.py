"""How fast checkpoints are compared, shown and scanned, in turns with plain reading and copying.

`python -m benchmarks.checkpoint --gigabytes 2` writes two checkpoints of 2 GB to a temporary folder and removes them.
The limit: comparing runs at no less than half the speed of a plain read of both files and of copying as many bytes in
memory, each with as many threads; `--cold` drops the files from the cache before each turn, so that the disk counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from clew.compare.checkpoint import diff_checkpoints, summarise_checkpoint
from clew.compare.checkpoint_scan import scan_checkpoint
from clew.store.checkpoint import read_checkpoint
from clew.store.tensors import write_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 0.5
YARDSTICKS = ("read both", "copy memory")
TENSOR_ELEMENTS = 16 << 20
THREADS = min(4, len(os.sched_getaffinity(0)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of each of the two files (1)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--all", action="store_true", help="measure clew ckpt show and scan too")
    parser.add_argument("--cold", action="store_true", help="drop the files from the cache before each turn")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="clew-bench-"))
    try:
        a, b = write_pair(folder, args.gigabytes)
        return report(a, b, args)
    finally:
        shutil.rmtree(folder)


def write_pair(folder: Path, gigabytes: float) -> tuple[Path, Path]:
    """Write weights and the same after a small update everywhere, as two steps of a training leave them."""
    rng = np.random.default_rng(0)
    count = max(1, round(gigabytes * 1e9 / 4 / TENSOR_ELEMENTS))
    first = {}
    for index in range(count):
        weight = rng.standard_normal(TENSOR_ELEMENTS, dtype=np.float32)
        first[f"layers.{index}.weight"] = weight.reshape(-1, 4096)
    a, b = folder / "a.safetensors", folder / "b.safetensors"
    write_tensors(a, first)
    write_tensors(b, {name: weight + np.float32(1e-3) for name, weight in first.items()})
    return a, b


def report(a: Path, b: Path, args: argparse.Namespace) -> int:
    rates = measure(a, b, args)
    both = a.stat().st_size + b.stat().st_size
    state = "cold" if args.cold else "warm"
    print(f"{'':18}{'GB/s':>8}{'of reading':>12}{'of copying':>12}   ({both / 1e9:.1f} GB, {state} cache)")
    for name, values in rates.items():
        shares = [median_ratio(values, rates[yardstick]) for yardstick in YARDSTICKS]
        print(f"{name:18}{statistics.median(values):8.2f}{shares[0]:12.2f}{shares[1]:12.2f}")
    yardsticks = YARDSTICKS[:1] if args.cold else YARDSTICKS
    return 0 if all(median_ratio(rates["diff"], rates[each]) >= LIMIT for each in yardsticks) else 1


def measure(a: Path, b: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the speed of each work in each round, in GB/s."""
    both, one = a.stat().st_size + b.stat().st_size, a.stat().st_size
    arrays = [np.ones((2, 16 << 20)) for _ in range(THREADS)]
    works: dict[str, tuple[Callable[[], object], int]] = {
        "read both": (lambda: read_plainly([a, b]), both),
        "copy memory": (lambda: copy_memory(arrays, both), both),
        "diff": (lambda: diff_checkpoints(read_checkpoint(a), read_checkpoint(b)), both),
    }
    if args.all:
        works |= {
            "diff with itself": (lambda: diff_checkpoints(read_checkpoint(a), read_checkpoint(a)), 2 * one),
            "show": (lambda: summarise_checkpoint(read_checkpoint(a)), one),
            "scan": (lambda: scan_checkpoint(read_checkpoint(a)), one),
        }
    if args.cold:
        os.sync()
    rates: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(args.rounds):
        for name, (work, size) in works.items():
            if args.cold:
                drop([a, b])
            start = time.perf_counter()
            work()
            rates[name].append(size / (time.perf_counter() - start) / 1e9)
    return rates


def median_ratio(values: list[float], yardstick: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(values, yardstick, strict=True))


def copy_memory(arrays: list[np.ndarray], size: int) -> None:
    """Copy as many bytes between arrays that no cache holds, with as many threads as clew uses."""
    turns = max(1, size // arrays[0][0].nbytes // THREADS)
    with ThreadPoolExecutor(THREADS) as executor:
        list(executor.map(lambda array: [np.copyto(array[1], array[0]) for _ in range(turns)], arrays))


def read_plainly(paths: list[Path]) -> None:
    """Read files into one buffer per thread, with as many threads as clew uses."""
    pieces = [(path, at) for path in paths for at in range(0, path.stat().st_size, 64 << 20)]
    with ThreadPoolExecutor(THREADS) as executor:
        list(executor.map(read_piece, pieces))


def read_piece(piece: tuple[Path, int]) -> None:
    path, at = piece
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        for _ in range(64):
            if not file.readinto(buffer):
                return


def drop(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    raise SystemExit(main())
