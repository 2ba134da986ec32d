"""Where the time of a Python function goes, call by call: a decorator around the standard profiler."""

from __future__ import annotations

import atexit
import cProfile
import functools
import pstats
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO, TypeVar, final

from clew.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable

    _F = TypeVar("_F", bound=Callable[..., Any])

SORT_KEYS: Final = ("cumulative", "time", "calls")
_active: list[FunctionProfiler] = []
"""The profiler that is on. There is one at a time: what a profiled function calls is counted there already."""


class Row(NamedTuple):
    """One function: how often it was called, seconds in itself and with what it called, and where it stands."""

    calls: int
    own: float
    total: float
    source: str
    name: str


@final
class FunctionProfiler:
    """The profile of one function, over all calls since the last reset."""

    def __init__(
        self,
        name: str,
        *,
        when: Callable[..., bool] | None = None,
        every: int = 0,
        sort: str = "cumulative",
        limit: int = 40,
        file: TextIO | None = None,
    ) -> None:
        self.name = name
        self.calls = 0
        self._when = when
        self._every = every
        self._sort = sort
        self._limit = limit
        self._file = file
        self._profile = cProfile.Profile()
        self._has_told = False

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function under the profiler, unless one is on or the condition says no."""
        if _active or not (self._when is None or self._when(*args, **kwargs)) or not self._start():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            self._profile.disable()
            _active.clear()
            self.calls += 1
            if self._every and self.calls % self._every == 0:
                self.print_stats()

    def _start(self) -> bool:
        _active.append(self)
        try:
            self._profile.enable()
        except ValueError:
            _active.clear()
            # Since Python 3.12 there is one profiler in a process, and somebody else's is on.
            if not self._has_told:
                self._has_told = True
                sys.stderr.write(f"clew: another profiler is on; {self.name} is not profiled\n")
            return False
        return True

    def rows(self) -> list[Row]:
        """Return what was measured, in the order that was asked for."""
        stats: Any = pstats.Stats(self._profile) if self.calls else None
        found = [
            Row(calls, own, total, _place(path, line), name)
            for (path, line, name), (_, calls, own, total, _) in (stats.stats.items() if stats else ())
            # The call that switches the profiler off is its own, not the function's.
            if "_lsprof.Profiler" not in name
        ]
        order = {
            "cumulative": lambda row: row.total,
            "time": lambda row: row.own,
            "calls": lambda row: row.calls,
        }
        return sorted(found, key=order[self._sort], reverse=True)

    def print_stats(self, *, reset: bool = True) -> None:
        """Print the functions in which time was spent, and begin anew unless told not to."""
        from clew.render.terminal import show
        from clew.views.profile_page import make_page

        rows = self.rows()
        show(
            make_page(self.name, self.calls, [tuple(row) for row in rows[: self._limit]], len(rows)),
            self._file,
        )
        if reset:
            self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self._profile = cProfile.Profile()
        self.calls = 0

    def print_at_exit(self) -> None:
        """Print what has not been printed when the process ends."""
        if self.calls:
            self.print_stats()


def profile_function(
    function: _F | None = None,
    *,
    when: Callable[..., bool] | None = None,
    every: int = 0,
    sort: str = "cumulative",
    limit: int = 40,
    file: TextIO | None = None,
) -> Any:
    """Decorate a function so that the time of its calls is measured, and printed when the process ends.

    ``when(*args)`` decides for each call, ``every`` prints after so many profiled calls, ``sort`` is ``cumulative``,
    ``time`` or ``calls``, ``limit`` the number of lines. ``fn.profiler.print_stats()`` and ``fn.profiler.rows()``
    tell what was measured so far. Inside a profiled function no other is profiled: its time is counted there.
    """
    if sort not in SORT_KEYS:
        raise UsageError(
            f"sort='{sort}' is no order", next_step=suggest(sort, SORT_KEYS) or " ".join(SORT_KEYS)
        )
    options: dict[str, Any] = {"when": when, "every": every, "sort": sort, "limit": limit, "file": file}
    if function is None:
        return functools.partial(profile_function, **options)
    profiler = FunctionProfiler(function.__qualname__, **options)
    atexit.register(profiler.print_at_exit)

    @functools.wraps(function)
    def profiled(*args: Any, **kwargs: Any) -> Any:
        return profiler.call(function, *args, **kwargs)

    profiled.profiler = profiler  # type: ignore[attr-defined]
    return profiled


def _place(path: str, line: int) -> str:
    return f"{path}:{line}" if line and path != "~" else ""
