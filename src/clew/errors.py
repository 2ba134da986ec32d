"""Every exception clew raises: what happened, where, and what to do next."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any


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


class CheckpointError(ClewError):
    """Something about a checkpoint; names from inside the file are made fit for a terminal."""

    def __init__(self, what: str, *, where: str = "", next_step: str = "") -> None:
        super().__init__(_printable(what), where=_printable(where), next_step=_printable(next_step))


class CheckpointBroken(CheckpointError):
    """A checkpoint is missing, damaged, or not of a format that clew reads."""


class CheckpointUntrusted(CheckpointError):
    """A checkpoint that can only be read by running code it carries."""


class StoreFull(ClewError):
    """The disk, the quota or the permission does not let the record grow."""


class MissingExtra(ClewError):
    """A feature needs a package that is not installed."""


class UnsupportedTensor(ClewError):
    """A tensor that cannot be measured, with the reason."""


class CheckError(ClewError):
    """A value in the user's code is not what a check says it must be.

    ``details`` is what the message is made of, as data that fits JSON: ``check name site source step``, and for
    values ``count total stats`` and ``offenders``, the index and value of the first few.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: str = "", next_step: str = "", details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(what, where=where, next_step=next_step)
        self.details = dict(details or {})


class NonFiniteError(ClewError):
    """An operation made a NaN or an infinity; ``verdict`` says which one, where and from what."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", next_step: str = "", verdict: Any = None) -> None:
        super().__init__(what, where=where, next_step=next_step)
        self.verdict = verdict


class CheckWarning(UserWarning):
    """A check with ``warn=True`` failed while nothing was being recorded."""


class TraceFailed(ClewError):
    """A model raised while clew looked at it; the model's own exception is the cause."""


def _printable(text: str) -> str:
    """Return the text without escape sequences, which a hostile file could use to rewrite the screen."""
    return "".join(character if character.isprintable() else "?" for character in text)


def suggest(wrong: str, right: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the nearest right name, or an empty string."""
    near = difflib.get_close_matches(wrong, list(right), n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else ""
