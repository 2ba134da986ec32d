"""How far steps move the weights: learning rates that are zero, too high or too low, lost updates, clipping."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np

from clew.doctor.measure import (
    HALF,
    Losses,
    is_matrix,
    learning_rate,
    losses,
    round_number,
    single_losses,
    skipped_steps,
    weight_ratios,
)
from clew.doctor.rule import Found, NotJudged, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from clew.doctor.case import Case

_FIRST: Final = 20


@rule(
    "O07",
    "zero-learning-rate",
    severity="error",
    watches="lr of every group",
    threshold="the highest lr is below 1e-12 for the first 10 steps; a warning when it becomes so and stays so for 50",
    silent="warm-up has one such step, a schedule's end a few",
    hint="print the schedule: an integer division or a factor of 0 in it makes the rate 0",
    needs=("optimizer", "steps:10"),
    explains=("O09", "O10", "O11", "V02", "D06", "M20", "O05", "O06"),
)
def zero_learning_rate(case: Case) -> Iterator[Found]:
    """The learning rate is 0."""
    rates = learning_rate(case)
    if len(rates) < 10:
        return
    off = np.abs(rates.values) < 1e-12
    if off[:10].all():
        yield Found(
            int(rates.steps[0]),
            evidence={"lr": float(rates.values[:10].max()), "steps": int(off.argmin() or len(off))},
        )
        return
    stretch = int(off[::-1].argmin()) if not off.all() else len(off)
    if stretch >= 50:
        began = int(rates.steps[len(off) - stretch])
        yield Found(
            began,
            severity="warning",
            title="the learning rate has become 0 and training goes on",
            evidence={"lr": 0.0, "steps": stretch},
        )


@rule(
    "O08",
    "learning-rate-too-high",
    severity="warning",
    watches="update of every matrix over its initial size, lr, and the loss",
    threshold="updates of over 20 % and a loss that is and stays 10 % above the first; of over 2 % and 30 times it; "
    "one of over 10 % and 100 times; or lr above all before by a factor of 3 and 3 times the loss from there on",
    silent="healthy steps move a matrix by up to 20 % of its initial size while the loss falls; weights that begin at "
    "zero, losses that change sign and several games are left out",
    hint="divide the learning rate by 10",
    needs=("kind:update", "kind:param", "scalar:loss"),
    explains=(
        "N01",
        "N02",
        "N03",
        "N06",
        "N07",
        "V03",
        "V02",
        "M11",
        "M12",
        "M20",
        "O12",
        "D06",
        "N08",
        "M21",
    ),
)
def learning_rate_too_high(case: Case) -> Iterator[Found]:
    """Steps are so large that training diverges."""
    loss = single_losses(case)
    if loss is None or not loss.is_positive:
        return
    yield from _diverges_at_start(case, loss) or _diverges_after_rise(case, loss)


def _diverges_at_start(case: Case, loss: Losses) -> list[Found]:
    first, later = float(loss.values[0]), loss.values[1 : 2 * _FIRST]
    broken = loss.steps[1 : 2 * _FIRST][~np.isfinite(later)]
    end = int(broken[0]) if len(broken) else int(loss.steps[-1]) + 1
    paces = _find_paces(case, before=end)
    later = later[np.isfinite(later)]
    if not first > 0 or not len(later) or len(paces) < (2 if len(broken) else 10):
        return []
    # What a large step has killed moves no more: only steps that moved anything tell how large they are.
    moving = paces[paces > 0]
    pace = float(np.median(moving)) if len(moving) else 0.0
    # A loss that has exploded may come down again, to weights that are too large to be moved.
    smooth = _smooth(later, 2 if len(broken) else 5)
    highest, reached = float(smooth.max()), float(smooth[-1])
    too_far = pace > 0.2 and (highest > 1.5 * first or (highest > 1.1 * first and reached > 0.95 * first))
    # Data in its natural order has easy and hard stretches, and some losses start low by chance: moderate steps must
    # leave them far behind.
    explodes = pace > 0.02 and highest > 30 * first
    if not too_far and not explodes and not _leaps(paces, later, first):
        return []
    rate = learning_rate(case)
    top = float(rate.values[: 2 * _FIRST].max()) if len(rate) else 0.0
    evidence = {
        "median_update_over_initial_weight": round_number(pace),
        "first_loss": round_number(first),
        "highest_loss": round_number(highest),
        "loss_after": round_number(reached),
        "lr": top,
    }
    hint = f"divide the learning rate by 10: {top / 10:g} instead of {top:g}" if top else ""
    return [Found(int(loss.steps[0]), evidence=evidence, hint=hint)]


def _leaps(paces: NDArray[np.float64], later: NDArray[np.float64], first: float) -> bool:
    """Return whether a single large step threw the loss out of all proportion; what is dead then moves no more."""
    far = np.flatnonzero(later > 100 * first)
    return bool(len(far)) and bool((paces[: far[0] + 1] > 0.1).any())


def _find_paces(case: Case, *, before: int) -> NDArray[np.float64]:
    """Return, for each step, the median update of the matrices over their initial size.

    Weights that a step blows up would hide the next one: what counts is the size they were made with. Those made at
    zero have none.
    """
    weights = case.by_site("param", first=_FIRST, mode=None)
    paces: dict[int, list[float]] = {}
    for site, rows in case.by_site("update", first=_FIRST, mode=None).items():
        if site not in weights or not is_matrix(case.sites.get(site)):
            continue
        initial = float(weights[site].stat("l2")[0])
        if initial > 0:
            for step, size in zip(rows.steps.tolist(), rows.stat("l2").tolist(), strict=True):
                paces.setdefault(step, []).append(size / initial)
    known = [paces[step] for step in sorted(paces) if step < before]
    middles = [median(sizes) for sizes in known if not any(map(math.isnan, sizes))]
    return np.array([middle for middle in middles if math.isfinite(middle)])


def _diverges_after_rise(case: Case, loss: Losses) -> list[Found]:
    """Find a learning rate far above all before it, after which the loss explodes."""
    rates = learning_rate(case)
    if len(rates) < 2 * _FIRST:
        return []
    highest = np.maximum.accumulate(rates.values)
    jumps = np.flatnonzero((rates.values[1:] > 3 * highest[:-1]) & (highest[:-1] > 0)) + 1
    for at in jumps[jumps >= _FIRST].tolist():
        step = int(rates.steps[at])
        earlier, later = loss.values[loss.steps <= step][-50:], loss.values[loss.steps > step][:_FIRST]
        usual = float(np.median(earlier)) if len(earlier) else 0.0
        if not usual > 0 or len(later) < 3:
            continue
        reached = float(_smooth(np.nan_to_num(later, nan=np.inf), 3).max())
        if reached > 3 * max(usual, float(earlier.max())):
            evidence = {
                "lr": float(rates.values[at]),
                "lr_before": float(rates.values[at - 1]),
                "median_loss_before": round_number(usual),
                "loss_after": round_number(reached),
            }
            hint = (
                f"lr rises from {evidence['lr_before']:g} to {evidence['lr']:g} at step {step}: raise it less"
            )
            title = "the learning rate is raised so far that training diverges"
            return [Found(step, evidence=evidence, hint=hint, title=title)]
    return []


def _smooth(values: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Return the median of each value and those behind it: one bad batch is no trend."""
    windows = np.lib.stride_tricks.sliding_window_view(values, min(length, len(values)))
    medians: NDArray[np.float64] = np.median(windows, axis=1)
    return medians


