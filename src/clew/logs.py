"""What clew says of its own work, room by room, when somebody asks for it: ``CLEW_LOG=info,replay=debug``.

Nothing is logged unless asked for, and never through the root logger: the user's own handlers and levels see nothing
of clew, so a script prints the same with and without it.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Final

from clew.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOMS: Final = ("api", "capture", "store", "doctor", "replay")
LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
FILE_BYTES: Final = 50_000_000
BACKUPS: Final = 3
_FORM: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_root = logging.getLogger("clew")
_root.propagate = False
_root.setLevel(LEVELS["off"])


def room_log(room: str) -> logging.Logger:
    """Return the logger of a room."""
    return logging.getLogger(f"clew.{room}")


def parse_levels(text: str) -> dict[str, int]:
    """Return the level of each room that ``info,replay=debug`` names; the empty name stands for all."""
    levels: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        room, sign, level = part.rpartition("=")
        if level.lower() not in LEVELS:
            hint = suggest(level, LEVELS) or f"one of {', '.join(LEVELS)}"
            raise UsageError(f"'{level}' is no level of the log", where=f"CLEW_LOG={text}", next_step=hint)
        if sign and room not in ROOMS:
            hint = suggest(room, ROOMS) or f"one of {', '.join(ROOMS)}"
            raise UsageError(f"'{room}' is no room of clew", where=f"CLEW_LOG={text}", next_step=hint)
        levels[room] = LEVELS[level.lower()]
    return levels


def configure(environment: Mapping[str, str] | None = None) -> None:
    """Set levels and the place to write to from ``CLEW_LOG`` and ``CLEW_LOG_FILE``; again is as good as once."""
    environment = os.environ if environment is None else environment
    levels = parse_levels(environment.get("CLEW_LOG", ""))
    _root.setLevel(levels.pop("", LEVELS["off"]))
    for room in ROOMS:
        room_log(room).setLevel(levels.get(room, logging.NOTSET))
    for handler in list(_root.handlers):
        _root.removeHandler(handler)
        handler.close()
    if environment.get("CLEW_LOG"):
        _root.addHandler(_make_handler(environment))


def _make_handler(environment: Mapping[str, str]) -> logging.Handler:
    """Return where the lines go: stderr, or a file of a bounded size, one for each rank of several."""
    path = environment.get("CLEW_LOG_FILE", "")
    if not path:
        handler: logging.Handler = _Stderr()
    else:
        from logging.handlers import RotatingFileHandler

        rank = environment.get("RANK", "")
        try:
            handler = RotatingFileHandler(
                f"{path}.rank{rank}" if rank else path,
                maxBytes=FILE_BYTES,
                backupCount=BACKUPS,
                encoding="utf-8",
            )
        except OSError as error:
            raise UsageError(
                f"cannot write the log: {error.strerror}", where=f"CLEW_LOG_FILE={path}", next_step="choose another"
            ) from error  # fmt: skip
    handler.setFormatter(logging.Formatter(_FORM))
    return handler


class _Stderr(logging.Handler):
    """Writes to what is ``sys.stderr`` at that moment; a stream that is gone is not worth an exception."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - a log must never stop what it tells of
            return
