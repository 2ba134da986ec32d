"""Checks of the rehearsal that let the training learn: first loss, gradients, one batch by heart, evaluation."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.model.preflight import Check
from clew.replay.preflight_losses import CLASSES, DISTANCES, PROBABILITIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clew.replay.preflight_losses import LossCall
    from clew.replay.preflight_subject import Seen, Subject

_FEW_STEPS: Final = 3
_MOST_STEPS: Final = 60
_SECONDS: Final = 8.0
_SETTLING: Final = 160
_LEAST_FALL: Final = 0.003
"""Part of the loss that sixty steps must take off: rates for fine-tuning are small on purpose."""
_ADAMS_FALL: Final = 0.02
_FAR_ABOVE: Final = 2.0
_FAR_FROM_CONSTANT: Final = 10.0


def check_one_batch(subject: Subject) -> Check:
    """Execute one step: forward, loss, backward, optimizer."""
    name = "one-batch"
    subject.rewind()
    seen = subject.run()
    if not seen.losses:
        return Check(name, "failed", "the step ran no backward pass", "call loss.backward()")
    if not seen.steps:
        return Check(name, "failed", "no optimizer stepped", "call optimizer.step() after backward")
    loss = ", ".join(f"{loss:.4g}" for loss in seen.losses[:3])
    text = f"forward, loss {loss}, backward and optimizer ran"
    return Check(name, "ok", text, evidence={"losses": seen.losses[:8], "optimizer_steps": seen.steps})


# ------------------------------------------------------------------------ the first loss


def check_initial_loss(subject: Subject) -> Check:
    """Compare the first loss with that of a model that knows nothing yet."""
    name = "initial-loss"
    subject.rewind()
    seen = subject.run()
    if not all(map(math.isfinite, seen.losses)):
        return Check(name, "failed", f"the first loss is {seen.losses[0]}", "clew run names the operation")
    calls = [call for call in seen.calls if call.result.requires_grad and call.result.numel() == 1]
    if not calls:
        first = seen.losses[0] if seen.losses else math.nan
        return Check(name, "ok", f"finite, {first:.4g}; its expected value is known for common losses only")
    results = [_judge_first(call) for call in calls]
    return next((each for each in results if each.status != "ok"), results[0])


def _judge_first(call: LossCall) -> Check:
    name, loss, expected = "initial-loss", float(call.result.detach()), _expect(call)
    evidence = {"loss": loss, "expected": expected, "function": call.name}
    if not math.isfinite(expected) or expected <= 0:
        return Check(name, "ok", f"{call.name} {loss:.4g}", evidence=evidence)
    what = f"{call.name} {loss:.4g}, {_whose(call)} gives {expected:.4g}"
    limit = _FAR_FROM_CONSTANT if call.name in DISTANCES else _FAR_ABOVE
    if loss > limit * expected:
        hint = (
            "bring the targets to mean 0 and deviation 1, or start the last bias at their mean"
            if call.name in DISTANCES
            else "the first outputs are too large: a smaller initialisation of the last layer, normalised inputs"
        )
        return Check(name, "warning", f"far above chance: {what}", hint, evidence)
    return Check(name, "ok", what, evidence=evidence)


def _whose(call: LossCall) -> str:
    return "the mean of the targets" if call.name in DISTANCES else "a guess"


def _expect(call: LossCall) -> float:
    """Return the loss of a model that tells nothing apart, with the same targets, weights and reduction."""
    guess = torch.zeros_like(call.prediction)
    if call.name == "nll_loss":
        guess -= math.log(max(call.class_count, 1))
    elif call.name == "binary_cross_entropy":
        guess += 0.5
    elif call.name in DISTANCES:
        guess = call.target.to(guess.dtype).mean().expand_as(call.prediction)
    return float(call.repeat(guess)) if call.name in (*CLASSES, *PROBABILITIES, *DISTANCES) else math.nan


# ------------------------------------------------------------------------ gradients


def check_gradients(subject: Subject) -> Check:
    """Execute a few steps: every trainable parameter must get a gradient, be in an optimizer and move."""
    name = "gradients"
    subject.rewind()
    parameters = subject.parameters
    before = [parameter.detach().clone() for parameter in parameters]
    executed = _note_executed(subject)
    steps = [subject.run() for _ in range(_FEW_STEPS)]
    largest = {id(p): _largest(steps, p) for p in parameters}
    moved = {id(p) for p, old in zip(parameters, before, strict=True) if not torch.equal(p.detach(), old)}
    groups = _sort_out(subject, parameters, largest, moved=moved, executed=executed)
    for (status, what, hint), found in groups.items():
        if found:
            names = [subject.name(parameter) for parameter in found]
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            return Check(name, status, f"{what}: {shown}", hint, {"parameters": names[:50]})
    return Check(name, "ok", f"all {len(parameters)} trainable parameters get gradients and move")


_CUT = (
    "failed",
    "used in the forward pass, but no gradient arrives",
    "look for detach(), no_grad(), .data, .item() or numpy on the way to the loss",
)
_LOST = (
    "failed",
    "get gradients but are in no optimizer",
    "build the optimizer after the model is complete, from all its parameters",
)
_STUCK = (
    "failed",
    "get gradients but do not move",
    "the learning rate is 0, too small for the precision, or step() is not reached",
)
_NOISE = 1e-6
"""Beside the largest gradient: a bias before a norm has none but rounding errors, and may well stay where it is."""
_UNUSED = ("warning", "trainable, but not used by this batch", "remove them, or freeze them on purpose")
_FLAT = ("warning", "their gradient is exactly 0", "dead units, a saturated activation, or a zero factor")


def _sort_out(
    subject: Subject,
    parameters: Sequence[torch.nn.Parameter],
    largest: dict[int, float | None],
    *,
    moved: set[int],
    executed: set[int],
) -> dict[tuple[str, str, str], list[torch.nn.Parameter]]:
    """Return the parameters with something wrong, by what it is, the worst first."""
    groups: dict[tuple[str, str, str], list[torch.nn.Parameter]] = {
        each: [] for each in (_CUT, _LOST, _STUCK, _UNUSED, _FLAT)
    }
    optimized = subject.optimized
    noise = _NOISE * max((size for size in largest.values() if size is not None), default=0.0)
    for parameter in parameters:
        size, key = largest[id(parameter)], id(parameter)
        if size is None:
            groups[_CUT if key in executed else _UNUSED].append(parameter)
        elif size > 0 and key not in optimized:
            groups[_LOST].append(parameter)
        elif size > noise and key not in moved:
            groups[_STUCK].append(parameter)
        elif size == 0:
            groups[_FLAT].append(parameter)
    return groups


def _largest(steps: Sequence[Seen], parameter: torch.Tensor) -> float | None:
    known = [step.gradients.get(id(parameter)) for step in steps]
    return max((size for size in known if size is not None), default=None)


def _note_executed(subject: Subject) -> set[int]:
    """Return a set that fills with the own parameters of every module that is called."""
    executed: set[int] = set()

    def note(module: torch.nn.Module, *_: Any) -> None:
        executed.update(map(id, module.parameters(recurse=False)))

    for model in subject.models:
        for module in model.modules():
            module.register_forward_pre_hook(note)
    return executed


# ------------------------------------------------------------------------ one batch by heart


def check_overfit(subject: Subject) -> Check:
    """Train on one batch: the loss must fall."""
    name = "overfit"
    if len(subject.optimizers) > 1:
        return Check(name, "not checked", "several optimizers: their losses may pull against each other")
    subject.rewind()
    first, last, count = _learn(subject)
    rates = sorted(float(g["lr"]) for o in subject.optimizers for g in o.param_groups)
    text = f"loss {first:.4g} to {last:.4g} in {count} steps on the same batch"
    evidence = {"first": first, "last": last, "steps": count}
    if math.isfinite(last) and _has_fallen(first, last):
        return Check(name, "ok", text, evidence=evidence)
    other_first, other_last, _ = _learn_with_adam(subject)
    evidence |= {"adam_first": other_first, "adam_last": other_last}
    if not _has_fallen(other_first, other_last, least=_ADAMS_FALL):
        hint = "the loss cannot be brought down even with Adam: wrong targets, a cut graph, or a wrong sign"
        return Check(name, "failed", text, hint, evidence)
    if not math.isfinite(last) or last > first + 0.5 * abs(first):
        return Check(name, "failed", f"it diverges: {text}", "a smaller learning rate", evidence)
    if _rises(subject, rates):
        return Check(name, "ok", f"{text}; the learning rate is still warming up", evidence=evidence)
    hint = f"Adam with 1e-3 takes it from {other_first:.4g} to {other_last:.4g}: look at optimizer and learning rate"
    return Check(name, "warning", f"it hardly falls: {text}", hint, evidence)


def _learn(subject: Subject) -> tuple[float, float, int]:
    """Return first loss, last loss and number of steps on one batch; a few are averaged where there is dropout."""
    losses: list[float] = []
    deadline = time.monotonic() + _SECONDS
    # With the same random numbers each time dropout would leave out the same units: not what is to be learned.
    is_free = _has_fixed_batch(subject)
    rates = [(group, group["lr"]) for each in subject.optimizers for group in each.param_groups]
    while len(losses) < _MOST_STEPS and (len(losses) < 4 or time.monotonic() < deadline):
        # A schedule made for a short run would take the rate to 0 meanwhile; one that warms up may rise.
        for group, rate in rates:
            group["lr"] = rate if isinstance(rate, torch.Tensor) else max(rate, group["lr"])
        seen = subject.run(keep_random=is_free)
        losses.append(sum(seen.losses) if seen.losses else math.nan)
    few = max(1, min(3, len(losses) // 4))
    return sum(losses[:few]) / few, sum(losses[-few:]) / few, len(losses)


def _has_fixed_batch(subject: Subject) -> bool:
    """Return whether the step trains on the same targets whatever the random numbers are."""
    one, other = subject.run(), subject.run(keep_random=True)
    subject.rewind()
    targets = [(a.target, b.target) for a, b in zip(one.calls, other.calls, strict=False)]
    return bool(targets) and all(a.shape == b.shape and torch.equal(a, b) for a, b in targets)


def _learn_with_adam(subject: Subject) -> tuple[float, float, int]:
    """Learn the same batch with an optimizer that is known to work; the user's own steps are made to do nothing."""
    subject.rewind()
    adam = torch.optim.Adam(subject.parameters, lr=1e-3)
    step = adam.step
    for optimizer in subject.optimizers:
        optimizer.step = lambda *args, **_: _step_instead(step, args)  # type: ignore[method-assign]
    return _learn(subject)


