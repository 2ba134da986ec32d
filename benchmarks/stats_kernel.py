"""What measuring a tensor costs: microseconds per tensor, by size, variant and what is asked for.

    python benchmarks/stats_kernel.py [--rounds 30]

All lines of a table are measured in turn within each round, so that a busy machine troubles them alike; shown are the
median over rounds and the smallest. "read" is one torch.sum on one thread, which touches every element once; "torch
operations" is the same row from separate reductions.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from clew.stats import compiled, rows

SIZES = (1, 256, 4096, 65_536, 1 << 20)
ASKED = {"row": {}, "+hash": {"hash": True}, "+hist": {"hist": True}, "+both": {"hash": True, "hist": True}}
MANY, MANY_SIZE = 100, 147_456


def by_operations(x):
    """Return what a row holds, from separate torch operations."""
    std, mean = torch.std_mean(x, correction=0)
    counts = (torch.isnan(x).sum(), torch.isinf(x).sum(), (x == 0).sum(), (x < 0).sum())
    return (*torch.aminmax(x), mean, std, x.abs().mean(), torch.linalg.vector_norm(x), *counts)


def time_in_turn(jobs, rounds, calls):
    """Return for each job its median and its smallest time in microseconds, after interleaved rounds."""
    times = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            start = time.perf_counter()
            for _ in range(calls):
                job()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: (statistics.median(found), min(found)) for name, found in times.items()}


def make_job(variant, job):
    """Return the job with its variant of the kernel chosen first; choosing costs 0.1 microseconds."""

    def run():
        compiled.BUILT.select(variant)
        job()

    return run


def show(title, results):
    print(f"\n{title}")
    for name, (median, least) in results.items():
        print(f"  {name:<28}{median:>12.2f} / {least:.2f}")


def measure_sizes(table, rounds):
    for size in SIZES:
        x = torch.randn(size)
        jobs = {
            f"{variant} {name}": make_job(variant, lambda x=x, asked=asked: table.measure(x, 0, **asked))
            for variant in compiled.BUILT.variants()
            for name, asked in ASKED.items()
        }
        jobs |= {"read (torch.sum)": x.sum, "torch operations": lambda x=x: by_operations(x)}
        calls = max(1, 100_000 // (size + 1000))
        show(f"one tensor of {size:,} floats, one thread, µs", time_in_turn(jobs, rounds, calls))


def measure_many(table, rounds, threads):
    new = [torch.randn(MANY_SIZE) for _ in range(MANY)]
    old = [x.clone() for x in new]
    jobs = {}
    for count in sorted({1, threads}):

        def many(asked, count=count):
            table.threads = count
            table.measure_many(new, 0, **asked)

        def updates(asked, count=count):
            table.threads = count
            table.measure_updates(new, old, first_row=0, **asked)

        for name, asked in ASKED.items():
            jobs[f"{count} thread(s) {name}"] = lambda many=many, asked=asked: many(asked)
        jobs[f"{count} thread(s) update"] = lambda updates=updates: updates({})
    jobs["torch operations"] = lambda: [by_operations(x) for x in new]
    show(
        f"{MANY} tensors of {MANY_SIZE:,} floats in one call, µs", time_in_turn(jobs, max(3, rounds // 5), 1)
    )


def measure_refused(table, rounds):
    """Tensors that cannot be measured; torch takes milliseconds for the words of an error, should one ask it."""

    def refuse(x):
        table.try_measure(x, 0, hash=False, hist=False)

    def inside(transform):
        def look(x):
            found.update(time_in_turn({transform.__name__: lambda: refuse(x)}, rounds, 10))
            return x.sum()

        return transform(look)

    meta = torch.empty(3, device="meta")
    found = time_in_turn({"meta": lambda: refuse(meta)}, rounds, 10)
    inside(torch.func.grad)(torch.ones(3))
    inside(torch.func.vmap)(torch.ones(2, 3))
    show("one tensor that torch does not tell of, µs", found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    if compiled.BUILT is None:
        raise SystemExit("the kernel is not built: there is nothing to measure")
    table = rows.Rows(hashes=True, hists=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    measure_sizes(table, rounds)
    compiled.BUILT.select("")
    torch.set_num_threads(threads)
    measure_many(table, rounds, threads)
    measure_refused(table, rounds)


if __name__ == "__main__":
    main()
