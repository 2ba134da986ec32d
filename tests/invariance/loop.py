"""A loop file and what its header promises, and the means to run it plain and under clew."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

LOOPS = Path(__file__).parent / "loops"
PLAIN_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True)
class Loop:
    """A script, and the promises of its header: what a record of it must hold."""

    path: Path
    promises: dict[str, str] = field(repr=False)

    @property
    def name(self) -> str:
        return self.path.stem

    def words(self, key: str) -> list[str]:
        """Return the words of a line of the header, or nothing."""
        return self.promises.get(key, "").split()

    @property
    def missing(self) -> list[str]:
        """Return what the script needs and this machine does not have."""
        return [need for need in self.words("needs") if not _is_there(need)]


def _is_there(need: str) -> bool:
    if need == "inductor":
        return any(os.access(Path(folder) / "g++", os.X_OK) for folder in os.get_exec_path())
    return find_spec(need) is not None


def read_loops() -> list[Loop]:
    """Return every loop, with the header of its docstring read."""
    scripts = sorted(path for path in LOOPS.glob("*.py") if path.stem != "witness")
    return [Loop(path, _read_header(path)) for path in scripts]


def _read_header(path: Path) -> dict[str, str]:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return dict(re.findall(r"^(\w+): (.+)$", text, flags=re.MULTILINE))


@dataclass(frozen=True)
class Ending:
    """What a process left behind: exit code and everything it printed."""

    code: int
    stdout: str
    stderr: str
    folder: Path


class Zygote:
    """Starts scripts in forks of one process that has torch loaded, or in processes of their own."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | PLAIN_ENVIRONMENT,
            text=True,
        )

    def close(self) -> None:
        """End the process; no child of it is running then."""
        self._server.communicate(timeout=30)

    def run(
        self, folder: Path, jobs: list[tuple[str, list[str], dict[str, str]]], *, fork: bool
    ) -> list[Ending]:
        """Run named jobs at the same time, each in a folder of its own name, and return how they ended."""
        places = [folder / name for name, _, _ in jobs]
        for place in places:
            place.mkdir()
        codes = self._fork(places, jobs) if fork else _start(places, jobs)
        return [
            Ending(code, (place / "stdout").read_text(), (place / "stderr").read_text(), place)
            for code, place in zip(codes, places, strict=True)
        ]

    def _fork(self, places: list[Path], jobs: list[tuple[str, list[str], dict[str, str]]]) -> list[int]:
        request = [
            {"argv": argv, "folder": str(place), "environment": environment}
            for place, (_, argv, environment) in zip(places, jobs, strict=True)
        ]
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())


def _start(places: list[Path], jobs: list[tuple[str, list[str], dict[str, str]]]) -> list[int]:
    processes = []
    for place, (_, argv, environment) in zip(places, jobs, strict=True):
        with open(place / "stdout", "w") as out, open(place / "stderr", "w") as err:
            variables = os.environ | PLAIN_ENVIRONMENT | environment
            command = [sys.executable, *argv]
            processes.append(
                subprocess.Popen(
                    command, cwd=place, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=variables
                )
            )
    return [process.wait(timeout=120) for process in processes]
