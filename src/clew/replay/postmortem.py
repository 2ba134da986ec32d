"""The world of a program that has failed: the frames of its exception, as they were left."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from clew.errors import UsageError
from clew.replay.exception_hint import read_message
from clew.replay.exception_value import describe_names
from clew.replay.reply import Reply, Spot
from clew.replay.stack import failed_frames, line_of, names_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class PostMortem:
    """Frames to look at; nothing moves any more."""

    def __init__(
        self, error: BaseException, *, step: int = 0, site: str = "", modules: tuple[str, ...] = ()
    ) -> None:
        self._error = error
        self._step = step
        self._site = site
        self._modules = modules
        self._frames = failed_frames(error)

    @property
    def spot(self) -> Spot:
        """The place of the failure."""
        names = tuple(names_of(frame) for frame, _ in self._frames)
        first = read_message(self._error).strip().partition("\n")[0]
        where = f" in {self._site}" if self._site else ""
        return Spot(
            title=f"{type(self._error).__name__}{where}: {first}",
            site=self._site,
            lines=tuple(line_of(frame, number) for frame, number in self._frames),
            names=names,
            extra={"error": self._error, "step": self._step, "site": self._site},
            shown=self._shown(names),
            modules=self._modules,
        )

    def _shown(self, names: tuple[dict[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
        """Return the names in the statement that failed."""
        if not self._frames:
            return ()
        used = describe_names(*self._frames[0], reads=False)
        return tuple((each["name"], names[0][each["name"]]) for each in used if each["name"] in names[0])

    def move(self, how: str, _: str) -> Reply:
        """Refuse: the program has ended."""
        raise UsageError(
            f"the program has ended, there is nothing to {how} to", next_step="up, down, where, or quit"
        )

    def guard(self) -> AbstractContextManager[None]:
        """Nothing goes on that could be disturbed."""
        return contextlib.nullcontext()

    def queue(self, _: int) -> list[dict[str, Any]]:
        """Return nothing: nothing comes next."""
        return []

    def breakpoints(self) -> list[str]:
        """Return nothing."""
        return []

    def add_break(self, text: str, *, is_watch: bool = False) -> str:
        """Refuse: nothing runs that could stop."""
        raise UsageError(
            f"the program has ended, it cannot stop at '{text}'" + (" any more" if is_watch else "")
        )

    def remove_break(self, number: int) -> str:
        """Refuse: there are none."""
        raise UsageError(f"there is no breakpoint {number}")
