"""Targets that a loss cannot use: out of range, all ignored, or the input itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from clew.doctor.loop_loss import find_often
from clew.doctor.rule import Found, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import Case

_OUT_OF_BOUNDS: Final = (
    re.compile(r"Target (?P<value>-?\d+) is out of bounds"),
    re.compile(r"Class values must be (?P<value>smaller than num_classes|non-negative)"),
    re.compile(r"all elements of (?P<value>target) should be between 0 and 1"),
)
_BAD_INDEX: Final = re.compile(
    r"index (?P<value>-?\d+) is out of bounds for dimension (?P<dim>\d+) with size (?P<size>\d+)"
)


@rule(
    "D02",
    "target-out-of-range",
    severity="error",
    watches="the targets of cross-entropy, binary cross-entropy and CTC",
    threshold="a class below 0 or beyond the last one, not ignore_index; a probability outside 0 to 1",
    silent="the loss itself defines what is legal",
    hint="map the labels to 0 … C-1, give the model one output per class, divide masks by 255",
    needs=("probe:loss",),
    explains=("L11", "V02", "V01", "L10", "O08", "N01", "N02", "N03", "D06"),
)
def target_out_of_range(case: Case) -> Iterator[Found]:
    """Targets are outside the range of the loss."""
    for note in case.noted("error"):
        found = _translate(note)
        if found is not None:
            yield found
            return
    wrong = [
        (note, term)
        for note in case.noted("loss-head")
        for term in note["terms"]
        if term["form"] in ("bce", "bce_logits")
        and not 0 <= term.get("lowest", 0) <= term.get("highest", 1) <= 1
    ]
    beyond = find_often(
        case,
        lambda t: (
            t["form"] == "ctc" and not 0 <= t.get("lowest", 0) <= t.get("highest", 0) < t.get("classes", 1)
        ),
    )
    if beyond:
        note, term, times = beyond
        classes = term["classes"]
        evidence = {"lowest_target": term["lowest"], "highest_target": term["highest"], "classes": classes}
        hint = (
            f"CTC labels run from {term['lowest']} to {term['highest']} but the scores have {classes} classes, blank "
            "included: give the model one output more than there are labels"
        )
        yield Found(
            int(note["step"]), evidence={**evidence, "losses": times}, source=note["source"], hint=hint
        )
    elif len(wrong) >= min(2, case.notes["loss-head"].total if wrong else 2):
        note, term = wrong[0]
        yield Found(
            int(note["step"]),
            evidence={
                "lowest_target": term["lowest"],
                "highest_target": term["highest"],
                "losses": len(wrong),
            },
            source=note["source"],
            hint=_advise_binary(term),
        )


def _advise_binary(term: dict[str, Any]) -> str:
    if term["highest"] > 100:
        return "binary cross-entropy takes targets between 0 and 1: divide the mask by 255"
    if term["lowest"] == -1 and term["highest"] <= 1:
        return "binary cross-entropy takes targets between 0 and 1: map -1 and 1 to 0 and 1 with (target + 1) / 2"
    return "binary cross-entropy takes targets between 0 and 1: use cross_entropy for classes, or scale the targets"


def _translate(note: dict[str, Any]) -> Found | None:
    """Return what an exception of torch means in terms of labels, or None for another exception."""
    match = next((found for pattern in _OUT_OF_BOUNDS if (found := pattern.search(note["message"]))), None)
    on_device = "device-side assert" in note["message"] and note.get("function") in (
        "cross_entropy",
        "nll_loss",
    )
    index = _BAD_INDEX.search(note["message"]) if note["after_forward"] else None
    if match is None and index is None and not on_device:
        return None
    evidence: dict[str, Any] = {"error": note["message"].splitlines()[0][:120].rstrip(".")}
    if "target_min" in note:
        evidence.update(lowest_target=note["target_min"], highest_target=note["target_max"])
    classes = note.get("classes") or (int(index["size"]) if index else None)
    if classes:
        evidence["classes"] = classes
    return Found(
        int(note["step"]), evidence=evidence, source=note["source"], hint=_advise_classes(note, classes)
    )


def _advise_classes(note: dict[str, Any], classes: int | None) -> str:
    if note.get("function") == "binary_cross_entropy":
        return _advise_binary({"lowest": note.get("target_min", 0.0), "highest": note.get("target_max", 1.0)})
    if not classes:
        return "map the labels to 0 … C-1, or give the model one output per class"
    if note.get("target_min", 0) < 0:
        return f"labels run from {note['target_min']:.0f}: map them to 0 … {classes - 1}, or set ignore_index"
    if note.get("target_max") == classes:
        return f"labels run to {classes} but the model has {classes} outputs: subtract 1, or add an output"
    return f"map the labels to 0 … {classes - 1}, or give the model one output per class (it has {classes})"


_CLASS_LOSSES: Final = ("nll_loss", "nll_loss2d", "nll_loss_nd", "nll_loss_forward", "cross_entropy")


@rule(
    "D13",
    "all-targets-ignored",
    severity="error",
    watches="how many targets of a cross-entropy are not ignored",
    threshold="none, with the mean taken over them: the loss is NaN",
    silent="a batch with one valid target has a mean",
    hint="leave batches without targets out, and check padding and ignore_index",
    needs=("probe:loss", "scalar:loss"),
    explains=("N*", "V*", "L11", "O11"),
)
def all_targets_ignored(case: Case) -> Iterator[Found]:
    """Every target of a batch is ignored."""
    for note in case.noted("loss-head"):
        for term in note["terms"]:
            if term["form"] == "nll" and term["mean"] and term.get("valid") == 0:
                yield Found(
                    int(note["step"]),
                    evidence={"targets": term["rows"], "valid": 0, "ignore_index": term["ignored"]},
                    source=note["source"],
                    hint=f"all {term['rows']} targets equal ignore_index ({term['ignored']}), so the mean is 0 / 0: "
                    "check the padding, or skip such batches",
                )
                return
    yield from _find_empty_mean(case)


def _find_empty_mean(case: Case) -> Iterator[Found]:
    """Find a replayed loss over classes that made NaN of finite numbers: only a mean over nothing does that."""
    for verdict in case.verdicts:
        given = verdict.get("inputs") or []
        is_finite = bool(given) and not any(each.get("nan") or each.get("inf") for each in given)
        values = [element.get("value") for element in verdict.get("elements") or ()]
        is_nan = any(isinstance(value, float) and value != value for value in values)  # noqa: PLR0124 - NaN
        if verdict["step"] <= case.step and verdict.get("op") in _CLASS_LOSSES and is_finite and is_nan:
            source = verdict.get("source") or {}
            yield Found(
                verdict["step"],
                evidence={"op": verdict["op"], "valid": 0},
                source=f"{source['file']}:{source['line']}" if source.get("file") else "",
                hint="every target of the batch equals ignore_index (or has weight 0), so the mean is 0 / 0: check the "
                "padding, or skip such batches",
            )
            return


_SPREAD: Final = 1.6
"""An output that moves so much further than the others with the token at its own place has it from there."""


@rule(
    "D15",
    "unshifted-lm-targets",
    severity="warning",
    watches="token inputs and the targets of the cross-entropy",
    threshold="equal at more than 98 % of the positions, in 2 losses, and each output knows its own token best",
    silent="next tokens repeat the input at chance level; masked models see a mask where the target is; autoencoders "
    "and copies through another network have every token everywhere",
    hint="shift the targets by one token",
    needs=("probe:loss", "scalar:loss"),
    explains=("M18", "V01"),
)
def unshifted_targets(case: Case) -> Iterator[Found]:
    """A language model is trained to repeat the token it sees."""
    wrong = [
        (note, term)
        for note in case.noted("loss-head")
        for term in note["terms"]
        if term["form"] == "nll" and (term.get("same_as_input") or 0.0) > 0.98 and term["valid"] >= 16
    ]
    asked = case.noted("repeated-tokens")
    spread = asked[-1].get("spread") if asked else None
    if (asked and asked[-1]["is_open"]) or (spread is not None and spread < _SPREAD):
        return
    if len(wrong) >= 2:
        note, term = wrong[0]
        yield Found(
            int(note["step"]),
            evidence={"equal_share": round(term["same_as_input"], 3), "targets": term["valid"]},
            source=note["source"],
            hint="each target is the token at its own position: use inputs[:, :-1] and targets = inputs[:, 1:]",
        )
