"""Runs the rules over a case, keeps each fault once, and puts consequences under their cause."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

import numpy as np

from clew.doctor.catalogue import load_rules
from clew.doctor.rule import NotJudged, Rule
from clew.logs import room_log
from clew.model.finding import SEVERITIES, Diagnosis, Finding, NotChecked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from clew.doctor.case import Case
    from clew.model.record import StepRecord, Stretch

_log = room_log("doctor")

_DETECTION_STEPS: Final = 20
"""A cause may need this many steps more than its consequence to be recognised; later it is no cause of it."""

_FIRST_RECORDED: Final = 20
"""Recorded steps that rules about the beginning of a run look at."""

_FIRST_LOOKS: Final = (3, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1000)
_LOOK_EVERY: Final = 500


def _count_looks(steps: int) -> int:
    """Return how many looks are planned until so many steps are there."""
    return bisect_right(_FIRST_LOOKS, steps) + max(0, steps // _LOOK_EVERY - _FIRST_LOOKS[-1] // _LOOK_EVERY)


class Looks:
    """Says when the rules look: often at the start, then every few hundred steps, and at the first bad value."""

    def __init__(self) -> None:
        self.was_alarmed = False

    def is_due(self, case: Case, record: StepRecord) -> bool:
        """Return whether to look now that a case has taken a record."""
        return self._is_alarm(case, record) or _count_looks(case.steps) > _count_looks(case.steps - 1)

    def cut(self, case: Case, stretch: Stretch) -> Iterator[Stretch]:
        """Yield a stretch in pieces that end where a look is planned, for a case that takes each at once."""
        planned = _count_looks(case.steps + stretch.steps) > _count_looks(case.steps)
        for step in range(stretch.first, stretch.last) if planned else ():
            steps = case.steps + step - stretch.first + 1
            if _count_looks(steps) > _count_looks(steps - 1):
                piece, rest = stretch.split(step + 1)
                yield piece
                yield from self.cut(case, rest)
                return
        yield stretch

    def is_due_after(self, case: Case, stretch: Stretch) -> bool:
        """Return whether to look now that a case has taken a stretch."""
        losses = [values for (name, _), (_, values) in stretch.columns.items() if name == "loss"]
        if not self.was_alarmed and not all(np.isfinite(values).all() for values in losses):
            self.was_alarmed = True
            return True
        return _count_looks(case.steps) > _count_looks(case.steps - stretch.steps)

    def _is_alarm(self, case: Case, record: StepRecord) -> bool:
        if self.was_alarmed:
            return False
        self.was_alarmed = bool(case.bad)
        for name, value, _ in record.scalars:
            if name == "loss" and not math.isfinite(value):
                self.was_alarmed = True
        return self.was_alarmed


class Doctor:
    """Looks at one or several cases again and again, and remembers what it has found."""

    def __init__(
        self,
        rules: Sequence[Rule] | None = None,
        *,
        on_fault: Callable[[Rule, Exception], None] | None = None,
    ) -> None:
        self.rules = list(load_rules()) if rules is None else list(rules)
        self._on_fault = on_fault
        self._found: dict[tuple[str, int, str], Finding] = {}
        self._done: set[tuple[str, int]] = set()
        self._excused: dict[tuple[str, int], str] = {}
        self._looked: set[str] = set()
        self._broken: dict[str, str] = {}

    @property
    def findings(self) -> list[Finding]:
        """Everything found so far, in the order it was found, consequences included."""
        return list(self._found.values())

    def look(self, case: Case) -> list[Finding]:
        """Run every rule that has not spoken yet over a case; return what is new."""
        fresh: list[Finding] = []
        for rule in self.rules:
            if rule.id in self._broken or (rule.id, case.rank) in self._done:
                continue
            if rule.scope == "run" and (not case.peers or case.peers[0] is not case):
                continue
            fresh += self._apply(rule, case)
            if rule.until and case.steps >= rule.until and case.recorded >= min(rule.until, _FIRST_RECORDED):
                self._done.add((rule.id, case.rank))
        return fresh

    def _apply(self, rule: Rule, case: Case) -> list[Finding]:
        key = (rule.id, case.rank)
        missing = next((reason for need in rule.needs if (reason := find_missing(case, need))), "")
        if missing:
            self._excused[key] = missing
            return []
        try:
            found = list(rule.check(case))
        except NotJudged as reason:
            self._excused[key] = str(reason)
            return []
        except Exception as error:  # noqa: BLE001 - a broken rule is reported once and skipped
            _log.warning("rule %s failed", rule.id, exc_info=error)
            self._broken[rule.id] = f"the rule failed: {type(error).__name__}: {error}"
            if self._on_fault is not None:
                self._on_fault(rule, error)
            return []
        self._excused.pop(key, None)
        self._looked.add(rule.id)
        fresh = []
        for one in found:
            known = (rule.id, case.rank, one.key)
            if known not in self._found:
                self._found[known] = rule.make_finding(one, rank=case.rank)
                fresh.append(self._found[known])
                _log.info("rule %s: %s", rule.id, self._found[known].title)
            if not one.key:
                self._done.add(key)
        return fresh

    def diagnose(self) -> Diagnosis:
        """Return the verdict so far: causes first, each with its consequences, and what could not be checked."""
        not_checked = [NotChecked(id, why) for id, why in self._broken.items()]
        for rule in self.rules:
            if rule.id in self._looked or rule.id in self._broken:
                continue
            reasons = [why for (id, _), why in self._excused.items() if id == rule.id]
            why = reasons[0] if reasons else _unseen_reason(rule)
            not_checked.append(NotChecked(rule.id, why))
        return Diagnosis(
            findings=tuple(fold(join_ranks(self.findings), self.rules)),
            checked=tuple(rule.id for rule in self.rules if rule.id in self._looked),
            not_checked=tuple(not_checked),
        )


def _unseen_reason(rule: Rule) -> str:
    return "the run has one rank" if rule.scope == "run" else "nothing was recorded"


def find_missing(case: Case, need: str) -> str:
    """Return why a rule that needs this cannot judge the case, or nothing."""
    word, _, what = need.partition(":")
    if _PRESENT[word](case, what):
        return ""
    sentence = _UNUSED.get(need, _MISSING[word])
    return sentence.format(what=what, have=case.steps, ranks=len(case.peers) or 1)


_PRESENT: Final[dict[str, Callable[[Case, str], bool]]] = {
    "kind": lambda case, what: what in case.kinds,
    "scalar": lambda case, what: what in case.scalars,
    "note": lambda case, what: what in case.notes,
    "probe": lambda case, what: any(note.get("probe") == what for note in case.notes.get("probe", ())),
    "batches": lambda case, _: len(case.batches) > 0,
    "hashes": lambda case, _: case.has_hashes,
    "optimizer": lambda case, _: "lr" in case.scalars,
    "steps": lambda case, what: case.steps >= int(what),
    "ranks": lambda case, what: len(case.peers) >= int(what),
}

_UNUSED: Final = {
    "scalar:scaler.skipped": "no GradScaler was used",
    "scalar:clip.norm_before": "gradients were not clipped by their norm",
    "scalar:expected_steps": "how many steps were planned is not known",
    "scalar:loss": "no loss was recorded: nothing called backward(), or the kinds that were asked for leave it out",
    "scalar:time.data": "no DataLoader was used",
    "note:compiled": "nothing was compiled",
    "note:label-order": "no class labels were seen in the order of training",
    "note:objective": "the loss is none whose best constant guess is known (classes, two classes, squares)",
    "note:first-input": "no input goes straight into a linear, recurrent or convolutional layer",
}
"""What a rule may need that a training simply does not have, in the words of its author."""

_MISSING: Final = {
    "kind": "no rows of kind '{what}' were recorded",
    "scalar": "no '{what}' was recorded",
    "note": "nothing was noted about '{what}'",
    "probe": "the run was recorded without the probe '{what}'",
    "batches": "no batch was recorded",
    "hashes": "hashes were not recorded",
    "optimizer": "no optimizer was seen to step",
    "steps": "needs {what} steps, the run has {have}",
    "ranks": "needs {what} ranks, there is a record of {ranks}",
}


def join_ranks(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding where several ranks have the same; its evidence names the ranks."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.id, finding.site), []).append(finding)
    return [_join(group) for group in groups.values()]


def _join(group: list[Finding]) -> Finding:
    ranks = sorted({finding.rank for finding in group})
    first = min(group, key=lambda finding: (finding.step, finding.rank))
    return first if len(ranks) == 1 else replace(first, evidence={**first.evidence, "ranks": ranks})


def fold(findings: Sequence[Finding], rules: Sequence[Rule]) -> list[Finding]:
    """Return the causes, worst and earliest first, each with the findings that follow from it."""
    causes = _find_causes(findings, {rule.id: rule.explains for rule in rules})
    members: dict[int, list[Finding]] = {}
    for position, finding in enumerate(findings):
        root = position
        while (above := causes[root]) is not None:
            root = above
        members.setdefault(root, [])
        if root != position:
            members[root].append(finding)
    roots = [
        replace(findings[root], explains=tuple(sorted(below, key=_rank))) for root, below in members.items()
    ]
    return sorted(roots, key=_rank)


def _find_causes(findings: Sequence[Finding], explains: dict[str, tuple[str, ...]]) -> list[int | None]:
    """Return the cause of each finding; where two explain each other, the earlier one stays."""
    causes: list[int | None] = [None] * len(findings)
    order = sorted(range(len(findings)), key=lambda position: findings[position].step)
    for position in reversed(order):
        for other in order:
            if other != position and _explains(findings[other], findings[position], explains):
                above: int | None = other
                while above is not None and above != position:
                    above = causes[above]
                if above is None:
                    causes[position] = other
                    break
    return causes


def _explains(cause: Finding, finding: Finding, explains: dict[str, tuple[str, ...]]) -> bool:
    if cause.id == finding.id or cause.step > finding.step + _DETECTION_STEPS:
        return False
    return any(fnmatchcase(finding.id, pattern) for pattern in explains.get(cause.id, ()))


def _rank(finding: Finding) -> tuple[int, int, str]:
    worst = max(SEVERITIES.index(each.severity) for each in (finding, *finding.explains))
    return -worst, finding.step, finding.id
