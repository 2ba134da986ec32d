"""Runs many scripts without importing torch for each: a process that has imported it once forks a child per script.

``Zygote`` is the side of the tests. The other side is this file as a program: it reads one JSON list of jobs per line
from standard input, runs all jobs of a line at once, and answers with the list of their exit codes. A job: ``argv``
(as ``python`` would get it), ``folder`` (where it runs and where ``stdout`` and ``stderr`` go) and ``environment``.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SERIAL = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True)
class Job:
    """What to run, as the arguments of ``python``, in which folder, with which variables added."""

    folder: Path
    argv: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Ending:
    """What a process left behind: exit code and everything it printed."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def own_stderr(self) -> str:
        """What the script wrote to standard error, without the lines that are clew's own."""
        return "".join(line for line in self.stderr.splitlines(keepends=True) if not line.startswith("clew:"))


class Zygote:
    """Starts scripts in forks of one process that has torch loaded."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | SERIAL,
            text=True,
        )

    def close(self) -> None:
        """End the process; no child of it is running then."""
        self._server.communicate(timeout=30)

    def run(self, *jobs: Job) -> list[Ending]:
        """Run the jobs at the same time and return how they ended."""
        request = [
            {"argv": job.argv, "folder": str(job.folder), "environment": job.environment} for job in jobs
        ]
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return _collect(jobs, json.loads(self._server.stdout.readline()))


def run_apart(*jobs: Job) -> list[Ending]:
    """Run the jobs at the same time, each in a ``python`` of its own, and return how they ended."""
    processes = []
    for job in jobs:
        with open(job.folder / "stdout", "w") as out, open(job.folder / "stderr", "w") as err:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *job.argv],
                    cwd=job.folder,
                    env=os.environ | SERIAL | job.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                )
            )
    return _collect(jobs, [process.wait(timeout=120) for process in processes])


def _collect(jobs: tuple[Job, ...], codes: list[int]) -> list[Ending]:
    return [
        Ending(code, (job.folder / "stdout").read_text(), (job.folder / "stderr").read_text(), job.folder)
        for job, code in zip(jobs, codes, strict=True)
    ]


# ---------------------------------------------------------------- the side that forks


def serve() -> dict | None:
    """Fork a child per job; return the job in the child, and None in the parent when no more jobs come."""
    answers = os.fdopen(os.dup(1), "w")
    for line in iter(sys.stdin.readline, ""):
        children = []
        for job in json.loads(line):
            child = os.fork()
            if child == 0:
                answers.close()
                return job
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        answers.write(json.dumps(codes) + "\n")
        answers.flush()
    return None


def enter(job: dict) -> None:
    """Make this forked child look like a fresh ``python`` in the folder of the job."""
    os.chdir(job["folder"])
    streams = (
        (0, os.devnull, os.O_RDONLY),
        (1, "stdout", os.O_WRONLY | os.O_CREAT),
        (2, "stderr", os.O_WRONLY | os.O_CREAT),
    )
    for number, name, flags in streams:
        opened = os.open(name, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.update(job["environment"])
    sys.argv = job["argv"]


def run(argv: list[str]) -> None:
    """Run what ``python *argv`` would run: a script, or a module after ``-m``."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(argv[0])
        runpy.run_path(argv[0], run_name="__main__")


def import_for_the_children() -> None:
    import numpy  # noqa: F401
    import pyarrow  # noqa: F401
    import torch
    import torch._dynamo  # the first optimizer step imports it
    import torch.utils.data

    torch.set_num_threads(1)
    gc.freeze()  # a collection in a child would copy every page


if __name__ == "__main__":
    import_for_the_children()
    todo = serve()
    if todo is not None:
        enter(todo)
        run(todo["argv"])
