"""``clew.watch`` in a script that is executed again: the recorded block is found, and nothing new is recorded."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import sysconfig
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.session import TorchSession

    Begin = Callable[[Any, Any], TorchSession]

_calls: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
"""How often each program of this process has called ``clew.watch``: a process may run one script after another."""
_again: Again | None = None


class Program(NamedTuple):
    """The program that called ``clew.watch``: what starts it again, or the obstacle to that."""

    command: list[str]
    is_module: bool = False
    number: int = 0
    """Which call of ``clew.watch`` in this process it is, counted from 1."""
    obstacle: str = ""


def describe_program() -> Program:
    """Return what the present call of ``clew.watch`` is part of."""
    main = sys.modules["__main__"]
    number = _calls[main] = _calls.get(main, 0) + 1
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if multiprocessing.parent_process() is not None:
        return Program(list(sys.argv), obstacle="it was recorded in a process that the script itself started")
    if file is None:
        return Program(
            list(sys.argv), obstacle="it was recorded in a notebook or at a prompt, not by a script"
        )
    if _is_installed(file):
        tool = Path(sys.argv[0]).name or "a tool"
        return Program(
            list(sys.argv), obstacle=f"it was recorded inside {tool}, not by a script of one's own"
        )
    if spec is not None:
        return Program([spec.name.removesuffix(".__main__"), *sys.argv[1:]], is_module=True, number=number)
    return Program(list(sys.argv), number=number)


def _is_installed(file: str) -> bool:
    path = str(Path(file).absolute())
    places = [sysconfig.get_path(name) for name in ("scripts", "purelib", "platlib", "stdlib")]
    return any(path.startswith(f"{place}/") for place in places)


class Again:
    """Meets the calls of ``clew.watch`` in a script that is executed again; ``begin`` is called in the recorded one."""

    def __init__(self, number: int, folder: Path, begin: Begin, end: Callable[[str], None]) -> None:
        self._number = number
        self._folder = folder
        self._begin = begin
        self._end = end
        self._counter = itertools.count(1)

    def install(self) -> None:
        """Meet every call from now on, in this process."""
        global _again
        _again = self

    def watch(self, models: Any, optimizers: Any) -> Standin:
        """Return what stands for a recording."""
        is_wanted = next(self._counter) == self._number
        return Standin(
            self._folder, models, optimizers, begin=self._begin if is_wanted else None, end=self._end
        )


class Standin:
    """Behaves as a ``Watch`` does and records nothing. ``path`` is the folder of the recorded run."""

    def __init__(
        self, folder: Path, models: Any, optimizers: Any, *, begin: Begin | None, end: Callable[[str], None]
    ) -> None:
        self.path = folder
        self._given = models, optimizers
        self._begin = begin
        self._end = end
        self._session: TorchSession | None = None

    @property
    def step(self) -> int:
        """The step that is going on, counted from 0."""
        return self._session.step if self._session is not None else 0

    def __enter__(self) -> Standin:
        if self._begin is not None:
            self._session = self._begin(*self._given)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._begin is not None:
            self._end("" if error is None else f"{type(error).__name__}: {error}")

    def log(self, **numbers: Any) -> None:
        """Record nothing; what would be an error in the recording is one here."""
        from clew.capture.torch.logged import read_numbers

        read_numbers(numbers)

    def pause(self) -> None:
        """Look away, as the recording did."""
        if self._session is not None:
            self._session.pause()

    def resume(self) -> None:
        """Look again after ``pause``."""
        if self._session is not None:
            self._session.resume()


def meet() -> Again | None:
    """Return what meets the calls of ``clew.watch``, None in a process that records."""
    return _again
