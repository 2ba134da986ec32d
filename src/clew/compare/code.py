"""What the code of two modules says about a difference of their results: what was changed, and of which class it is."""

from __future__ import annotations

import re
from collections import Counter
from difflib import SequenceMatcher
from typing import Final, NamedTuple

_RANDOM: Final = (
    "dropout",
    "drop_path",
    "droppath",
    "stochastic",
    "bernoulli",
    "rand",
    "randn",
    "multinomial",
)
_NARROW: Final = ("bfloat16", "float16", "half", "autocast", "float8")
_NAME: Final = re.compile(r"[A-Za-z_]\w*$")
_OPERATOR: Final = re.compile(r"[-+*/%@&|^<>=!~]+$")
_WIDTH: Final = 4
"""Words shown before and after a change."""


class CodeChange(NamedTuple):
    """The class of a change of code, and what it is, in words."""

    cause: str
    reason: str


def judge_code(a: str, b: str) -> CodeChange | None:
    """Return what the difference of two modules' code, in the words that were recorded, says; None for equal ones."""
    if not a or not b or a == b:
        return None
    first, second = a.split(" "), b.split(" ")
    return CodeChange(_classify(first, second), f"its code is not the same: {_show(first, second)}")


def _classify(a: list[str], b: list[str]) -> str:
    counts = Counter(a), Counter(b)
    changed = [*(counts[0] - counts[1]), *(counts[1] - counts[0])]
    if any(_has(word, _RANDOM) for word in changed):
        return "randomness"
    if any(_has(word, _NARROW) for word in changed):
        return "precision"
    if not changed:
        return "structure"  # the same calls in another order
    if all(_OPERATOR.match(word) for word in changed):
        return "operation"  # the same values, put together otherwise
    names = [[word for word in side if _NAME.match(word)] for side in (a, b)]
    if names[0] == names[1] or _is_value(counts[0], counts[1]) or _is_value(counts[1], counts[0]):
        return "argument"
    return "operation"


def _is_value(a: Counter[str], b: Counter[str]) -> bool:
    """Whether the second has constants where the first has names, and calls neither more nor less."""
    more = list(b - a)
    return a["()"] == b["()"] and bool(more) and not any(_NAME.match(word) for word in more)


def draws(code: str) -> bool:
    """Whether code, in words, draws random numbers."""
    return any(_has(word, _RANDOM) for word in code.split(" "))


def narrows(code: str) -> bool:
    """Whether code, in words, computes in a type of lower precision."""
    return any(_has(word, _NARROW) for word in code.split(" "))


def _has(word: str, parts: tuple[str, ...]) -> bool:
    lowered = word.lower()
    return any(re.search(rf"(^|[^a-z0-9]){part}([^a-z]|$)", lowered) for part in parts)


def _show(a: list[str], b: list[str]) -> str:
    """Return the first change with what stands around it, as it is in a and in b."""
    for tag, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            low = max(0, min(i, k) - _WIDTH)
            before = a[max(low, i - _WIDTH) : i]
            sides = [before + a[i:j] + a[j : j + 1], before + b[k:m] + b[m : m + 1]]
            return " in a, ".join(f"'{' '.join(side[:12])}'" for side in sides) + " in b"
    return "it is longer than was recorded"
