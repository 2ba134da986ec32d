"""What the doctor says, as blocks: one callout for each cause, its numbers and consequences, what was not judged."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clew.views.block import Block, Callout, Cell, Heading, KeyValues, Page, Text
from clew.views.number import format_number
from clew.views.source_line import from_here

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from clew.model.finding import Diagnosis, Finding, NotChecked

_IDS_IN_A_LINE = 6
_LEADING = frozenset(("in", "at", "by", "on", "of", "from"))
"""Words that lead to the value that follows them."""

_CALLOUTS = {"info": "note", "warning": "warning", "error": "error"}


def make_page(diagnosis: Diagnosis, *, name: str = "") -> Page:
    """Return the page of a diagnosis."""
    title = f"doctor: {name}" if name else "doctor"
    blocks: list[Block] = [Heading(title, 1)]
    if not diagnosis.findings:
        blocks.append(Text(f"nothing found by {_count(len(diagnosis.checked), 'rule')}", tone="good"))
    for finding in diagnosis.findings:
        blocks += _tell_finding(finding)
    if diagnosis.findings:
        checked = len(diagnosis.checked)
        blocks += [Text(""), Text(f"{_count(checked, 'rule')} looked at this run", tone="quiet")]
    blocks += _tell_unchecked(diagnosis.not_checked)
    return Page(title, tuple(blocks))


def _tell_finding(finding: Finding) -> list[Block]:
    rows = [("where", Cell(_where(finding)))]
    rows += [("line", Cell(from_here(finding.source)))] if finding.source else []
    rows += [("evidence", Cell(say_evidence(finding.evidence)))] if finding.evidence else []
    rows += [("change", Cell(finding.hint))] if finding.hint else []
    for each in finding.explains:
        rows.append(("explains", Cell(f"{each.id} {each.rule} ({_where(each)})", tone="quiet")))
    head = f"{finding.id} {finding.rule}: {finding.title}"
    return [Callout(_CALLOUTS[finding.severity], head), KeyValues(tuple(rows))]


def _where(finding: Finding) -> str:
    place = f"{finding.site}, " if finding.site else ""
    rank = f", rank {finding.rank}" if finding.rank else ""
    return f"{place}step {finding.step}{rank}"


def say_evidence(evidence: dict[str, Any]) -> str:
    """Return the numbers of a finding on one line."""
    told = [_say_one(name.replace("_", " "), value) for name, value in evidence.items()]
    return ("; " if any(", " in each for each in told) else ", ").join(told)


def _say_one(name: str, value: Any) -> str:
    """Return ``units 32``, or ``optimizer: opt`` where words follow words."""
    if isinstance(value, bool):
        return f"{name}: {'yes' if value else 'no'}"
    text = "×".join(map(str, value)) if name == "shape" and isinstance(value, list) else _value(value)
    is_words = isinstance(value, str) and text[:1].isalpha() and name.rpartition(" ")[2] not in _LEADING
    return f"{name}: {text}" if is_words else f"{name} {text}"


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return _value(value[0])
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, (list, tuple)):
        shown = ", ".join(map(_value, value[:6]))
        return f"[{shown}{', …' if len(value) > 6 else ''}]"
    return str(value)


def _tell_unchecked(not_checked: Sequence[NotChecked]) -> list[Block]:
    if not not_checked:
        return []
    reasons: dict[str, list[str]] = {}
    for each in not_checked:
        reasons.setdefault(each.why, []).append(each.id)
    rows = tuple(
        (" ".join(ids[start : start + _IDS_IN_A_LINE]), Cell("" if start else why))
        for why, ids in reasons.items()
        for start in range(0, len(ids), _IDS_IN_A_LINE)
    )
    return [Text(""), Text("not judged", tone="quiet"), KeyValues(rows)]


def say_finding(finding: Finding) -> str:
    """Return a finding for the terminal of a running training: two or three lines."""
    line = f" at {shorten_source(finding.source)}" if finding.source else ""
    lines = [f"clew: {finding.severity} {finding.id} {finding.rule}: {finding.title}"]
    evidence = f": {say_evidence(finding.evidence)}" if finding.evidence else ""
    lines.append(f"        {_where(finding)}{line}{evidence}")
    lines += [f"        change: {finding.hint}"] if finding.hint else []
    return "\n".join(lines)


def shorten_source(source: str) -> str:
    """Return ``train.py:41`` for a long path."""
    path, _, line = source.rpartition(":")
    return f"{Path(path).name}:{line}" if path else source


def summarise(findings: Iterable[Finding]) -> list[str]:
    """Return the lines about findings that close a run: how many, and one line for each."""
    listed = list(findings)
    if not listed:
        return []
    counts = Counter(each.severity for each in listed)
    totals = [_count(counts[severity], severity) for severity in ("error", "warning") if counts[severity]]
    lines = [f"the doctor found {' and '.join(totals)}"] if totals else []
    for each in listed:
        if each.severity == "info":
            continue
        consequences = f" (explains {', '.join(one.id for one in each.explains)})" if each.explains else ""
        lines.append(f"  {each.severity} {each.id} {each.rule}: {_where(each)}{consequences}")
    return lines


def make_rules_page(rules: Sequence[dict[str, Any]]) -> Page:
    """Return the page of all rules: the fault that each finds."""
    rows = tuple(
        (f"{rule['id']:<4} {rule['rule']}", Cell(rule["title"], _RULE_TONES.get(rule["severity"], "plain")))
        for rule in rules
    )
    more = Text("clew rules N01 says when a rule speaks, and why healthy code is safe from it", "quiet")
    return Page("rules", (Heading("rules of the doctor", 1), KeyValues(rows), more))


def make_rule_page(rules: Sequence[dict[str, Any]]) -> Page:
    """Return the page of some rules: what each watches, from where on it speaks, and why healthy code is safe."""
    blocks: list[Block] = []
    for rule in rules:
        told = [("severity", Cell(rule["severity"], tone=_RULE_TONES.get(rule["severity"], "plain")))]
        words = {
            "watches": "watches",
            "speaks when": "threshold",
            "silent because": "silent",
            "change": "hint",
        }
        told += [(word, Cell(rule[key])) for word, key in words.items() if rule.get(key)]
        blocks += [Heading(f"{rule['id']} {rule['rule']}: {rule['title']}", 1), KeyValues(tuple(told))]
    return Page("rules", tuple(blocks))


_RULE_TONES: Final = {"error": "bad", "warning": "warn"}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
