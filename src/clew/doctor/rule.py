"""What a rule is, and how rules come in: built-in ones, those of other packages, and the user's own.

A rule is a function from a case (everything known of a run so far) to what it found:

    @clew.rule("ACME1", "loss-too-round", severity="warning", needs=("scalar:loss",))
    def loss_too_round(case):
        '''The loss is a whole number.'''
        value = case.scalars["loss"].values[-1]
        if value == round(value):
            yield clew.Found(step=case.step, evidence={"loss": value}, hint="who rounds the loss?")

``needs`` says what must be there before the rule can judge; what is missing is told, not guessed. The words:
``kind:grad`` rows of that kind, ``scalar:loss`` a number, ``note:loss-head`` a note, ``probe:loop`` the probe that
makes notes, ``batches``, ``hashes``, ``optimizer`` an optimizer that stepped, ``steps:10`` so many steps,
``ranks:2`` so many ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from clew.errors import UsageError, suggest
from clew.model.finding import SEVERITIES, Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from clew.doctor.case import Case

    Check = Callable[[Case], Iterable["Found"]]

SCOPES: Final = ("rank", "run")
NEEDS: Final = (
    "kind", "scalar", "note", "probe", "batches", "hashes", "optimizer", "steps", "ranks"
)  # fmt: skip
"""The words ``needs`` may begin with."""


@dataclass(frozen=True, slots=True)
class Found:
    """One sign of the illness: where and when it began, the numbers, the user's line, what to change.

    ``title``, ``hint`` and ``severity`` are the rule's own unless given here. A rule tells of one fault once: give
    different ``key``s only for faults that have to be mended one by one.
    """

    step: int
    site: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    title: str = ""
    hint: str = ""
    severity: str = ""
    key: str = ""


class NotJudged(Exception):
    """Raised by a rule that cannot judge this run, with the reason in words."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A named illness, how it is recognised, and why healthy trainings do not have it.

    ``until``: after so many steps the rule need not look again, it judges the beginning of a run; 0 for always.
    ``explains`` lists the ids (``N*`` is a pattern) of findings that are mere consequences of this one. A rule of
    scope ``run`` sees all ranks, as ``case.peers``.
    """

    id: str
    name: str
    severity: str
    check: Check
    title: str
    watches: str = ""
    threshold: str = ""
    silent: str = ""
    hint: str = ""
    needs: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()
    scope: str = "rank"
    until: int = 0

    def make_finding(self, found: Found, *, rank: int) -> Finding:
        """Return what was found in the form that leaves the doctor."""
        return Finding(
            id=self.id,
            rule=self.name,
            severity=found.severity or self.severity,
            step=found.step,
            title=found.title or self.title,
            site=found.site,
            rank=rank,
            evidence=found.evidence,
            source=found.source,
            hint=found.hint or self.hint,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what ``clew rules`` shows."""
        return {
            "id": self.id,
            "rule": self.name,
            "severity": self.severity,
            "title": self.title,
            "watches": self.watches,
            "threshold": self.threshold,
            "silent": self.silent,
            "hint": self.hint,
            "needs": list(self.needs),
            "explains": list(self.explains),
        }


REGISTRY: Final[dict[str, Rule]] = {}
"""Every rule that came in, by id, in the order it came."""


def rule(
    id: str,
    name: str,
    *,
    severity: str,
    title: str = "",
    watches: str = "",
    threshold: str = "",
    silent: str = "",
    hint: str = "",
    needs: tuple[str, ...] = (),
    explains: tuple[str, ...] = (),
    scope: str = "rank",
    until: int = 0,
) -> Callable[[Check], Check]:
    """Make a function a rule of the doctor; the first line of its docstring is the title unless one is given."""
    _check_words(severity, needs, scope)

    def register(check: Check) -> Check:
        known = REGISTRY.get(id)
        if known is not None and known.check.__module__ != check.__module__:
            raise UsageError(
                f"there is a rule {id} already: '{known.name}'",
                where=f"@clew.rule on {check.__name__}",
                next_step="give your rule an id of its own",
            )
        words = title or _as_title((check.__doc__ or name).strip().splitlines()[0])
        REGISTRY[id] = Rule(
            id=id, name=name, severity=severity, check=check, title=words, watches=watches, threshold=threshold,
            silent=silent, hint=hint, needs=tuple(needs), explains=tuple(explains), scope=scope, until=until,
        )  # fmt: skip
        return check

    return register


def _check_words(severity: str, needs: tuple[str, ...], scope: str) -> None:
    words = [(severity, SEVERITIES, "severity"), (scope, SCOPES, "scope")]
    words += [(need.partition(":")[0], NEEDS, "need") for need in needs]
    for word, known, what in words:
        if word not in known:
            raise UsageError(
                f"'{word}' is no {what}",
                where="@clew.rule",
                next_step=suggest(word, known) or f"known: {', '.join(known)}",
            )


def _as_title(sentence: str) -> str:
    """Return a sentence as it stands after a colon; a name such as GradScaler keeps its letters."""
    first = sentence.split(" ", 1)[0]
    begins = (
        sentence if any(letter.isupper() for letter in first[1:]) else sentence[:1].lower() + sentence[1:]
    )
    return begins.rstrip(".")
