"""A bar on standard error while something long goes on; nothing where that is no terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Final, TextIO

from clew.views.number import format_bytes, format_share

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

PATIENCE_SECONDS: Final = 0.5
"""Work that ends before this shows nothing."""
INTERVAL_SECONDS: Final = 0.1
_WIDTH: Final = 30
_ERASE: Final = "\r\x1b[K"


class ByteBar:
    """Counts bytes up to a total and draws how far it is; leaves the terminal as it was."""

    def __init__(
        self,
        title: str,
        total_bytes: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._total, self._done = title, total_bytes, 0
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._start = clock()
        self._next = self._start + PATIENCE_SECONDS
        self._is_drawn = False
        self._is_enabled = self._stream.isatty() and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> ByteBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_drawn:
            self._stream.write(_ERASE)
            self._stream.flush()

    def advance(self, count: int) -> None:
        """Count more bytes as done."""
        self._done += count
        now = self._clock()
        if not self._is_enabled or now < self._next:
            return
        self._next = now + INTERVAL_SECONDS
        self._is_drawn = True
        share = min(self._done / self._total, 1.0) if self._total else 1.0
        filled = round(share * _WIDTH)
        rate = format_bytes(self._done / max(now - self._start, 1e-9))
        bar = "#" * filled + "." * (_WIDTH - filled)
        self._stream.write(f"{_ERASE}{self._title} [{bar}] {format_share(share)}  {rate}/s")
        self._stream.flush()
