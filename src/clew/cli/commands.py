"""Commands for a debugger from a file or from standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from clew.errors import UsageError


def read_commands(file: str | None) -> tuple[str, ...] | None:
    """Return the lines of a file, of standard input for ``-``, or None where no file is named."""
    if file is None:
        return None
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the commands cannot be read: {error}", where=file) from None
    return tuple(text.splitlines())
