"""A script on the command line: where the words of a command end and those of the script begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Sequence


def split_at_script(words: Sequence[str], *, switches: Container[str]) -> tuple[list[str], list[str]]:
    """Return clew's own words, and the rest: the script with its arguments, or ``-m`` with the module's.

    ``switches`` are the options without a value; every other one takes the next word.
    """
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            return list(words[:position]), list(words[position + 1 :])
        if word.startswith("-m") and not word.startswith("--"):
            module = [word[2:]] if len(word) > 2 else []
            return list(words[:position]), ["-m", *module, *words[position + 1 :]]
        if not word.startswith("-") or word == "-":
            return list(words[:position]), list(words[position:])
        position += 1 if word in switches or "=" in word else 2
    return list(words), []
