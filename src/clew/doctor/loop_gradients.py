"""Gradients that are used twice, erased before they are used, or not there when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clew.doctor.loop_words import place, said_at
from clew.doctor.rule import Found, NotJudged, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import Case


def _list_of(case: Case, problem: str, *, least: int) -> list[dict[str, Any]]:
    """Return the notes of one problem of the optimizer that has it most, if it had it often enough."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for note in case.noted("gradients"):
        if note["problem"] == problem:
            groups.setdefault((note["optimizer"], note["made"]), []).append(note)
    longest = max(groups.values(), key=len, default=[])
    return longest if longest and longest[-1]["count"] >= least else []


def _found(notes: list[dict[str, Any]], hint: str, **evidence: Any) -> Found:
    first, last = notes[0], notes[-1]
    return Found(
        int(first["step"]),
        evidence={
            "optimizer": first["optimizer"],
            "times": int(last["count"]),
            "of_steps": int(last["steps"]),
            **evidence,
        },
        source=str(first["source"]),
        hint=hint,
    )


@rule(
    "O01",
    "missing-zero-grad",
    severity="error",
    watches="the gradients of an optimizer's parameters between its step and the next backward",
    threshold="gradients that a step has used are added to and used again, at least half of them, in 2 steps",
    silent="accumulation has no step in between; what other losses leave in .grad is cleared before the own step",
    hint="clear the gradients before each backward",
    needs=("probe:gradients", "optimizer"),
    explains=("O08", "O12", "N06", "V03", "V02", "M21", "N01", "N02", "N03", "N07"),
)
def missing_zero_grad(case: Case) -> Iterator[Found]:
    """The gradients of earlier steps are never cleared."""
    notes = _list_of(case, "stale", least=2)
    if notes:
        name = notes[0]["optimizer"]
        hint = (
            f"call {name}.zero_grad() once for each {name}.step(){said_at(notes[0]['source'])}, before the backward: "
            "now every step adds all earlier gradients to its own"
        )
        wrong = f"{notes[-1]['wrong']} of {notes[-1]['followed']}"
        yield _found(notes, hint, gradients_used_again=wrong)


@rule(
    "O02",
    "gradients-erased",
    severity="error",
    watches="gradients between backward and the step of their optimizer",
    threshold="backward gave gradients, all were cleared, the step found none, 2 steps; or only the last of several "
    "equal passes on new data had any left, 3 steps",
    silent="needs all three in this order, with no forward in between; passes of an attack, of another loss or at "
    "other weights are not equal",
    hint="clear gradients before backward or after the step, never between them",
    needs=("probe:gradients",),
    explains=("O11", "O10", "O09", "V02", "D06", "L08", "M03", "M05", "O13"),
)
def gradients_erased(case: Case) -> Iterator[Found]:
    """The gradients are cleared between backward and step."""
    notes = _list_of(case, "erased", least=2)
    raised = [note for note in _list_of(case, "erased", least=1) if note.get("raised")]
    if raised and not notes:
        cleared, name = raised[0]["cleared"], raised[0]["optimizer"]
        hint = (
            f"the gradients are cleared{said_at(cleared)} after backward, so that the scaler finds none: move the "
            f"clearing behind the step of {name} or before the backward"
        )
        yield Found(int(raised[0]["step"]), evidence={"optimizer": name}, source=str(cleared), hint=hint)
        return
    if "lr" not in case.scalars:
        raise NotJudged("no optimizer was seen to step")
    if notes and 2 * notes[-1]["count"] >= notes[-1]["steps"] - 2:
        cleared = next((note["cleared"] for note in notes if note.get("cleared")), "")
        name = notes[0]["optimizer"]
        hint = (
            f"the gradients are cleared{said_at(cleared)} after backward and before {name}.step()"
            f"{said_at(notes[0]['source'])}: move the clearing behind the step or before the backward"
        )
        yield _found(notes, hint, **({"cleared_at": place(cleared)} if cleared else {}))
        return
    thrown = _list_of(case, "discarded", least=3)
    if thrown:
        name, passes = thrown[0]["optimizer"], int(thrown[0]["passes"])
        cleared = thrown[0]["cleared"]
        hint = (
            f"the gradients of {passes - 1} of {passes} backward passes are cleared{said_at(cleared)} before "
            f"{name}.step(){said_at(thrown[0]['source'])} can use them: clear once for each step, after it"
        )
        yield _found(thrown, hint, passes_for_each_step=passes, used=1)


@rule(
    "O03",
    "step-before-backward",
    severity="warning",
    watches="the order of forward, backward and step",
    threshold="the first step comes before any backward, and 2 later ones between a forward and its backward, or at "
    "the same line",
    silent="a single step on nothing, to set up an optimizer, stands elsewhere and steps in the right order follow",
    hint="call backward before step",
    needs=("probe:gradients", "optimizer"),
    explains=("O02", "O11", "V02", "O01", "L08", "M05", "M03"),
)
def step_before_backward(case: Case) -> Iterator[Found]:
    """The optimizer steps before backward has given it gradients."""
    # Torch itself raises at the next backward where the step has changed weights that it needs.
    raised = any("modified by an inplace operation" in note["message"] for note in case.noted("error"))
    early, notes = _list_of(case, "early", least=1), _list_of(case, "delayed", least=1 if raised else 2)
    if early and notes:
        name = notes[0]["optimizer"]
        hint = f"move {name}.step(){said_at(notes[0]['source'])} behind loss.backward()"
        yield _found([early[0], *notes], hint)


@rule(
    "O04",
    "double-step",
    severity="error",
    watches="the gradients of an optimizer at its step",
    threshold="the very gradients of its last step, with no backward in between; 2 times",
    silent="optimizers that evaluate a closure, and gradients written by hand, differ from step to step",
    hint="step once for each backward",
    needs=("probe:gradients", "optimizer"),
    explains=("O08", "V03"),
)
def double_step(case: Case) -> Iterator[Found]:
    """The optimizer steps twice on one gradient."""
    notes = _list_of(case, "repeated", least=2)
    if notes:
        name = notes[0]["optimizer"]
        hint = f"take one of the calls of {name}.step() out; the second one is{said_at(notes[0]['source'])}"
        yield _found(notes, hint)


@rule(
    "O13",
    "clip-sees-no-gradients",
    severity="error",
    watches="what clip_grad_norm_ is given, and the gradients that the step then uses",
    threshold="clipping found no gradient, the step did; 2 times",
    silent="a clip after backward sees the gradients that the step uses",
    hint="clip after backward, and give it a list of parameters",
    needs=("probe:gradients", "optimizer"),
    explains=("O12",),
)
def clip_sees_no_gradients(case: Case) -> Iterator[Found]:
    """Clipping finds no gradients to clip."""
    notes = _list_of(case, "unclipped", least=2)
    if not notes:
        return
    where = said_at(notes[0]["clipped"])
    if notes[0]["given"] and not notes[0].get("held", True):
        name = notes[0]["optimizer"]
        hint = f"the clipping{where} is given parameters that no optimizer trains: give it those of {name}"
    elif notes[0]["given"]:
        hint = f"move the clipping{where} between backward and step: it runs before the gradients are there"
    else:
        hint = f"the clipping{where} is given an iterator that is used up: give it list(model.parameters())"
    found = _found(notes, hint, parameters_given_to_clip=int(notes[0]["given"]))
    yield Found(found.step, evidence=found.evidence, source=str(notes[0]["clipped"]), hint=hint)
