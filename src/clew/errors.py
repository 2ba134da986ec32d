"""Every exception clew raises: what happened, where, and what to do next."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ClewError(Exception):
    """What went wrong, where it is, and the next step for the person who reads it."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.next_step = next_step

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.next_step:
            lines.append(f"  next:  {self.next_step}")
        return "\n".join(lines)


class UsageError(ClewError):
    """A setting, an argument or a name that clew does not understand."""


class RunNotFound(ClewError):
    """No run at the given path or name."""


class RunBroken(ClewError):
    """A run folder is there but cannot be read."""


class RunTooNew(ClewError):
    """A run was written by a newer format than this clew reads."""


class StoreFull(ClewError):
    """The disk, the quota or the permission does not let the record grow."""


class MissingExtra(ClewError):
    """A feature needs a package that is not installed."""


class UnsupportedTensor(ClewError):
    """A tensor that cannot be measured, with the reason."""


def suggest(wrong: str, right: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the nearest right name, or an empty string."""
    near = difflib.get_close_matches(wrong, list(right), n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else ""
