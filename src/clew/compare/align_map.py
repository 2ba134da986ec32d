"""The user's map of names, and the map that an alignment found, as TOML.

A ``[names]`` table from names of the first side to names of the second. One ``*`` on both sides stands for the same
text: ``"encoder.*" = "enc.*"``.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Final

from clew.errors import UsageError, suggest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from clew.compare.align import Alignment

_STEP: Final = 'write a table [names] with lines such as "encoder.0" = "enc.first"'


def read_map(path: Path) -> dict[str, str]:
    """Return the names of a map file as they are written there."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"the map cannot be read: {error}", where=str(path), next_step=_STEP) from None
    names = content.get("names")
    if not isinstance(names, dict) or not all(isinstance(value, str) for value in names.values()):
        raise UsageError("the map has no table [names] of texts", where=str(path), next_step=_STEP)
    return dict(names)


def expand_map(
    names: Mapping[str, str], a: Collection[str], b: Collection[str], *, where: str = ""
) -> dict[str, str]:
    """Return the map with its stars filled in; a name that neither side has, or two for one, is an error."""
    known = set(b)
    pairs: dict[str, str] = {}
    for first, second in names.items():
        for name in _fill(first, a, where=where):
            partner = second.replace("*", _star_text(first, name)) if "*" in first else second
            if partner in known:
                pairs[name] = partner
            elif "*" not in first:
                raise _unknown(second, b, "second", where)
    _check_unique(pairs, where)
    return pairs


def _fill(pattern: str, names: Collection[str], *, where: str) -> list[str]:
    if pattern.count("*") > 1:
        raise UsageError(f"'{pattern}' has more than one star", where=where, next_step=_STEP)
    if "*" not in pattern:
        if pattern not in names:
            raise _unknown(pattern, names, "first", where)
        return [pattern]
    head, tail = pattern.split("*")
    found = [
        name
        for name in names
        if len(name) >= len(pattern) - 1 and name.startswith(head) and name.endswith(tail)
    ]
    if not found:
        raise _unknown(pattern, names, "first", where)
    return found


def _star_text(pattern: str, name: str) -> str:
    head, tail = pattern.split("*")
    return name[len(head) : len(name) - len(tail)]


def _unknown(name: str, names: Iterable[str], side: str, where: str) -> UsageError:
    return UsageError(
        f"the {side} side has no site '{name}'",
        where=where,
        next_step=suggest(name, names) or "--save-map writes the names of both sides",
    )


def _check_unique(pairs: Mapping[str, str], where: str) -> None:
    owners: dict[str, str] = {}
    for first, second in pairs.items():
        if second in owners:
            raise UsageError(f"'{owners[second]}' and '{first}' are both mapped to '{second}'", where=where)
        owners[second] = first


def format_map(alignment: Alignment) -> str:
    """Return an alignment as a map file: pairs with how they were found, and as comments what has no partner."""
    lines = ["# Names of the first side and of the second. Edit, and give to clew diff --map.", "[names]"]
    for pair in alignment.pairs:
        note = f"  # {pair.how}" + (", transposed" if pair.is_transposed else "")
        lines.append(f"{_quote(pair.a)} = {_quote(pair.b)}{note}")
    lines += [
        f"# fused: {', '.join(map(_quote, fused.parts))} and {_quote(fused.whole)}"
        for fused in alignment.fused
    ]
    lines += [f"# only in the first: {_quote(name)}" for name in alignment.only_a]
    lines += [f"# only in the second: {_quote(name)}" for name in alignment.only_b]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    """Return a TOML string; JSON's differ in one character only."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
