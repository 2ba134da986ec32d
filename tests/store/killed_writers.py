"""Start writers, kill each at a random moment, and print what each had flushed: run by test_loses_nothing.py."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from clew.model.record import RunInfo
from clew.store.writer import Writer
from clew.testing.runs import make_record, make_sites


def write_for_ever(folder, report, records):
    writer = Writer(folder, RunInfo(folder.name), flush_seconds=0.004, part_rows=150)
    writer.add_sites(make_sites())
    os.write(report, b"opened\n")
    for step, record in enumerate(records):
        writer.put(record)
        if step % 3 == 0:
            writer.flush()
            os.write(report, f"{step}\n".encode())
    os.write(report, b"out of records\n")
    time.sleep(60)


def kill_one(folder, records, dice):
    """Kill a writer at a random place of its work, and there at a random moment."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        write_for_ever(folder, writing, records)
    os.close(writing)
    with os.fdopen(reading) as reports:
        lines = [reports.readline() for _ in range(dice.randrange(1, 40))]
        time.sleep(dice.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines += reports.read().splitlines(keepends=True)
    flushed = [int(line) for line in lines if line.endswith("\n") and line.strip().isdigit()]
    return flushed[-1] if flushed else -1


def main():
    root, count = Path(sys.argv[1]), int(sys.argv[2])
    dice = random.Random(20261115)
    records = [make_record(step) for step in range(300)]
    flushed = [kill_one(root / f"run{i}", records, dice) for i in range(count)]
    print(json.dumps(flushed))


if __name__ == "__main__":
    main()
