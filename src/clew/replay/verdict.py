"""The answer to why: which operation, on which line, from which values, and what to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from clew.replay.hint import hint_for, hint_for_outside
from clew.replay.locate import Origin, find_origin
from clew.replay.rehearsal import COMPUTED, LEAF
from clew.replay.words import say

if TYPE_CHECKING:
    from clew.replay.lens import Element, Event, OpLens, Value
    from clew.replay.rehearsal import Rehearsal, Symptom


@dataclass(slots=True)
class Verdict:
    """What made the first bad value of a step; the fields are those of ``clew why --json``."""

    found: bool
    step: int
    rank: int = 0
    phase: str = ""
    op: str = ""
    site: str = ""
    source: dict[str, Any] = field(default_factory=lambda: {"file": "", "line": 0, "text": ""})
    elements: list[dict[str, Any]] = field(default_factory=list)
    sample: int | None = None
    inputs: list[dict[str, Any]] = field(default_factory=list)
    symptom: str = ""
    chain: list[dict[str, Any]] = field(default_factory=list)
    replay: str = "none"
    way: str = ""
    hint: str = ""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.found:
            return "; ".join(self.notes) or "nothing was NaN or infinite"
        return f"{say(self.to_json())}; {self.hint}" if self.hint else say(self.to_json())


def judge(rehearsal: Rehearsal, *, step: int, batch_size: int | None, way: str) -> Verdict:
    """Return the verdict on an executed step."""
    symptom = rehearsal.symptom
    if symptom is None:
        return Verdict(False, step, way=way, notes=_explain_failure(rehearsal))
    verdict = Verdict(True, step, symptom=name_symptom(symptom.kind, symptom.name), way=way)
    origin = find_origin(rehearsal.lens, symptom.writer)
    if origin is None:
        _tell_unknown(verdict, symptom)
    elif origin.event is None:
        if origin.outside is not None and origin.outside.role == COMPUTED:
            return Verdict(False, step, way=way, notes=["the bad value was computed before this piece began"])
        _tell_outside(verdict, origin, batch_size)
    else:
        rehearsal.blamed = origin.event
        _tell_event(verdict, rehearsal.lens, origin.event)
        is_after = origin.event.index >= rehearsal.backward_ended >= 0 and origin.event.phase == "forward"
        if symptom.kind == "parameter" and is_after:
            verdict.phase = "optimizer"  # written by hand, or by an optimizer that is none of torch's
        verdict.sample = _sample_of(origin.event, batch_size)
    if origin is not None:
        verdict.chain = [_link(rehearsal.lens, event) for event in origin.chain]
    return verdict


def name_symptom(kind: str, name: str) -> str:
    """Return what showed the fault in words: ``loss``, ``gradient fc.weight``."""
    return kind if name in ("", kind) else f"{kind} {name}"


def _tell_event(verdict: Verdict, lens: OpLens, event: Event) -> None:
    cause = _forward_of(lens, event)
    verdict.phase = event.phase
    verdict.op = cause.op if event.phase == "backward" and not event.is_custom else event.op
    verdict.site = cause.site
    line = event.line if event.is_custom or event.phase != "backward" else cause.line
    if line is not None:
        verdict.source = {"file": line.file, "line": line.number, "text": line.text}
    verdict.elements = _list_elements(event.elements)
    verdict.inputs = [_describe(value) for value in event.inputs]
    verdict.hint = hint_for(verdict.op, event)


def _list_elements(elements: tuple[Element, ...]) -> list[dict[str, Any]]:
    return [
        {"index": list(element.index), "value": element.value, "inputs": list(element.inputs)}
        for element in elements
    ]


def _tell_outside(verdict: Verdict, origin: Origin, batch_size: int | None) -> None:
    """The value came in bad: through the batch, a weight or a buffer."""
    value = origin.outside
    first = origin.chain[0] if origin.chain else None
    role, _, name = (value.role if value is not None else "").partition(" ")
    verdict.phase = "data" if role in ("batch", "") else "parameter"
    verdict.op = first.op if first is not None else ""
    verdict.site = name or (first.site if first is not None else "")
    if first is not None and first.line is not None:
        verdict.source = {"file": first.line.file, "line": first.line.number, "text": first.line.text}
    if value is not None:
        verdict.inputs = [_describe(value)]
    if first is not None:
        verdict.elements = _list_elements(first.arrived)
    if verdict.phase == "data":
        verdict.sample = _sample_on_the_way(origin, batch_size)
    if role == LEAF:
        verdict.site = name or "a tensor that requires grad"
    verdict.hint = hint_for_outside(role or "batch", verdict.site, step=verdict.step)


def _sample_on_the_way(origin: Origin, batch_size: int | None) -> int | None:
    """Return the row of the batch that came in bad: as it came, or in the first result that keeps the rows apart."""
    came, first = origin.outside, origin.chain[0] if origin.chain else None
    if batch_size is None or came is None or first is None:
        return None
    if came.shape[:1] == (batch_size,) and first.arrived:
        return first.arrived[0].index[0]
    for event in origin.chain:
        bad = next(value for value in event.outputs if value.is_bad)
        if bad.shape[:1] == (batch_size,) and event.place:
            return event.place[0]
    return None


def _tell_unknown(verdict: Verdict, symptom: Symptom) -> None:
    """Nothing in this step wrote the bad value: it was there before."""
    verdict.phase = "parameter" if symptom.kind == "parameter" else "forward"
    verdict.site = symptom.name
    verdict.notes.append("the bad value was there before this step began")


def _forward_of(lens: OpLens, event: Event) -> Event:
    return lens.events[event.forward] if event.forward >= 0 else event


def _link(lens: OpLens, event: Event) -> dict[str, Any]:
    cause = _forward_of(lens, event)
    return {
        "op": event.op,
        "phase": event.phase,
        "site": cause.site,
        "line": str(event.line or ""),
        "node": event.node,
    }


def _describe(value: Value) -> dict[str, Any]:
    return {
        "shape": list(value.shape),
        "dtype": value.dtype,
        "min": value.minimum,
        "max": value.maximum,
        "nan": value.nan,
        "inf": value.inf,
        "role": value.role,
    }


def _sample_of(event: Event, batch_size: int | None) -> int | None:
    """Return the row of the batch the first offending element lies in, where the output keeps the batch apart."""
    if not event.elements or batch_size is None or not event.outputs:
        return None
    bad = next(value for value in event.outputs if value.is_bad)
    if not bad.shape or bad.shape[0] != batch_size:
        return None
    return event.elements[0].index[0]


def _explain_failure(rehearsal: Rehearsal) -> list[str]:
    if rehearsal.error is not None:
        return [f"the step could not be executed again: {type(rehearsal.error).__name__}: {rehearsal.error}"]
    return ["the step was executed again and nothing bad showed: something outside it differed"]
