"""Does the loss say that something is learned: where it starts, where it stays, where it jumps."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from clew.doctor.measure import Losses, learning_rate, roll, round_number, single_losses, weight_ratios
from clew.doctor.rule import Found, NotJudged, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from clew.doctor.case import Case

_MANY_STEPS: Final = 300
_RECENT: Final = 100


@rule(
    "L11",
    "bad-initial-loss",
    severity="warning",
    watches="the cross-entropy of the first batches",
    threshold="above twice ln(classes) and above ln(classes) + 2",
    silent="healthy models start within 30 % of ln(classes); contrastive losses and scores that are multiplied by a "
    "number of over 3 on purpose are left out",
    hint="the scores are too large at the start: scale the last layer's initialisation down, embeddings to about 0.02",
    until=5,
    needs=("probe:objective", "note:objective"),
    explains=("O12",),
)
def bad_initial_loss(case: Case) -> Iterator[Found]:
    """The first loss is far worse than a guess."""
    for form in ("cross-entropy", "binary"):
        first = [note for note in case.noted("objective") if note["form"] == form][:3]
        if not first or first[0]["step"] > 2 or any(n["is_pairing"] or n.get("is_sharpened") for n in first):
            continue
        chance = math.log(first[0]["classes"])
        value = float(first[0]["value"])
        if first[0]["targets"] < 16:
            value = float(np.mean([note["value"] for note in first]))
        if math.isfinite(value) and first[0]["classes"] > 1 and value > max(2 * chance, chance + 2):
            yield Found(
                int(first[0]["step"]),
                evidence={
                    "first_loss": round_number(value),
                    "loss_of_a_guess": round_number(chance),
                    "classes": first[0]["classes"],
                },
            )
            return


class _Standing(NamedTuple):
    """Where the loss stands after many steps, against the best constant guess."""

    form: str
    recent: float
    early: float
    guess: float
    targets: int
    step: int


def _compare_with_guess(case: Case) -> _Standing | None:
    """Return how the loss compares with a constant guess; None where the loss is something else or lr still rises."""
    loss = single_losses(case)
    notes = [note for note in case.noted("objective") if note["guess"] is not None]
    if (
        loss is None
        or not notes
        or len({note["form"] for note in notes}) > 1
        or not _is_the_loss(loss, notes)
    ):
        return None
    if (
        len(loss) < _MANY_STEPS
        or notes[-1]["targets"] < 256
        or notes[-1]["guess"] < 0.05
        or notes[-1]["is_pairing"]
    ):
        return None
    rates = learning_rate(case)
    if len(rates) > _RECENT and rates.values[-1] > 1.05 * rates.values[-_RECENT]:
        return None
    recent = loss.values[-_RECENT:]
    if not np.isfinite(recent).all():
        return None
    early = float(np.median(loss.values[:20]))
    return _Standing(
        notes[-1]["form"],
        float(recent.mean()),
        early,
        float(notes[-1]["guess"]),
        int(notes[-1]["targets"]),
        int(loss.steps[-_RECENT]),
    )


def _is_the_loss(loss: Losses, notes: list[dict[str, Any]]) -> bool:
    """Return whether the objective is the whole loss: no other term, weight or scale in it."""
    singles = [note for note in notes if note["steps"] == 1]
    pairs = [
        (note["value"], loss.values[loss.steps == note["step"]][0])
        for note in singles
        if (loss.steps == note["step"]).any()
    ]
    return bool(pairs) and all(abs(value - whole) <= 0.01 * abs(whole) + 1e-9 for value, whole in pairs)


@rule(
    "D06",
    "uninformative-inputs",
    severity="warning",
    watches="the loss against the entropy of the labels",
    threshold="after 300 steps the last 100 losses are within 2 % of it, with healthy updates",
    silent="hard tasks beat the label entropy too; warm-up and several losses are left out",
    hint="the inputs tell nothing about the labels: check that they are paired, the transforms, the label column",
    needs=("probe:objective", "scalar:loss", "kind:update", "steps:300"),
)
def uninformative_inputs(case: Case) -> Iterator[Found]:
    """The inputs carry no information about the labels."""
    standing = _compare_with_guess(case)
    if standing is None:
        raise NotJudged(
            "the loss is not a plain cross-entropy over 300 steps, so there is no guess to compare with"
        )
    ratios = weight_ratios(case, "update", last=10)
    ratio = ratios.middle if len(ratios.values) else 0.0
    near = abs(standing.recent - standing.guess) <= 0.02 * standing.guess
    if standing.form != "squares" and near and 1e-5 < ratio < 0.2:
        yield Found(standing.step, evidence=_tell(standing) | {"median_update_ratio": round_number(ratio)})


@rule(
    "V02",
    "loss-not-improving",
    severity="warning",
    watches="the loss against the best constant guess",
    threshold="after 300 steps the last 100 losses are worse than it, or as good while updates are not healthy",
    silent="any model that has learned something is better than a constant",
    hint="nothing is learned: overfit one batch first, then look at the learning rate, the loss and the labels",
    needs=("probe:objective", "scalar:loss", "steps:300"),
)
def loss_not_improving(case: Case) -> Iterator[Found]:
    """No progress at all after many steps."""
    standing = _compare_with_guess(case)
    if standing is None:
        raise NotJudged(
            "the loss is not a plain cross-entropy or squared error over 300 steps: no guess to compare with"
        )
    stuck = standing.recent > 0.98 * standing.early
    if standing.form == "squares":
        # Means of squares are noisy, that of the guess by the number of targets it was made from.
        room = standing.guess * max(0.05, 3 * math.sqrt(2 / standing.targets))
        if standing.recent > 0.9 * standing.early and abs(standing.recent - standing.guess) <= room:
            yield Found(standing.step, evidence=_tell(standing))
    elif standing.recent > 1.02 * standing.guess and stuck:
        yield Found(standing.step, evidence=_tell(standing))


def _tell(standing: _Standing) -> dict[str, Any]:
    return {
        "mean_loss": round_number(standing.recent),
        "loss_of_a_guess": round_number(standing.guess),
        "first_losses": round_number(standing.early),
    }


@rule(
    "V03",
    "loss-spike",
    severity="warning",
    watches="the loss against its own history",
    threshold="5 times the largest of the last 50 losses, 8 robust deviations of their logarithm above the median, and "
    "back within 5 steps",
    silent="noisy losses have a wide history; a new task stays; losses that change sign and several games are left out",
    hint="look at the batch that did it: an outlier, a wrong label, an empty or corrupted sample",
    needs=("scalar:loss", "steps:50"),
    explains=("V02",),
)
def loss_spike(case: Case) -> Iterator[Found]:
    """The loss jumps out of its own history."""
    loss = single_losses(case)
    if loss is None or len(loss) < 40 or not loss.is_positive:
        return
    # Nothing after the first NaN is a spike.
    finite = np.isfinite(loss.values)
    length = len(loss) if finite.all() else int(finite.argmin())
    if length < 40:
        return
    values = np.log(np.maximum(loss.values[:length], 1e-30))
    level = float(np.median(loss.values[:20]))
    highest = roll(values, 50, np.max)
    jumps = (values[1:] > highest[:-1] + math.log(5)) & (loss.values[1:length] > 0.2 * level)
    for at in (np.flatnonzero(jumps) + 1).tolist():
        before = values[max(0, at - 50) : at]
        middle = float(np.median(before))
        spread = max(1.4826 * float(np.median(np.abs(before - middle))), 0.05)
        if at >= 30 and values[at] - middle > 8 * spread and _comes_back(values, at, middle):
            step = int(loss.steps[at])
            yield Found(
                step,
                evidence={
                    "loss": round_number(float(loss.values[at])),
                    "median_before": round_number(math.exp(middle)),
                    **_name_batch(case, step),
                },
            )
            return


def _comes_back(values: NDArray[np.float64], at: int, middle: float) -> bool:
    """Return whether a loss is back soon: one that stays is another task (a curriculum), or has diverged."""
    after = values[at + 1 : at + 6]
    return len(after) >= 3 and float(np.median(after)) < (values[at] + middle) / 2


def _name_batch(case: Case, step: int) -> dict[str, Any]:
    for at, batch in case.batches:
        if at == step:
            found: dict[str, Any] = {"fingerprint": f"{batch.fingerprint:016x}"}
            found |= {"batch": batch.position} if batch.position >= 0 else {}
            return found | ({"indices": list(batch.indices[:8])} if batch.indices else {})
    return {}


_CLEARLY: Final = 4.0
"""Times the scatter of validation losses that a rise is to be: the best of many is below their level by chance."""

_VALIDATION: Final = re.compile(r"(^|[._/ -])(val|valid|validation|eval|dev|test)([._/ -]|$)", re.IGNORECASE)


def _evaluations(case: Case) -> Losses:
    """Return the validation losses: those the user logs, else those seen without gradients between steps."""
    for name, series in case.scalars.items():
        if "loss" in name.lower() and _VALIDATION.search(name) and len(series) > 1:
            return Losses(series.steps, series.values)
    notes = case.noted("evaluation")
    return Losses(
        np.array([note["at"] for note in notes], np.int64),
        np.array([note["loss"] for note in notes], np.float64),
    )


@rule(
    "V01",
    "overfitting",
    severity="warning",
    watches="validation losses and the training losses between them",
    threshold="the last three of four or more are 5 % above the best (of many, the last third above those around the "
    "best), by more than they scatter, and the training loss has fallen by 5 %, by more than by chance, below them",
    silent="it takes a trend over several evaluations, not a gap; a loss that comes down again is that of a new fold, "
    "one below the training loss that of a training made harder",
    hint="stop at the best evaluation, regularise, or get more data",
    needs=("scalar:loss",),
)
def overfitting(case: Case) -> Iterator[Found]:
    """The validation loss rises while the training loss falls."""
    seen, loss = _evaluations(case), single_losses(case)
    if len(seen) < 4:
        raise NotJudged(
            "fewer than four validation losses were seen; log them as val_loss or use a criterion module"
        )
    if (
        loss is None
        or not loss.is_positive
        or not (np.isfinite(seen.values).all() and (seen.values > 0).all())
    ):
        raise NotJudged("the losses cannot be compared")
    best = int(np.argmin(seen.values))
    if len(seen) - 1 - best < 3 or not _has_risen(seen.values, best):
        return
    then, now = _around(len(seen), best)
    ends = np.concatenate(([0], seen.steps))
    at_best = _between(loss, ends[then.start], ends[then.stop])
    at_end = _between(loss, ends[now.start], ends[now.stop])
    if _is_below(at_end, at_best) and at_end.mean() < seen.values[now].mean():
        yield Found(
            int(seen.steps[best]),
            evidence={
                "best_validation_loss": round_number(float(seen.values[best])),
                "last_validation_loss": round_number(float(seen.values[-1])),
                "training_loss_then": round_number(float(at_best.mean())),
                "training_loss_now": round_number(float(at_end.mean())),
                "evaluations": len(seen),
            },
        )


def _around(count: int, best: int) -> tuple[slice, slice]:
    """Return the evaluations around the best one and the last ones: of many, so many that noise averages out."""
    many = max(1, (count - 1 - best) // 3)
    start = max(0, best - many // 2)
    return slice(start, start + many), slice(count - max(many, 3), count)


def _has_risen(values: NDArray[np.float64], best: int) -> bool:
    """Return whether the last values are above those around the best by more than they scatter, and still are."""
    then, now = _around(len(values), best)
    last, lowest, highest = values[now], float(values[then].mean()), values[best:].max()
    # Of a curve without scatter, the change of its slope is small.
    scatter = float(np.median(np.abs(np.diff(values, 2)))) / 1.65 / math.sqrt(then.stop - then.start)
    is_clear = bool((values[-3:] > 1.05 * lowest).all()) and last.mean() - lowest > _CLEARLY * scatter
    return bool(is_clear and last.mean() > 1.05 * lowest and last.mean() >= (lowest + highest) / 2)


def _between(loss: Losses, start: int, end: int) -> NDArray[np.float64]:
    return loss.values[(loss.steps >= start) & (loss.steps <= end)]


def _is_below(some: NDArray[np.float64], others: NDArray[np.float64]) -> bool:
    """Return whether some losses are 5 % below others on average, and by more than such averages differ by chance."""
    if not len(some) or not len(others) or not some.mean() < 0.95 * others.mean():
        return False
    noise = math.sqrt(some.var() / len(some) + others.var() / len(others))
    return bool(others.mean() - some.mean() > 2 * noise)
