"""A loop file, and what its header promises of a record of it."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

LOOPS = Path(__file__).parent / "loops"


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
