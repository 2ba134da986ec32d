"""Activations that no longer carry anything: units that never fire, saturation, equal outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from clew.doctor.measure import round_number
from clew.doctor.rule import Found, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import Case


_MANY_SAMPLES: Final = 256
_OUTPUT: Final = (
    "the model ends in a ReLU, so it cannot give a negative number, and what it gives now is 0 for every sample: take "
    "the ReLU out of the last layer"
)

_FROM_START: Final = (
    "it is so from the first step on: look at the bias and the scale that the layer before it starts with, and at the "
    "sign of what it is given; or use LeakyReLU or GELU"
)
_DIED: Final = "it has died at about step {step}: lower the learning rate, or use LeakyReLU or GELU"


def _streaks(
    case: Case, forms: tuple[str, ...], share: Any, *, above: float = 0.9
) -> list[tuple[dict[str, Any], int]]:
    """Return, for each activation that is ill now, its newest block of batches and the step since when it is."""
    streaks: dict[tuple[str, int, int], tuple[dict[str, Any], int]] = {}
    for note in case.noted("activation"):
        if note["form"] not in forms:
            continue
        key = (note["site"], int(note["units"]), int(note.get("turn", 0)))
        if share(note) <= above:
            streaks.pop(key, None)
            continue
        began = max(int(note["step"]) - int(note["batches"]) + 1, 0)
        streaks[key] = (note, streaks.get(key, (note, began))[1])
    return list(streaks.values())


@rule(
    "M11",
    "dead-relu",
    severity="error",
    watches="outputs of ReLU, module or function, over 10 batches",
    threshold="every unit zero for every sample (error), over 90 % of the units (warning)",
    silent="healthy layers have up to 28 % such units",
    hint="lower the learning rate, look at the bias and the scale of the initialisation, or use LeakyReLU or GELU",
    needs=("probe:stats", "steps:10"),
    explains=("N08", "L08", "O09", "M20", "V02", "D06", "M21", "O11"),
)
def dead_relu(case: Case) -> Iterator[Found]:
    """A ReLU never fires."""
    found = [
        (note, began)
        for note, began in _streaks(case, ("relu",), _dead_share)
        if note["samples"] >= 32 and _is_trained(case, note["site"])
    ]
    if not found:
        return
    note, began = max(found, key=lambda each: _dead_share(each[0]))
    is_dead = note["dead"] == note["units"]
    yield Found(
        began,
        site=note["site"],
        severity="error" if is_dead else "warning",
        title="" if is_dead else "most units of a ReLU never fire",
        evidence={name: note[name] for name in ("dead", "units", "batches", "samples")},
        hint=_OUTPUT if note.get("is_output") else _FROM_START if began == 0 else _DIED.format(step=began),
    )


def _dead_share(note: dict[str, Any]) -> float:
    """Return the share of units that never fired; few units count only when all are dead over many samples."""
    is_enough = note["units"] >= 4 or (note["dead"] == note["units"] and note["samples"] >= _MANY_SAMPLES)
    return float(note["dead"]) / note["units"] if note["units"] and is_enough else 0.0


def _is_trained(case: Case, name: str) -> bool:
    """Return whether a site is part of a model that learns: a hinge inside a loss may rest at zero."""
    site = case.find_site(name.removesuffix(" (input)"))
    if site is None or name.endswith(" (input)"):
        return True
    return any(each.trainable and each.root == site.root for each in case.sites.values())


@rule(
    "M12",
    "saturated-activation",
    severity="warning",
    watches="sigmoid and tanh that feed another layer, over 10 batches",
    threshold="over 60 % of the values within 0.01 of an end, in the median batch: most units pass no gradient",
    silent="healthy layers have up to 11 %; gates and output layers are not looked at",
    hint="scale the initialisation or the input down, or put a normalisation layer before the activation",
    needs=("probe:stats", "steps:10"),
    explains=("L11", "N08", "L08", "V02", "D06", "O09"),
)
def saturated_activation(case: Case) -> Iterator[Found]:
    """A hidden sigmoid or tanh is saturated."""
    found = _streaks(case, ("sigmoid", "tanh"), _saturated_share, above=0.6)
    if found:
        note, began = max(found, key=lambda each: _saturated_share(each[0]))
        yield Found(
            began,
            site=note["site"],
            evidence={"saturated_share": note["saturated"], "form": note["form"], "batches": note["batches"]},
        )


def _saturated_share(note: dict[str, Any]) -> float:
    return float(note["saturated"])


@rule(
    "M20",
    "output-collapse",
    severity="warning",
    watches="the outputs of a model for different inputs of a step",
    threshold="they agree to 1e-4 in 10 recorded steps in a row; unit vectors without targets come within 6 degrees",
    silent="a head that starts at zero differs after one step; codes that start close together are pulled apart",
    hint="the outputs carry nothing of the inputs: look for dead or saturated layers, a softmax or normalisation over "
    "a single number, and a collapsed target",
    needs=("probe:stats", "steps:10"),
    explains=("V02", "D06", "O09"),
)
def output_collapse(case: Case) -> Iterator[Found]:
    """The model gives the same output for every input."""
    for note in case.noted("equal-outputs"):
        if not _is_trained(case, note["site"]):
            continue
        yield Found(
            int(note["since"]),
            site=note["site"],
            evidence={"spread": note["spread"], "largest": note["largest"], "steps": note["steps"]},
        )
        return
    if any(note["terms"] for note in case.noted("loss-head")):
        return  # targets may all point the same way
    for note in case.noted("one-direction"):
        yield Found(
            int(note["step"]),
            site=note["site"],
            title="the outputs for all inputs have come to point in one direction",
            evidence={
                "length_of_the_mean_output": round_number(note["mean_length"]),
                "samples": note["samples"],
            },
            hint="a loss that only pulls outputs together is lowest when they are all the same: give it negatives, a "
            "term for their variance, or a predictor and detach() on the other side",
        )
        return
