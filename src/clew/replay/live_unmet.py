"""Breakpoints at places that a training never comes to: told, with the nearest right name, instead of silence."""

from __future__ import annotations

import ast
import linecache
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from clew.errors import suggest
from clew.replay.breakpoint import UPDATE, covers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from clew.capture.torch.recorder import Recorder
    from clew.replay.breakpoint import Breakpoint


class Unmet:
    """Knows which breakpoints the training has come to, whatever their conditions said."""

    def __init__(self, recorder: Recorder, tell: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._tell = tell
        self._met: set[str] = set()
        self._told: set[str] = set()
        self.operations: set[str] = set()
        """The operations that were seen while there was a breakpoint on one."""

    def meet(self, point: Breakpoint) -> None:
        """The training has come to the place of a breakpoint."""
        self._met.add(point.text)

    def check(self, points: Iterable[Breakpoint]) -> None:
        """After a whole step: tell of places that do not exist."""
        for point in points:
            wrong = self.find_wrong(point)
            if wrong and point.text not in self._met | self._told:
                self._told.add(point.text)
                self._tell(f"clew: the breakpoint '{point.text}' has nowhere to stop so far: {wrong}")

    def close(self, points: Iterable[Breakpoint]) -> None:
        """At the end: tell of places that the training has never come to."""
        left = [point for point in points if point.kind != "watch" and point.text not in self._met]
        self.check(left)
        for point in left:
            if point.text not in self._told:
                self._tell(f"clew: the training never came to the breakpoint '{point.text}'")

    def find_wrong(self, point: Breakpoint) -> str:
        """Return why there is no such place, as far as is known by now, or nothing."""
        if point.kind == "site":
            return self._find_wrong_site(point)
        if point.kind == "op" and self.operations and not any(map(point.matches, self.operations)):
            return _join(f"no operation is called '{point.target}'", suggest(point.target, self.operations))
        return _find_wrong_line(point) if point.kind == "line" else ""

    def _find_wrong_site(self, point: Breakpoint) -> str:
        sites = self._recorder.sites
        role, fits = ("parameter", covers) if point.phase == UPDATE else ("module", _fits)
        names = [sites[number].name for number in range(len(sites)) if sites[number].role == role]
        if not names or any(fits(point, name) for name in names):
            return ""
        return _join(f"no {role} is called '{point.target}'", suggest(point.target, names))


def _fits(point: Breakpoint, name: str) -> bool:
    return point.matches(name)


def _find_wrong_line(point: Breakpoint) -> str:
    """Return what is wrong with a source line: a file that was not loaded, or nothing to execute there."""
    loaded = {
        str(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))
    }
    file = next((file for file in sorted(loaded) if point.matches(file)), None)
    if file is None:
        near = suggest(Path(point.target).name, {Path(each).name for each in loaded})
        return _join(f"no file '{point.target}' was loaded", near)
    lines = _code_lines(file)
    if not lines or point.number in lines:
        return ""
    nearest = next((line for line in sorted(lines) if line > point.number), max(lines))
    return f"there is nothing to execute in line {point.number}; line {nearest} is the nearest"


def _code_lines(file: str) -> set[int]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return set()
    # A statement over several lines is met at those of its parts.
    return {node.lineno for node in ast.walk(tree) if isinstance(node, (ast.stmt, ast.expr))}


def _join(what: str, hint: str) -> str:
    return f"{what}; {hint}" if hint else what
