"""Activations that no longer carry anything: units that never fire, saturation, equal outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clew.doctor.rule import Found, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import Case


def _latest(case: Case, forms: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the newest block of batches of each activation, in the order they first ran."""
    newest: dict[str, dict[str, Any]] = {}
    for note in case.noted("activation"):
        if note["form"] in forms:
            newest[note["site"]] = note
    return list(newest.values())


@rule(
    "M11",
    "dead-relu",
    severity="error",
    watches="outputs of ReLU, module or function, over 10 batches",
    threshold="every unit zero for every sample (error), over 90 % of the units (warning)",
    silent="healthy layers have up to 28 % such units",
    hint="lower the learning rate, look at the bias and the scale of the initialisation, or use LeakyReLU or GELU",
    needs=("probe:stats", "steps:10"),
    explains=("N08", "O09", "M20", "V02", "D06", "M21", "O11"),
)
def dead_relu(case: Case) -> Iterator[Found]:
    """A ReLU never fires."""
    worst: dict[str, Any] | None = None
    for note in _latest(case, ("relu",)):
        if note["units"] < 4 or note["samples"] < 32 or not _is_trained(case, note["site"]):
            continue
        share = note["dead"] / note["units"]
        if share > 0.9 and (worst is None or share > worst["dead"] / worst["units"]):
            worst = note
    if worst is None:
        return
    is_dead = worst["dead"] == worst["units"]
    yield Found(
        max(int(worst["step"]) - int(worst["batches"]) + 1, 0),
        site=worst["site"],
        severity="error" if is_dead else "warning",
        title="" if is_dead else "most units of a ReLU never fire",
        evidence={name: worst[name] for name in ("dead", "units", "batches", "samples")},
    )


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
    threshold="over 90 % of the values within 0.01 of an end, in the median batch",
    silent="healthy layers have up to 11 %; gates and output layers are not looked at",
    hint="scale the initialisation or the input down, or put a normalisation layer before the activation",
    needs=("probe:stats", "steps:10"),
    explains=("L11", "N08", "V02", "D06", "O09"),
)
def saturated_activation(case: Case) -> Iterator[Found]:
    """A hidden sigmoid or tanh is saturated."""
    found = [note for note in _latest(case, ("sigmoid", "tanh")) if note["saturated"] > 0.9]
    if found:
        worst = max(found, key=lambda note: float(note["saturated"]))
        yield Found(
            max(int(worst["step"]) - int(worst["batches"]) + 1, 0),
            site=worst["site"],
            evidence={
                "saturated_share": worst["saturated"],
                "form": worst["form"],
                "batches": worst["batches"],
            },
        )


@rule(
    "M20",
    "output-collapse",
    severity="warning",
    watches="the outputs of a model for different inputs of a step",
    threshold="they agree to 1e-4 in 10 recorded steps in a row",
    silent="a head that starts at zero differs after one step",
    hint="the outputs carry nothing of the inputs: look for dead or saturated layers and a collapsed target",
    needs=("probe:stats", "steps:10"),
    explains=("V02", "D06", "O09", "N08"),
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