@rule(
    "O09",
    "learning-rate-too-low",
    severity="warning",
    watches="update over weight of every matrix in the first steps",
    threshold="median ratio below 1e-6 over 10 steps while gradients are not as small and lr does not rise",
    silent="healthy steps move a matrix a thousand times more; a warm-up rises",
    hint="raise the learning rate",
    until=20,
    needs=("kind:update", "kind:param", "kind:grad", "optimizer", "steps:10"),
    explains=("V02", "D06"),
)
def learning_rate_too_low(case: Case) -> Iterator[Found]:
    """Steps are so small that nothing is learned."""
    ratios = weight_ratios(case, "update", first=_FIRST)
    gradients = weight_ratios(case, "grad", first=_FIRST)
    rate = learning_rate(case)
    if len(np.unique(ratios.steps)) < 10 or not len(gradients.values) or not len(rate):
        return
    ratio = ratios.middle
    gradient = gradients.middle
    lowest, highest = float(rate.values[0]), float(rate.values.max())
    rises = highest > 1.05 * max(lowest, 1e-30)
    # Lost to precision, or held back by something else than the rate: other rules name that.
    is_half = _share_of_half(case) > 0.5
    expected = highest * gradient
    if ratio < 1e-6 < gradient and highest > 1e-12 and not rises and not is_half and expected < 1e-4:
        yield Found(
            int(ratios.steps[0]),
            evidence={"median_update_ratio": ratio, "lr": highest, "median_gradient_ratio": gradient},
        )


def _share_of_half(case: Case) -> float:
    weights = [site for site in case.sites.values() if is_matrix(site)]
    return sum(site.dtype in HALF for site in weights) / max(len(weights), 1)


