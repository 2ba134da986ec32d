"""Runs many scripts without importing torch for each: a process that has imported it once forks a child per script.

``Zygote`` is the side of the tests, who get it as the fixture ``zygote``. The other side is this file as a program: it
reads one JSON list of jobs per line from standard input, runs all jobs of a line at once, and answers with the list of
their exit codes. A job: ``argv`` (as ``python`` would get it), ``folder`` (where it runs and where ``stdout`` and
``stderr`` go) and ``environment``. Tests of what only a fresh ``python`` shows use ``run_apart``.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SERIAL = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True)
class Job:
    """What to run, as the arguments of ``python``, in which folder, with which variables added."""

    folder: Path
    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)


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
        self._server.communicate(timeout=300)

    def run(self, *jobs: Job) -> list[Ending]:
        """Run the jobs at the same time and return how they ended."""
        request = [
            {"argv": job.argv, "folder": str(job.folder), "environment": job.environment} for job in jobs
        ]
        print(json.dumps(request), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        assert answer, f"the process that forks ended with {self._server.wait()}"
        return _collect(jobs, json.loads(answer))

    def clew(self, folder: Path, *words: str) -> Ending:
        """Run one command of clew in a folder and return how it ended."""
        (ending,) = self.run(Job(folder, ["-m", "clew", *words]))
        return ending


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
    return _collect(jobs, [process.wait(timeout=300) for process in processes])


def _collect(jobs: tuple[Job, ...], codes: list[int]) -> list[Ending]:
    return [
        Ending(code, _take(job.folder / "stdout"), _take(job.folder / "stderr"), job.folder)
        for job, code in zip(jobs, codes, strict=True)
    ]


def _take(path: Path) -> str:
    text = path.read_text()
    path.unlink()
    return text


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
        return
    sys.path[0] = os.path.dirname(argv[0])
    # Pickles and spawned processes look for the main module by its name and by its file.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = argv[0]
    with open(argv[0], "rb") as file:
        code = compile(file.read(), argv[0], "exec", dont_inherit=True)
    try:
        exec(code, vars(main))
    except Exception as error:
        # As python shows it: the first frame is that of the script.
        error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def import_for_the_children() -> None:
    import numpy  # noqa: F401
    import pyarrow  # noqa: F401
    import torch
    import torch._dynamo  # the first optimizer step imports it
    import torch.utils.data

    import clew

    for found in pkgutil.walk_packages(clew.__path__, "clew."):
        if not _ELSEWHERE.search(found.name):
            importlib.import_module(found.name)
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a child would copy every page


_ELSEWHERE = re.compile("jax|keras|__main__|integrations|testing")
"""What a script under clew does not load, or loads itself."""


class Exit:
    """Ends a child after everything that ``atexit`` has to do; taking the modules apart would copy every page."""

    code: int | None = 0

    def note(self, error: BaseException) -> None:
        """Keep the exit code that python would give for an exception which nobody caught."""
        if isinstance(error, SystemExit):
            given = error.code
            self.code = given & 0xFF if isinstance(given, int) else int(given is not None)
        else:
            self.code = None if isinstance(error, KeyboardInterrupt) else 1

    def leave(self) -> None:
        if self.code is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(
                    AttributeError, OSError, ValueError
                ):  # closed, or gone with its reader
                    stream.flush()
            os._exit(self.code)


if __name__ == "__main__":
    ending = Exit()
    atexit.register(ending.leave)  # before every import: what is registered first comes last
    import_for_the_children()
    todo = serve()
    if todo is not None:
        enter(todo)
        try:
            run(todo["argv"])
        except BaseException as error:
            ending.note(error)
            raise