def _step_instead(step: Any, args: tuple[Any, ...]) -> Any:
    closure = next((each for each in args if callable(each)), None)
    return step(closure)


def _has_fallen(first: float, last: float, *, least: float = _LEAST_FALL) -> bool:
    return last < first - least * abs(first)


def _rises(subject: Subject, rates: list[float]) -> bool:
    """Return whether the learning rates were lower still at the beginning."""
    subject.rewind()
    beginning = sorted(float(g["lr"]) for o in subject.optimizers for g in o.param_groups)
    return any(now > then for now, then in zip(rates, beginning, strict=False))


# ------------------------------------------------------------------------ training and evaluation


def check_evaluation(subject: Subject) -> Check:
    """Learn a batch, then compute its loss in evaluation mode: what was learned must still be there."""
    name = "train-eval"
    if not subject.roots:
        return Check(name, "not checked", "no call of a model was seen")
    random = _find_random(subject)
    if random:
        hint = f"give it training=self.training: {random} is on in evaluation mode"
        return Check(name, "failed", "the outputs in evaluation mode are random", hint)
    if len(subject.optimizers) > 1:
        return Check(
            name, "ok", "outputs in evaluation mode are the same twice; losses pull against each other"
        )
    subject.rewind()
    first, last, _ = _learn(subject)
    _settle(subject)
    trained = _loss_of(subject)
    for model in subject.models:
        model.eval()
    torch.nn.Module.train = lambda module, mode=True: module  # type: ignore[method-assign,assignment] # noqa: ARG005
    evaluated = _loss_of(subject)
    evidence = {"first": first, "train": trained, "eval": evaluated}
    text = (
        f"after learning one batch: loss {trained:.4g} in training mode, {evaluated:.4g} in evaluation mode"
    )
    learned = max(first - min(trained, last), 0.05 * abs(first))
    if not math.isfinite(evaluated) or evaluated > trained + 0.5 * learned:
        hint = (
            "running statistics that do not follow (momentum, tiny batches), or a layer that differs by mode"
        )
        return Check(name, "warning", text, hint, evidence)
    return Check(name, "ok", text, evidence=evidence)


