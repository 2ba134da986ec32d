"""Names of tensors: which of two files mean the same, and how they fall into groups."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from clew.compare.name import unwrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MAX_GROUPS: Final = 60
_SEPARATOR: Final = re.compile(r"[./]")


def match_names(a: Sequence[str], b: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return which name of ``b`` each name of ``a`` has, and notes on how; equal names first, then unwrapped.

    An unwrapped name counts only when it belongs to one tensor on each side.
    """
    others = set(b)
    names = {name: name for name in a if name in others}
    left = _by_unwrapped(name for name in a if name not in names)
    right = _by_unwrapped(name for name in b if name not in names)
    found = {left[key]: right[key] for key in left if key in right}
    notes = []
    if found:
        first, second = next(iter(found.items()))
        notes.append(f"{len(found)} names match without their wrappers, such as {first} and {second}")
    order = names | found
    return {name: order[name] for name in a if name in order}, notes


def _by_unwrapped(names: Iterable[str]) -> dict[str, str]:
    table: dict[str, str] = {}
    doubtful = set()
    for name in names:
        key = unwrap(name)
        doubtful |= {key} if key in table else set()
        table[key] = name
    return {key: name for key, name in table.items() if key not in doubtful}


def group_of(name: str, depth: int, *, section: str = "model") -> str:
    """Return the first ``depth`` parts of a name, never all of it: the last part is the tensor's own.

    The state of an optimizer is one group.
    """
    if section == "optimizer":
        return name.partition("/")[0]
    parts = _SEPARATOR.split(name)
    return ".".join(parts[: min(depth, max(len(parts) - 1, 1))])


def group_depth(names: Sequence[str]) -> int:
    """Return the smallest depth that tells tensors apart, while the groups still fit on a screen."""
    best = 1
    for depth in range(1, 6):
        groups = {group_of(name, depth) for name in names}
        if len(groups) > _MAX_GROUPS:
            break
        best = depth
        if len(groups) >= 3:
            break
    return best