@rule(
    "O10",
    "updates-lost-to-precision",
    severity="error",
    watches="weights in half precision that stay the same bit for bit although their gradient is not zero",
    threshold="over 90 % of them in each of 5 recorded steps with lr > 0",
    silent="healthy runs lose 1 %; steps of lr 0 and steps that a scaler skipped are not counted",
    hint="keep float32 weights and compute in half precision (torch.autocast), or round stochastically",
    until=20,
    needs=("kind:update", "kind:grad", "optimizer"),
    explains=("O09", "O11", "V02", "D06", "M20"),
)
def updates_lost_to_precision(case: Case) -> Iterator[Found]:
    """Updates are smaller than the weights' precision and are lost."""
    equal, moving, first = _count_unmoved(case, half=True)
    lost = [step for step in equal if moving[step] and equal[step] > 0.9 * moving[step]]
    if len(lost) >= 5 and len(lost) > 0.8 * len(equal):
        share = sum(equal.values()) / max(sum(moving.values()), 1)
        yield Found(
            lost[0],
            site=first,
            evidence={
                "unmoved_share": round_number(share),
                "steps": len(lost),
                "lr": float(learning_rate(case).values.max()),
            },
        )


_FLAT_STEPS: Final = 10
_NO_LOSS: Final = 1e-6


def _count_unmoved(case: Case, *, half: bool) -> tuple[dict[int, float], dict[int, float], str]:
    """Return, by step, how many weights with a gradient stayed equal, how many have one, and a site of them."""
    rates = learning_rate(case)
    idle = set(rates.steps[np.abs(rates.values) < 1e-12].tolist()) | skipped_steps(case)
    gradients = case.by_site("grad", first=_FIRST, mode=None)
    equal: dict[int, float] = {}
    moving: dict[int, float] = {}
    first = ""
    for number, update in case.by_site("update", first=_FIRST, mode=None).items():
        site, rows, grad = case.sites.get(number), update, gradients.get(number)
        if site is None or grad is None or (site.dtype in HALF) is not half:
            continue
        first = first or site.name
        if not np.array_equal(rows.steps, grad.steps):
            _, here, there = np.intersect1d(rows.steps, grad.steps, return_indices=True)
            rows, grad = rows.take(here), grad.take(there)
        with_gradient = grad.stat("count") - grad.stat("zero")
        unmoved = np.maximum(rows.stat("zero") - grad.stat("zero"), 0)
        for step, stay, move in zip(
            rows.steps.tolist(), unmoved.tolist(), with_gradient.tolist(), strict=True
        ):
            if step not in idle:
                equal[step] = equal.get(step, 0.0) + min(stay, move)
                moving[step] = moving.get(step, 0.0) + move
    return equal, moving, first


@rule(
    "O11",
    "weights-unchanged",
    severity="error",
    watches="updates and hashes of the weights",
    threshold="no weight moves in 5 steps that should move it, each step starts from the same weights, or all "
    "gradients of the first 10 steps are 0; without an optimizer, 12 backward passes with own gradients (warning)",
    silent="frozen weights have no gradient; a step of lr 0 is not counted; a loss of 0 needs no gradient",
    hint="something puts the weights back or shields them: look for load_state_dict, copies and hooks in the loop",
    until=20,
    needs=("kind:grad", "kind:param"),
    explains=("O09", "V02", "D06", "M20"),
)
def weights_unchanged(case: Case) -> Iterator[Found]:
    """The weights never change."""
    if "lr" not in case.scalars:
        yield from _find_unmoved(case)
        return
    if "update" not in case.kinds:
        raise NotJudged("no rows of kind 'update' were recorded")
    equal, moving, first = _count_unmoved(case, half=False)
    still = [step for step in equal if moving[step] and equal[step] >= moving[step]]
    gradients = weight_ratios(case, "grad", first=_FIRST)
    rate = learning_rate(case)
    if len(still) >= 5 and len(still) == len(equal) and len(gradients.values):
        expected = float(rate.values.max()) * float(np.median(gradients.values))
        if expected > 1e-5:
            yield Found(
                still[0],
                site=first,
                evidence={"steps": len(still), "expected_update_ratio": round_number(expected)},
            )
            return
    if len(moving) >= _FLAT_STEPS and not any(moving.values()):
        yield from _find_flat(case, list(moving))
        return
    yield from _put_back(case)


