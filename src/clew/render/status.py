"""The live line of ``clew run`` on a terminal, and the care it takes not to garble the script's own output.

The line is drawn on standard error, only where that is a terminal, and the cursor goes back to its first
column. Before the script writes or flushes, the line is erased: ``write`` and ``flush`` of the two standard
streams, where they are terminals, are covered on the instance, so type, identity and every other behaviour of
``sys.stdout`` stay what they were, and ``close`` uncovers them. While the script's last line is unfinished (a
progress bar, a prompt) nothing is drawn, and a message of clew's begins on a line of its own; for that, ``write`` of
standard error is covered where no status is drawn, too. Output past Python's streams (a subprocess, C code) starts in
the first column and may leave the tail of one status line behind it: nothing of the script's own is lost.
"""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any, Final, TextIO

from clew.render.fold import find_width, fold_for
from clew.views.number import format_bytes, format_integer, format_number, format_rate, format_share

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_SECONDS: Final = 0.2
_ERASE: Final = "\r\x1b[K"
_COVERED: Final = ("write", "flush")
_EMPTIED: Final = re.compile(r"(?:\r\x1b\[0?K|\x1b\[2K\r?)$")
"""What a progress bar writes to take itself off the line."""


class StatusLine:
    """One line that shows where training stands; every method is safe to call always and never raises."""

    def __init__(
        self,
        stream: TextIO,
        enabled: bool,
        *,
        follows: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._drawn = ""
        self._mid_line = False
        self._next = 0.0
        self._covered: list[tuple[TextIO, str, Callable[..., Any], Callable[..., Any] | None]] = []
        self._is_ours = False
        self.enabled = enabled and _is_terminal(stream) and os.environ.get("TERM") != "dumb"
        if self.enabled:
            self._cover(_COVERED)
        elif follows:
            self._cover(("write",))

    @property
    def is_due(self) -> bool:
        """Whether an update would be drawn now; lets the caller skip gathering what it shows."""
        return self.enabled and self._clock() >= self._next

    def update(
        self,
        *,
        step: int,
        steps_per_second: float | None = None,
        loss: float | None = None,
        worst_site: str = "",
        data_wait_share: float | None = None,
        memory_bytes: float | None = None,
        cost_share: float | None = None,
    ) -> None:
        """Draw the line again, at most five times a second."""
        if not self.is_due or self._mid_line:
            return
        self._next = self._clock() + INTERVAL_SECONDS
        parts = [f"clew: step {format_integer(step)}"]
        parts += [format_rate(steps_per_second)] if steps_per_second is not None else []
        parts += [f"loss {format_number(loss)}"] if loss is not None else []
        parts += [f"worst {worst_site}"] if worst_site else []
        parts += [f"data wait {format_share(data_wait_share)}"] if data_wait_share is not None else []
        parts += [format_bytes(memory_bytes)] if memory_bytes is not None else []
        parts += [f"clew {format_share(cost_share)}"] if cost_share is not None else []
        self._draw(parts)

    def message(self, text: str) -> None:
        """Print a line of clew's own above the status line, also where no status is drawn."""
        try:
            self.erase()
            start = "\n" if self._mid_line else ""
            self._mid_line = False
            self._stream.write(start + fold_for(self._stream, text.rstrip("\n")) + "\n")
            self._stream.flush()
        except Exception:  # noqa: BLE001 - a closed terminal is no reason to stop a training
            self.enabled = False

    def erase(self) -> None:
        """Take the line off the terminal; the next update draws it again."""
        if not self._drawn or self._is_ours:
            return
        self._drawn = ""
        self._write(_ERASE)

    def close(self) -> None:
        """Erase the line and give the streams back as they were."""
        self.erase()
        self.enabled = False
        for stream, name, cover, earlier in self._covered:
            # A cover that the script laid over ours stays; ours below it does nothing any more.
            if vars(stream).get(name) is not cover:
                continue
            if earlier is None:
                delattr(stream, name)
            else:
                setattr(stream, name, earlier)
        self._covered.clear()

    def _draw(self, parts: list[str]) -> None:
        width = find_width(self._stream) or 80
        # Parts stand in order of worth; the last ones go first, and the first one is cut as a last resort.
        while len(parts) > 1 and len("  ".join(parts)) >= width:
            parts = parts[:-1]
        line = "  ".join(parts)[: max(width - 1, 1)]
        if line != self._drawn:
            self._write(f"{_ERASE}{line}\r")
            self._drawn = line

    def _write(self, text: str) -> None:
        # Our own writes pass the covers too: they must neither erase nor count as the script's.
        self._is_ours = True
        try:
            self._stream.write(text)
            self._stream.flush()
        except Exception:  # noqa: BLE001 - see message
            self.enabled = False
        finally:
            self._is_ours = False

    def _cover(self, names: tuple[str, ...]) -> None:
        for stream in dict.fromkeys((sys.stdout, sys.stderr, self._stream)):
            # A line left open on one terminal is open for the other stream, too; pipes are apart.
            if stream is None or (stream is not self._stream and not _are_terminals(stream, self._stream)):
                continue
            if not hasattr(stream, "__dict__"):
                # A stream that cannot be covered would be garbled: rather no status at all.
                self.close()
                return
            for name in names:
                cover = self._erase_before(getattr(stream, name))
                self._covered.append((stream, name, cover, vars(stream).get(name)))
                setattr(stream, name, cover)

    def _erase_before(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def erase_first(*args: Any) -> Any:
            if not self._is_ours:
                self.erase()
                if args and isinstance(args[0], str) and args[0]:
                    self._mid_line = not args[0].endswith("\n") and not _EMPTIED.search(args[0])
            return method(*args)

        return erase_first


def _are_terminals(*streams: TextIO) -> bool:
    return all(map(_is_terminal, streams))


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False
