"""Weights that start alike, do not load, or are saved from another moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from clew.doctor.loop_words import list_some, said_at
from clew.doctor.rule import Found, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import Case

_STALE: Final = {
    "before its step": "the checkpoint{at} is saved after backward and before the optimizer's step: it lacks the "
    "update of the step it is named after; save after optimizer.step()",
    "an earlier state": "the weights saved{at} are those of {behind} steps before: save model.state_dict() itself, "
    "after the step",
    "not a copy": "the state_dict kept at step {since} shares its memory with the model and has changed with it: keep "
    "copy.deepcopy(model.state_dict())",
    "its own tensors": "the weights loaded{at} are the model's own tensors, kept without a copy, so nothing changes: "
    "keep {{name: p.detach().clone() for name, p in model.named_parameters()}}",
}


@rule(
    "M13",
    "symmetric-weights",
    severity="error",
    watches="the rows of every weight matrix and of its gradient, after the first steps",
    threshold="all rows equal to a hundred-thousandth, in 2 steps; or several matrices of zeros that get no gradient",
    silent="heads and adapters that start at zero differ after one step; random biases part constant weights",
    hint="initialise weights with random numbers",
    needs=("probe:weights", "optimizer"),
    explains=("V02", "M20", "N08", "M11", "D06", "O09", "O11", "M21", "M12"),
)
def symmetric_weights(case: Case) -> Iterator[Found]:
    """All units of a layer are the same and stay the same."""
    for note in case.noted("equal-rows"):
        names = note["weights"] or ["a weight"]
        yield Found(
            max(int(note["step"]) - 1, 0),
            site=names[0],
            evidence={
                "weights": note["count"],
                "of": note["of"],
                "rows": note["rows"],
                "value": note["value"],
            },
            source=note["made"],
            hint=f"the {note['rows']} units of {list_some(names, note['count'])} started alike and learn the same: use "
            "nn.init.kaiming_uniform_ or xavier_uniform_, not a constant",
        )
        return


@rule(
    "M14",
    "checkpoint-not-loaded",
    severity="error",
    watches="names that a checkpoint has and names that a model asks for",
    threshold="9 of 10 parameters were not in it, and 9 of 10 of its names were not asked for",
    silent="a new head is a small share; adapters use all that their checkpoint has",
    hint="compare the names in the checkpoint with model.state_dict().keys()",
    needs=("probe:checkpoint",),
    explains=("L11", "V02"),
)
def checkpoint_not_loaded(case: Case) -> Iterator[Found]:
    """The checkpoint was read but nothing of it came into the model."""
    for note in case.noted("not-loaded"):
        found, asked = ", ".join(note["unexpected"][:2]), ", ".join(note["expected"][:2])
        reason = f"it has {found}, the model asks for {asked}" if found else "no name of it fits the model"
        yield Found(
            int(note["step"]),
            evidence={"parameters_missing": note["missing"], "of": note["of"]},
            source=note["source"],
            hint=f"nothing was loaded{said_at(note['source'])}: {reason}; {_tell_names(note)}, and use strict=True",
        )
        return


def _tell_names(note: dict[str, Any]) -> str:
    """Return what to do about names: weights have a dot in theirs, what lies around them in a checkpoint has none."""
    names = note["unexpected"]
    if names and not any("." in name for name in names) and any("." in name for name in note["expected"]):
        inner = next(
            (name for name in names if "model" in name or "state" in name or "net" in name), names[0]
        )
        return f'the weights are inside: load checkpoint["{inner}"]'
    return "strip or add the prefix"


@rule(
    "P05",
    "stale-checkpoint",
    severity="warning",
    watches="weights that are saved, and those that the model holds or has held after each step",
    threshold="exactly those of an earlier step, a kept state that has changed with the model, or 2 saved between "
    "backward and step",
    silent="what was evaluated before the step is saved before it; averages are those of no step; copies "
    "from an evaluation or the lowest loss are kept on purpose",
    hint="save model.state_dict() after the step; keep copies with copy.deepcopy",
    needs=("probe:checkpoint", "optimizer"),
)
def stale_checkpoint(case: Case) -> Iterator[Found]:
    """A checkpoint holds other weights than it should."""
    for note in case.noted("stale-checkpoint"):
        yield Found(
            int(note["step"]),
            evidence={"problem": note["problem"]}
            | ({"steps_behind": note["behind"]} if note["behind"] is not None else {}),
            source=note["source"],
            hint=_STALE[note["problem"]].format(
                at=said_at(note["source"]), behind=note["behind"], since=note["from"]
            ),
        )
        return