def _find_flat(case: Case, steps: list[int]) -> Iterator[Found]:
    """Find gradients that are all exactly 0 from the first step on although there is a loss to make smaller."""
    loss = single_losses(case)
    if loss is None or len(loss.values) < _FLAT_STEPS or min(steps) > 0:
        return
    values = np.abs(loss.values[: len(steps)])
    if np.isfinite(values).all() and values.min() > _NO_LOSS:
        yield Found(
            steps[0],
            title="every gradient is exactly 0, so that no weight changes",
            evidence={"steps": len(steps), "gradients_above_zero": 0, "loss": round_number(float(values[0]))},
            hint="look for a hook that returns zeros, a factor of 0 before the loss, and operations without a slope: "
            "round, sign, a clamp beyond its bounds",
        )


def _find_unmoved(case: Case) -> Iterator[Found]:
    """Find a training without an optimizer in which nobody writes to the weights."""
    notes = case.noted("never-moved")
    if not notes:
        raise NotJudged("no optimizer was seen to step")
    yield Found(
        0,
        severity="warning",
        title="gradients are computed and cleared again and again, and no weight ever changes",
        evidence={"backward_passes": notes[0]["passes"], "optimizers": 0},
        hint="no optimizer steps, and an update by hand must write into the weight itself: p -= lr * p.grad under "
        "no_grad, not p = p - lr * p.grad, which only gives the name p to a new tensor",
    )


def _put_back(case: Case) -> Iterator[Found]:
    """Find weights that an optimizer moves and that are the old ones again at the next step."""
    updates = case.by_site("update", first=_FIRST, mode=None)
    same, held, first = 0, 0, ""
    step, count = 0, 0
    for number, weights in case.by_site("param", first=_FIRST, mode=None).items():
        moved = updates.get(number)
        if moved is None or not is_matrix(case.sites.get(number)) or not (moved.stat("l2") > 0).all():
            continue
        rows = weights
        if not np.array_equal(weights.steps, moved.steps):  # a scaler's skipped steps move nothing
            rows = weights.take(np.isin(weights.steps, moved.steps))
        if rows.hashes is None or len(rows) < 6:
            continue
        held += 1
        if (rows.hashes == rows.hashes[0]).all():
            same += 1
            first, step, count = first or case.name(number), int(rows.steps[0]), len(rows)
    if held and same == held:
        yield Found(
            step,
            site=first,
            title="every step starts from the same weights: what the optimizer did is undone",
            evidence={"steps": count, "weights": same},
        )


@rule(
    "O12",
    "clipping-always-on",
    severity="warning",
    watches="clip.norm_before and clip.limit",
    threshold="all calls from the first above the limit, 50 or more, and their median above 10 times the limit",
    silent="clipping that works trims by a factor of 1 to 5, and not always; gradients that grow later are no "
    "limit that is too low",
    hint="the limit sets the step size, not the gradient: raise max_norm, or lower the loss's scale",
    needs=("scalar:clip.norm_before", "steps:50"),
)
def clipping_always_on(case: Case) -> Iterator[Found]:
    """Every gradient is clipped, and by a lot."""
    norms, limits = case.scalar("clip.norm_before"), case.scalar("clip.limit")
    length = min(len(norms), len(limits))
    if length < 50:
        return
    factor = norms.values[-length:] / np.maximum(limits.values[-length:], 1e-30)
    recent = factor[-max(50, length // 2) :]
    # A limit that let gradients pass at the start is not too low; they have grown since.
    is_on_always = (recent > 1).all() and (factor > 1).mean() > 0.98
    if np.isfinite(recent).all() and is_on_always and np.median(recent) > 10:
        yield Found(
            int(norms.steps[-len(recent)]),
            evidence={
                "median_norm_over_limit": round_number(float(np.median(recent))),
                "limit": float(limits.values[-1]),
                "calls": len(recent),
            },
        )


@rule(
    "M21",
    "update-too-uneven",
    severity="info",
    watches="update over weight of every matrix",
    threshold="one matrix moves over 300 times as far as the median one",
    silent="weights that start at zero are left out",
    hint="give the layer an initialisation or a learning rate that fits the others",
    needs=("kind:update", "kind:param", "steps:30"),
)
def update_too_uneven(case: Case) -> Iterator[Found]:
    """One layer learns orders of magnitude faster than the rest."""
    ratios = weight_ratios(case, "update", last=10)
    by_site = {site: value for site, value in ratios.by_site().items() if value > 0}
    if len(by_site) < 5 or len(losses(case)) != 1:
        return
    fastest = max(by_site, key=lambda site: by_site[site])
    middle = float(np.median(list(by_site.values())))
    if by_site[fastest] > 300 * middle:
        yield Found(
            int(ratios.steps[0]),
            site=case.name(fastest),
            evidence={
                "update_ratio": round_number(by_site[fastest]),
                "median_update_ratio": round_number(middle),
            },
        )
