"""Loss scaling, half precision, and settings that are meant for debugging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from clew.doctor.loop_words import said_at
from clew.doctor.rule import Found, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import Case

_PROBLEMS: Final = {
    "step": "{optimizer}.step(){at} takes gradients still multiplied by {scale:g}: call scaler.step({optimizer})",
    "clip": "the gradients clipped{at} are still multiplied by {scale:g}: call scaler.unscale_(optimizer) before",
    "cut": "the gradients were cut off at a value before scaler.step(){at}, still multiplied by {scale:g}: call "
    "scaler.unscale_({optimizer}) before clipping",
    "clipped": "the gradients were clipped by hand before scaler.step(){at}, still multiplied by {scale:g}: call "
    "scaler.unscale_({optimizer}) before",
    "unscaled loss": "scaler.step(){at} divides gradients by {scale:g} that were never multiplied: call "
    "scaler.scale(loss).backward()",
}
_RAISED: Final = (
    "already been called on this optimizer since the last update",
    "already been called since the last update",
    "is being called after step()",
    "No inf checks were recorded prior to update",
)
_SLOW_STEPS: Final = 20


@rule(
    "N05",
    "scaler-misuse",
    severity="error",
    watches="a GradScaler between the loss, the clipping and the step",
    threshold="a step or a clipping of gradients that are still scaled, an unscaling of ones that never were; 2 times",
    silent="follows the state of the scaler itself; a scale of 1 and a disabled scaler change nothing",
    hint="scale the loss, unscale_ before clipping, scaler.step, scaler.update",
    needs=("probe:precision", "optimizer"),
    explains=("O08", "O09", "O10", "O11", "O12", "N0*", "V02", "V03", "D06", "M21", "M11", "M20"),
)
def scaler_misuse(case: Case) -> Iterator[Found]:
    """Gradients are used with the scale of the loss still in them."""
    notes = case.noted("scaler-misuse")
    for problem, words in _PROBLEMS.items():
        found = [note for note in notes if note["problem"] == problem]
        if found and found[-1]["count"] >= 2:
            note = found[0]
            name, at = note.get("optimizer", "optimizer"), said_at(note["source"])
            yield Found(
                int(note["step"]),
                evidence={"problem": problem, "scale": note["scale"], "times": found[-1]["count"]},
                source=note["source"],
                hint=words.format(optimizer=name, at=at, scale=note["scale"]),
            )
            return
    for note in case.noted("error"):
        if any(words in note["message"] for words in _RAISED):
            yield Found(
                int(note["step"]),
                evidence={"error": note["message"][:160]},
                source=note["source"],
                hint="call scaler.update() once at the end of every step, unscale_ at most once before it",
            )
            return


@rule(
    "N10",
    "half-precision-adam-eps",
    severity="error",
    watches="the type of the weights and eps of Adam and its like",
    threshold="float16 weights and eps below 6e-8, which is zero in float16",
    silent="bfloat16 and float32 hold it",
    hint="keep float32 weights and use autocast, or set eps=1e-4",
    needs=("probe:precision", "optimizer"),
    explains=("N0*", "O08", "O10", "V02"),
)
def half_precision_adam_eps(case: Case) -> Iterator[Found]:
    """Adam trains float16 weights with an eps that is zero in float16."""
    for note in case.noted("half-adam"):
        yield Found(
            int(note["step"]),
            evidence={"eps": note["eps"], "float16_parameters": note["parameters"]},
            source=note["made"],
            hint=f"{note['optimizer']}, made{said_at(note['made'])}, divides by a root plus eps={note['eps']:g}, 0 in "
            "float16: keep the weights in float32 and use autocast, or set eps=1e-4",
        )
        return


@rule(
    "T05",
    "slow-debug-setting",
    severity="warning",
    watches="anomaly mode, and weights in float64 that nobody made the default",
    threshold="on in 20 backward passes, or 20 steps",
    silent="programs that compute in float64 by default mean it",
    hint="switch it off for the training",
    needs=("probe:precision", "steps:20"),
)
def slow_debug_setting(case: Case) -> Iterator[Found]:
    """A setting for debugging is left on and slows the training down."""
    for note in case.noted("slow-setting"):
        is_anomaly = note["setting"] == "anomaly mode"
        change = (
            "torch.autograd.set_detect_anomaly(True) makes every operation keep its stack: take it out"
            if is_anomaly
            else "float64 halves the speed or worse: call model.float() and convert the data (numpy gives float64)"
        )
        yield Found(
            int(note["step"]),
            evidence={"setting": note["setting"]},
            source=note.get("source", ""),
            hint=change,
        )
        return
