"""A tensor or array in one dense line: form, size, range, and what is wrong with it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from clew.views.number import format_bytes, format_integer, format_number, format_share

if TYPE_CHECKING:
    from clew.model.value import ValueFacts


def value_line(facts: ValueFacts) -> str:
    """Return everything worth knowing of a value in one line; what is wrong ends with an exclamation mark."""
    words = [f"{facts.dtype}[{', '.join(map(str, facts.shape))}]"]
    count = math.prod(facts.shape)
    if facts.entries is not None and facts.stats is not None and count:
        words.append(f"= {_entries(facts)}")
    elif count:
        words.append(
            f"{format_integer(count)} {'value' if count == 1 else 'values'} {format_bytes(facts.bytes)}"
        )
    else:
        words.append("empty")
    parts = [" ".join(words)]
    if facts.stats is not None and count:
        parts += _numbers(facts, facts.stats)
    parts += [facts.note] if facts.note else []
    parts += [facts.kind] if facts.kind not in ("", "tensor") else []
    parts += [facts.device] if facts.device not in ("", "cpu") else []
    parts += [f"grad {facts.grad}".removesuffix(" leaf")] if facts.grad else []
    return " · ".join(parts)


def _entries(facts: ValueFacts) -> str:
    texts = [_entry(each) for each in facts.entries or ()]
    return texts[0] if not facts.shape else f"[{', '.join(texts)}]"


def _entry(value: Any) -> str:
    if isinstance(value, complex):
        return f"{format_number(value.real)}{'-' if value.imag < 0 else '+'}{format_number(abs(value.imag))}j"
    return format_number(value) if isinstance(value, float) else str(value)


def _numbers(facts: ValueFacts, stats: dict[str, float]) -> list[str]:
    parts = []
    if facts.entries is None:
        parts += [_range(facts, stats)]
        if 0 < stats["zero"] < stats["count"] and facts.dtype != "bool":
            parts.append(f"{format_share(stats['zero'] / stats['count'])} zero")
    bad = (("NaN", stats["nan"]), ("inf", stats["pos_inf"]), ("-inf", stats["neg_inf"]))
    marks = [f"{format_integer(number)} {name}!" for name, number in bad if number]
    return [part for part in (*parts, " ".join(marks)) if part]


def _range(facts: ValueFacts, stats: dict[str, float]) -> str:
    if facts.dtype == "bool":
        return f"{format_integer(stats['positive'])} true"
    if stats["zero"] == stats["count"]:
        return "all zero!"
    if math.isnan(stats["min"]):
        return "nothing finite!"
    is_even = stats["min"] == stats["max"] and not (stats["nan"] or stats["pos_inf"] or stats["neg_inf"])
    if is_even:
        return f"every one {format_number(stats['min'])}"
    shown = ("min", "max", "mean", "std")
    return " ".join(f"{name} {format_number(stats[name])}" for name in shown)
