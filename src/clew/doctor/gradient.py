"""Gradients that vanish on their way down, or leave their own history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from clew.doctor.measure import is_matrix, roll, round_number, single_losses, weight_ratios
from clew.doctor.rule import Found, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from clew.doctor.case import Case
    from clew.doctor.measure import Losses

_FIRST: Final = 20
_FULL: Final = 0.01
_ORDERS: Final = 5
_SMALLEST: Final = -2
"""Of gradients that grow little by little, by so many powers of ten from one that is no smaller than this."""
_FLAT_STEPS: Final = 14
"""Outputs that are all the same, or units that are dead, are told of after 10: these would be the cause."""


@rule(
    "N08",
    "vanishing-gradient",
    severity="warning",
    watches="gradient over weight of every matrix, in order of execution",
    threshold="median of the first layer below 1e-6 and of the second below 1e-5 of the largest, over 10 steps",
    silent="in healthy models the first layer has at least 0.6 % of the largest",
    hint="use residual connections, a normalisation layer, ReLU instead of sigmoid, or a larger initialisation",
    until=20,
    needs=("kind:grad", "kind:param", "steps:10"),
    explains=("V02", "O09", "M20"),
)
def vanishing_gradient(case: Case) -> Iterator[Found]:
    """Gradients vanish before they reach the first layers."""
    ratios = weight_ratios(case, "grad", first=_FIRST)
    if len(np.unique(ratios.steps)) < 10:
        return
    medians = ratios.by_site()
    for root in dict.fromkeys(case.sites[site].root for site in medians):
        layers = _in_order(case, [site for site in medians if case.sites[site].root == root])
        if len(layers) < 3:
            continue
        values = [medians[site] for site in layers]
        largest = max(values)
        if largest > 0 and values[0] < 1e-6 * largest and values[1] < 1e-5 * largest:
            if values[0] == 0 and next(value for value in values if value > 0) > _FULL * largest:
                continue  # from nothing to full size in one layer: what vanishes is small before it is 0
            yield Found(
                int(ratios.steps[0]),
                site=case.name(layers[0]),
                evidence={
                    "first_layer": values[0],
                    "second_layer": values[1],
                    "largest": round_number(largest),
                    "at": case.name(layers[int(np.argmax(values))]),
                },
            )
            return


class FlatStart(NamedTuple):
    """Layers that run first and get gradients of exactly 0."""

    step: int
    steps: int
    layers: int
    last: str
    following: str


def find_flat_start(case: Case) -> FlatStart | None:
    """Return the layers that run first where their gradients are 0 in every step, and those of the next one are not.

    Gradients that vanish from layer to layer are small long before they are 0; here they are of full size in one layer
    and nothing in the one before.
    """
    if not {"grad", "param"} <= set(case.kinds):
        return None
    ratios = weight_ratios(case, "grad", first=_FIRST)
    if len(np.unique(ratios.steps)) < _FLAT_STEPS:
        return None
    medians, largest = ratios.by_site(), ratios.by_site(max)
    for root in dict.fromkeys(case.sites[site].root for site in medians):
        layers = _in_order(case, [site for site in medians if case.sites[site].root == root])
        count = next((at for at, site in enumerate(layers) if largest[site] > 0), len(layers))
        if not 0 < count < len(layers) or any(largest[site] == 0 for site in layers[count:]):
            continue  # layers further on without a gradient: a loss that does not count yet
        is_full = medians[layers[count]] > _FULL * max(medians.values())
        if is_full and _follows(case, layers[count], layers[count - 1]):
            last, following = case.name(layers[count - 1]), case.name(layers[count])
            return FlatStart(int(ratios.steps[0]), len(np.unique(ratios.steps)), count, last, following)
    return None


def _follows(case: Case, weight: int, before: int) -> bool:
    """Return whether a layer can only take what another one gives: no gate beside it, which has the same inputs."""
    inputs, others = case.sites[weight].shape[1], case.sites[before].shape
    return inputs != others[1] and inputs % others[0] == 0


def _in_order(case: Case, weights: list[int]) -> list[int]:
    """Return weights in the order their modules run; embeddings, which get sparse gradients, are left out."""

    def order(site: int) -> tuple[int, int]:
        parent = case.sites.get(case.sites[site].parent)
        return (parent.order if parent is not None and parent.order >= 0 else case.sites[site].order, site)

    kept = [site for site in weights if is_matrix(case.sites.get(site)) and not _is_embedding(case, site)]
    return sorted(kept, key=order)


def _is_embedding(case: Case, site: int) -> bool:
    parent = case.sites.get(case.sites[site].parent)
    return parent is not None and "Embedding" in parent.type


@rule(
    "N06",
    "exploding-gradient",
    severity="warning",
    watches="grad_norm against its own history",
    threshold="three recorded steps in a row 100 times and 8 robust deviations above the median, and a worse loss; or "
    "100,000 times the first norms, and a loss that is no better",
    silent="a single spike, or a norm that clipping handles, is no explosion",
    hint="clip the gradient norm, lower the learning rate, or look at the layer where the growth starts",
    needs=("scalar:grad_norm", "steps:20"),
    explains=("V03", "N01", "N02", "N03"),
)
def exploding_gradient(case: Case) -> Iterator[Found]:
    """The gradient norm leaves its own history."""
    norms = case.scalar("grad_norm")
    loss = single_losses(case)
    if "clip.limit" in case.scalars or "scaler.scale" in case.scalars or loss is None or len(norms) < 15:
        return
    values = np.log10(np.maximum(norms.values, 1e-30))
    good = np.isfinite(values)
    # What ends in NaN has no third step to show.
    needed = 3 if good.all() else 2
    values, steps = values[good], norms.steps[good]
    if len(values) < 10 + needed:
        return
    yield from _find_sudden(case, loss, steps, values, needed) or _find_gradual(case, loss, steps, values)


def _find_gradual(
    case: Case, loss: Losses, steps: NDArray[np.int64], values: NDArray[np.float64]
) -> list[Found]:
    """Norms that have grown by orders of magnitude little by little; optimizers that divide by them hide that."""
    first = float(np.median(values[:_FIRST]))
    # Before anything was there to learn from, gradients may be nothing at all.
    far = np.flatnonzero(values > max(first, _SMALLEST) + _ORDERS)
    if len(far) < 3 or far[-1] != len(values) - 1 or not _is_no_better(loss, int(steps[far[0]])):
        return []
    evidence = {
        "grad_norm": round_number(float(10 ** values[-1])),
        "first_norms": round_number(float(10**first)),
    }
    at = int(steps[far[0]])
    return [Found(at, site=_find_growth(case, at), evidence=evidence)]


def _is_no_better(loss: Losses, step: int) -> bool:
    first, after = loss.values[:_FIRST], loss.values[loss.steps >= step]
    return bool(len(after)) and not float(np.median(after)) < 0.5 * abs(float(np.median(first)))


def _find_sudden(
    case: Case, loss: Losses, steps: NDArray[np.int64], values: NDArray[np.float64], needed: int
) -> list[Found]:
    # The median is no lower than the lowest: most steps need no closer look.
    lowest = roll(values, 50, np.min)
    for at in (np.flatnonzero(values[1:] > lowest[:-1] + 2) + 1).tolist():
        if not 10 <= at <= len(values) - needed:
            continue
        before, last = values[max(0, at - 50) : at], values[at : at + needed]
        middle = float(np.median(before))
        spread = max(1.4826 * float(np.median(np.abs(before - middle))), 0.15)
        if (last > middle + max(2, 8 * spread)).all() and _is_worse(loss, int(steps[at])):
            evidence = {
                "grad_norm": round_number(float(10 ** last[0])),
                "median_before": round_number(float(10**middle)),
            }
            return [Found(int(steps[at]), site=_find_growth(case, int(steps[at])), evidence=evidence)]
    return []


def _is_worse(loss: Losses, step: int) -> bool:
    before, after = loss.values[loss.steps < step], loss.values[loss.steps >= step]
    if not len(before) or not len(after):
        return False
    return not float(np.median(after[:5])) < 1.5 * abs(float(np.median(before[-50:])))


def _find_growth(case: Case, step: int) -> str:
    """Return the weight whose gradient grew the most against its own median."""
    growth: dict[int, float] = {}
    moved = case.by_site("update", mode=None)
    for number, rows in case.by_site("grad", mode=None).items():
        if moved and number not in moved:
            continue  # nobody clears the gradients of what no optimizer holds
        before, now = rows.stat("l2")[rows.steps < step], rows.stat("l2")[rows.steps >= step]
        if len(before) and len(now) and np.median(before) > 0:
            growth[number] = float(now[0] / np.median(before))
    return case.name(max(growth, key=lambda site: growth[site])) if growth else ""
