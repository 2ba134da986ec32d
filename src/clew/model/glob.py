"""Site patterns: ``*`` any text, ``?`` one character, ``{a,b}`` one of several, a leading ``!`` excludes.

Nothing else is special, so a name such as ``encoder[0].weight`` can be written as it is.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def split_patterns(text: str) -> tuple[str, ...]:
    """Split ``a,b.{c,d}`` at the commas that stand outside braces."""
    pieces, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            pieces.append(text[start:position])
            start = position + 1
    pieces.append(text[start:])
    return tuple(piece.strip() for piece in pieces if piece.strip())


def translate(pattern: str) -> str:
    """Return the regular expression of one pattern without its ``!``."""
    parts, depth = [], 0
    for character in pattern:
        if character == "{":
            depth += 1
            parts.append("(?:")
        elif character == "}":
            depth -= 1
            if depth < 0:
                raise _unbalanced(pattern)
            parts.append(")")
        elif character == "," and depth:
            parts.append("|")
        else:
            parts.append({"*": ".*", "?": "."}.get(character, re.escape(character)))
    if depth:
        raise _unbalanced(pattern)
    return "".join(parts)


def compile_globs(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a predicate: a name fits some pattern (or only exclusions were given) and no exclusion."""
    listed = list(patterns)
    wanted = [pattern for pattern in listed if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in listed if pattern.startswith("!")]
    include = _compile_any(wanted or ["*"])
    exclude = _compile_any(unwanted) if unwanted else None

    def fits(name: str) -> bool:
        return include.fullmatch(name) is not None and (exclude is None or exclude.fullmatch(name) is None)

    return fits


def _compile_any(patterns: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{translate(pattern)})" for pattern in patterns), re.DOTALL)


def _unbalanced(pattern: str) -> UsageError:
    return UsageError(
        f"the pattern '{pattern}' has a brace without its partner",
        next_step="write alternatives as {a,b}",
    )