def _loss_of(subject: Subject) -> float:
    """Return the loss of the step with its optimizers held still."""
    kept = [parameter.detach().clone() for parameter in subject.parameters]
    losses = subject.run().losses
    with torch.no_grad():
        for parameter, value in zip(subject.parameters, kept, strict=True):
            parameter.copy_(value)
    return sum(losses) if losses else math.nan


def _settle(subject: Subject) -> None:
    """Let running statistics follow the weights that were learned."""
    deadline = time.monotonic() + _SECONDS
    with torch.no_grad():
        for _ in range(_SETTLING):
            for call in subject.roots:
                call.module(*call.args, **call.kwargs)
            if time.monotonic() > deadline:
                return


def _find_random(subject: Subject) -> str:
    """Return the name of a dropout that is on in evaluation mode, or nothing."""
    from torch.overrides import TorchFunctionMode

    found: list[str] = []

    class Listen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if "dropout" in name and _is_on(args, kwargs or {}):
                found.append(name)
            return func(*args, **(kwargs or {}))

    for model in subject.models:
        model.eval()
    with torch.no_grad(), Listen():
        for call in subject.roots:
            call.module(*call.args, **call.kwargs)
    subject.rewind()
    return found[0] if found else ""


def _is_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    return bool(given.get("training", True)) and float(given.get("p", 0.5)) > 0
