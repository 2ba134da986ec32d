"""Parameters that get no gradient, and gradients that no optimizer uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clew.doctor.gradient import find_flat_start
from clew.doctor.loop_words import list_some, said_at
from clew.doctor.rule import Found, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import Case

_FEWEST_STEPS = 5
_UNTRAINED = ("V02", "D06", "O11", "O09")


@rule(
    "M01",
    "parameter-not-optimized",
    severity="error",
    watches="parameters with gradients, and the parameters that all living optimizers hold together",
    threshold="a non-zero gradient in 3 steps, in no optimizer, and unchanged by anybody",
    silent="frozen weights have no gradients; weights updated by hand change; two optimizers count together",
    hint="give the parameters to an optimizer",
    needs=("probe:coverage", "optimizer"),
    explains=("M03", *_UNTRAINED),
)
def parameter_not_optimized(case: Case) -> Iterator[Found]:
    """Parameters get gradients but are in no optimizer."""
    for note in case.noted("unheld"):
        # A whole model that only passes gradients on, in eval mode, is a teacher or a measure of likeness.
        if not note["held"] and (not note["training"] or not note["held_elsewhere"]):
            continue
        made = next((each["made"] for each in note["optimizers"] if each["made"]), "")
        names = [each["optimizer"] for each in note["optimizers"]]
        optimizer = names[0] if len(set(names)) == 1 else "an optimizer"
        hint = (
            f"{list_some(note['parameters'], note['count'])} must be given to {optimizer}: "
            f"it was made{said_at(made)}, before or without them; build it after the last change of the model"
        )
        yield Found(
            int(note["step"]),
            site=note["parameters"][0],
            evidence={
                "parameters": note["count"],
                "others_that_are_optimized": note["held"],
                "model": note["model"],
            },
            source=made,
            hint=hint,
        )
        return
    for note in case.noted("unheld-tensor"):
        yield _tell_tensor(note)
        return


def _tell_tensor(note: dict[str, Any]) -> Found:
    names = list_some(note["names"], note["count"])
    get, them = "gets" if note["count"] == 1 else "get", _them(note["count"])
    return Found(
        max(int(note["step"]) - note["steps"] + 1, 0),
        site=note["names"][0],
        evidence={"tensors": note["count"], "shape": "x".join(map(str, note["shapes"][0])) or "a number"},
        source=note["made"],
        title="a tensor is trained but is in no optimizer",
        hint=f"{names} {get} a gradient in every step, and nobody uses it: give {them} to {note['optimizer']}, or use "
        "nn.Parameter inside the model",
    )


@rule(
    "M02",
    "optimizer-holds-dead-parameters",
    severity="error",
    watches="the parameters of an optimizer after backward, and the parameters of the models that are called",
    threshold="none of its parameters has a gradient in 2 steps, none belongs to a model that is called; or, later, "
    "none has one and a model that it does not hold does",
    silent="tensors that are optimized by themselves do get gradients",
    hint="build the optimizer from the model that is trained",
    needs=("probe:coverage", "optimizer"),
    explains=("M01", "M03", "M05", "L08", "L06", *_UNTRAINED),
)
def optimizer_holds_dead_parameters(case: Case) -> Iterator[Found]:
    """The optimizer holds parameters of a model that is not the one trained."""
    for note in case.noted("no-gradients"):
        if not note["called"] and note["trainable"]:
            models = ", ".join(note["models"]) or "the model"
            hint = (
                f"{note['optimizer']}, made{said_at(note['made'])}, holds no parameter of {models}: build it "
                "after the model was copied, wrapped, replaced or moved"
            )
            if note.get("copied"):
                hint = (
                    f"{models} runs on copies of the parameters that {note['optimizer']}, made{said_at(note['made'])}, "
                    "holds: give the optimizer the copies, such as params.values()"
                )
            evidence = {
                "optimizer": note["optimizer"],
                "parameters": note["parameters"],
                "of_a_called_model": 0,
            }
            yield Found(int(note["step"]), evidence=evidence, source=note["made"], hint=hint)
            return
    if case.noted("no-gradients"):
        return  # it never held anything that is trained
    for note in case.noted("unheld"):
        if note["training"] and note.get("held_reached") == 0 and note["optimizers"]:
            yield _tell_replaced(note)
            return


def _tell_replaced(note: dict[str, Any]) -> Found:
    """Tell of a model that has taken the place of the one that the optimizer was made for."""
    known = note["optimizers"][0]
    return Found(
        int(note["step"]),
        evidence={
            "optimizer": known["optimizer"],
            "parameters_of_the_model": note["count"],
            "held_by_the_optimizer": 0,
        },
        source=known["made"],
        hint=f"{known['optimizer']}, made{said_at(known['made'])}, holds no parameter of {note['model']}, and nothing "
        "it holds gets a gradient any more: build a new one for each new model",
    )


@rule(
    "M05",
    "nothing-trainable",
    severity="error",
    watches="requires_grad of the parameters of an optimizer, and whether backward reaches them",
    threshold="no parameter requires a gradient, in 2 steps or at the loss",
    silent="a model that is partly frozen keeps one",
    hint="check the loop that freezes parameters",
    needs=("probe:coverage",),
    explains=("L08", "M03", "L06", "O03", *_UNTRAINED),
)
def nothing_trainable(case: Case) -> Iterator[Found]:
    """No parameter of the optimizer can be trained."""
    frozen = [note for note in case.noted("no-gradients") if not note["trainable"]]
    dead = [note for note in case.noted("loss-leaf") if note["parameters"] and not note["trainable"]]
    if frozen:
        note = frozen[0]
        evidence = {"optimizer": note["optimizer"], "parameters": note["parameters"], "trainable": 0}
        hint = (
            f"every parameter of {note['optimizer']}, made{said_at(note['made'])}, has requires_grad=False: "
            "check the loop that freezes layers"
        )
        yield Found(int(note["step"]), evidence=evidence, source=note["made"], hint=hint)
    elif dead:
        note = dead[0]
        evidence = {"parameters": note["parameters"], "trainable": 0}
        hint = "every parameter of the model has requires_grad=False: check the loop that freezes layers"
        yield Found(int(note["step"]), evidence=evidence, source=note["source"], hint=hint)


@rule(
    "M04",
    "unregistered-module",
    severity="error",
    watches="modules that run inside a model without being part of it",
    threshold="their parameters get gradients in 3 steps, are in no optimizer and never change",
    silent="a hidden frozen teacher has no gradients",
    hint="use nn.ModuleList or nn.ModuleDict",
    needs=("probe:coverage", "optimizer"),
    explains=("M01", "M03", "L08", *_UNTRAINED),
)
def unregistered_module(case: Case) -> Iterator[Found]:
    """Layers are kept where the model does not find them."""
    hidden = case.noted("unregistered")
    fresh = case.noted("fresh-module")
    if hidden:
        note = hidden[0]
        right = "nn.ModuleDict" if note["container"] == "dict" else "nn.ModuleList"
        where = f"{note['model']}.{note['attribute']}" if note["attribute"] else "a plain container"
        hint = f"{where} is a plain {note['container'] or 'list'}, so .parameters() does not see inside: use {right}"
        evidence = {"modules": ", ".join(note["modules"][:3]), "parameters": note["parameters"]}
        yield Found(int(note["step"]), site=note["attribute"], evidence=evidence, hint=hint)
    elif fresh:
        note = fresh[0]
        hint = f"a new {note['type']} is made in every forward: make it once, in __init__"
        evidence = {"type": note["type"], "made_in_steps": note["steps"]}
        yield Found(int(note["step"]), evidence=evidence, hint=hint)


@rule(
    "L08",
    "graph-cut",
    severity="error",
    watches="modules that run in forward and whose parameters an optimizer holds",
    threshold="no gradient in 15 steps; 2 steps where none of its parameters has one; late in a run, 10 steps after a "
    "trained module has got its input without the graph it had before; gradients of exactly 0 in 14 steps for the "
    "layers that run first (warning)",
    silent="designed stop-gradients are not in an optimizer; copies that follow another network are recognised",
    hint="look for detach, no_grad, .data, .item() or numpy on the way from the module to the loss",
    needs=("probe:coverage", "optimizer"),
    explains=("M05", "M03", "N08", *_UNTRAINED),
)
def graph_cut(case: Case) -> Iterator[Found]:
    """The way back from the loss is cut inside the model."""
    for note in case.noted("no-gradients"):
        if note["called"] and note["trainable"]:
            hint = (
                f"no parameter of {note['optimizer']} is reached by backward although the model runs: look for detach, "
                "no_grad, .data, .item() or numpy between the model and the loss"
            )
            evidence = {"optimizer": note["optimizer"], "parameters_without_gradient": note["parameters"]}
            yield Found(int(note["step"]), evidence=evidence, source=note["made"], hint=hint)
            return
    for note in case.noted("unreached"):
        if note["form"] == "cut" and note["steps"] >= _FEWEST_STEPS:
            yield _tell_cut(note)
            return
    for note in case.noted("unreached"):
        if note["form"] == "quiet" and note["steps"] >= _FEWEST_STEPS:
            yield _tell_quiet(note)
            return
    if not case.noted("unreached") and not case.noted("equal-outputs"):
        yield from _find_flat(case)  # outputs that are all the same have no slope either, for another reason


def _find_flat(case: Case) -> Iterator[Found]:
    """Find first layers whose gradients are exactly 0 in every step: what follows them has no slope anywhere."""
    flat = find_flat_start(case)
    if flat is None:
        return
    yield Found(
        flat.step,
        site=flat.last,
        severity="warning",
        title="every gradient that reaches the first layers is exactly 0",
        evidence={"layers": flat.layers, "steps": flat.steps, "gradient": 0.0, "next_layer": flat.following},
        hint=f"what stands between {flat.last} and {flat.following} has no slope: look for round, sign, floor, a "
        "comparison or a factor of 0, and use a smooth function or a straight-through estimate",
    )


def _tell_quiet(note: dict[str, Any]) -> Found:
    return Found(
        int(note["step"]) - note["steps"] + 1,
        site=note["modules"][0],
        severity="warning",
        title="layers that the optimizer holds run under no_grad only",
        evidence={
            "modules": note["module_count"],
            "parameters_without_gradient": note["count"],
            "steps": note["steps"],
        },
        source=note["made"],
        hint=f"what runs under no_grad only cannot learn ({list_some(note['modules'], note['module_count'])}): call it "
        f"with gradients where the loss is computed, or take it out of {note['optimizer']}",
    )


def _tell_cut(note: dict[str, Any]) -> Found:
    between = f"between {note['before']} and {note['after']}" if note["after"] else f"behind {note['before']}"
    get = "gets" if note["module_count"] == 1 else "get"
    ways = "detach, .data, .item(), numpy, argmax or a comparison"
    cause = "it runs under no_grad" if note["without_grad"] else f"look for {ways}"
    return Found(
        int(note["step"]) - note["steps"] + 1,
        site=note["before"],
        evidence={
            "modules": note["module_count"],
            "parameters_without_gradient": note["count"],
            "steps": note["steps"],
        },
        source=note["made"],
        hint=f"{list_some(note['modules'], note['module_count'])} {get} no gradient: {cause} {between}",
    )


@rule(
    "M03",
    "unused-layer",
    severity="warning",
    watches="parameters that an optimizer holds and that nothing uses",
    threshold="no gradient in 15 steps, module never called; 60 steps for one of several experts or heads",
    silent="experts and alternating heads get their turn",
    hint="remove the layer, or use it",
    needs=("probe:coverage", "optimizer"),
)
def unused_layer(case: Case) -> Iterator[Found]:
    """A layer is trained that the model never uses."""
    for note in case.noted("unreached"):
        if note["form"] == "unused" and note["steps"] >= _FEWEST_STEPS:
            names = note["single"] or note["modules"]
            count = note["count"] if note["single"] else note["module_count"]
            yield Found(
                int(note["step"]) - note["steps"] + 1,
                site=names[0],
                evidence={"parameters_without_gradient": note["count"], "steps": note["steps"]},
                source=note["made"],
                hint=f"{list_some(names, count)} {_take_part(count)} in the loss: remove {_them(count)}, or use "
                f"{_them(count)} in forward (DistributedDataParallel needs find_unused_parameters=True for this)",
            )
            return


def _take_part(count: int) -> str:
    return "never takes part" if count == 1 else "never take part"


def _them(count: int) -> str:
    return "it" if count == 1 else "them"
