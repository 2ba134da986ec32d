"""Numbers that several rules ask for: losses by optimizer, how far a step moves the weights, relative gradients."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from clew.model.schema import STAT_INDEX

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from clew.doctor.case import Case
    from clew.doctor.window import Rows
    from clew.model.record import Site

_L2: Final = STAT_INDEX["l2"]
HALF: Final = ("float16", "bfloat16")


class Losses(NamedTuple):
    """The loss of each step, several of one step averaged; all steps belong to one optimizer (or several at once)."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def is_positive(self) -> bool:
        """Whether ratios of losses mean something: no loss is negative, the finite ones are not all zero."""
        finite = self.values[np.isfinite(self.values)]
        return bool(len(finite)) and bool((finite >= 0).all()) and bool((finite > 0).any())


def losses(case: Case) -> list[Losses]:
    """Return the losses apart for each set of optimizers that step together: a GAN's two games are not one series."""
    found: list[Losses] = case.remember("losses", _split_losses)
    return found


def single_losses(case: Case) -> Losses | None:
    """Return the losses of a loop with one kind of step, or None where there are several."""
    found = losses(case)
    return found[0] if len(found) == 1 else None


def _split_losses(case: Case) -> list[Losses]:
    series, rates = case.named("loss"), case.named("lr")
    if len(series) == 1 and all(len(each) == case.steps for _, each in (*series, *rates)):
        return [Losses(series[0][1].steps, series[0][1].values)]
    sums: dict[int, list[float]] = {}
    for _, each in series:
        for step, value in zip(each.steps.tolist(), each.values.tolist(), strict=True):
            sums.setdefault(step, []).append(value)
    owners: dict[int, list[str]] = {}
    for label, each in rates:
        for step in each.steps.tolist():
            owners.setdefault(step, []).append(label)
    groups: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for step in sorted(sums):
        values = sums[step]
        groups.setdefault(tuple(owners.get(step, ())), []).append((step, sum(values) / len(values)))
    if len(groups) > 1:
        # The last backward before the end belongs to no step: not a kind of loop of its own.
        groups.pop((), None)
    return [
        Losses(np.array([s for s, _ in points], np.int64), np.array([v for _, v in points]))
        for points in groups.values()
    ]


def learning_rate(case: Case) -> Losses:
    """Return the highest learning rate of each step."""
    found: Losses = case.remember("highest lr", _find_rates)
    return found


def _find_rates(case: Case) -> Losses:
    groups = case.named("lr")
    if not groups:
        return Losses(np.zeros(0, np.int64), np.zeros(0))
    if all(len(each) == len(groups[0][1]) for _, each in groups):
        return Losses(groups[0][1].steps, np.max([each.values for _, each in groups], axis=0))
    highest: dict[int, float] = {}
    for _, series in groups:
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            highest[step] = max(value, highest.get(step, value))
    steps = sorted(highest)
    return Losses(np.array(steps, np.int64), np.array([highest[step] for step in steps], np.float64))


class Ratios(NamedTuple):
    """Of weights with two or more dimensions: the size of something relative to the weight, row by row."""

    steps: NDArray[np.int64]
    sites: NDArray[np.int32]
    values: NDArray[np.float64]

    def take(self, which: NDArray[np.bool_]) -> Ratios:
        """Return some of the rows."""
        return Ratios(self.steps[which], self.sites[which], self.values[which])

    def by_site(self, reduce: Callable[[list[float]], float] = median) -> dict[int, float]:
        """Return the median of each site, or what else its values are reduced to."""
        groups: dict[int, list[float]] = {}
        for site, value in zip(self.sites.tolist(), self.values.tolist(), strict=True):
            groups.setdefault(site, []).append(value)
        return {site: reduce(values) for site, values in groups.items()}

    @property
    def middle(self) -> float:
        """The median weight's median."""
        return median(self.by_site().values())


def weight_ratios(case: Case, kind: str, *, first: int | None = None, last: int | None = None) -> Ratios:
    """Return l2(update or grad) / l2(param) of every weight matrix in some recorded steps."""
    key = f"ratios {kind} {first} {last}"
    found: Ratios = case.remember(key, lambda each: _make_ratios(each, kind, first=first, last=last))
    return found


def _make_ratios(case: Case, kind: str, *, first: int | None, last: int | None) -> Ratios:
    above = case.rows(kind, first=first, last=last, mode=None)
    below = case.rows("param", first=first, last=last, mode=None)
    matrices: NDArray[np.bool_] = case.remember("matrices", _find_matrices)
    if not len(above) or not len(below):
        return Ratios(above.steps[:0], above.sites[:0], above.values[:0, 0])
    above = above.take(matrices[above.sites])
    keys, wanted = _keys(below), _keys(above)
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    weights = below.values[order[at], _L2]
    fits = (keys[order[at]] == wanted) & (weights > 0) & np.isfinite(above.values[:, _L2])
    return Ratios(above.steps[fits], above.sites[fits], above.values[fits, _L2] / weights[fits])


def _find_matrices(case: Case) -> NDArray[np.bool_]:
    return np.array(
        [is_matrix(case.sites.get(site)) for site in range(max(case.sites, default=-1) + 1)], bool
    )


def _keys(rows: Rows) -> NDArray[np.int64]:
    return rows.steps * (1 << 31) + rows.sites


def is_matrix(site: Site | None) -> bool:
    """Return whether a site is a trainable weight of two or more dimensions."""
    return site is not None and site.role == "parameter" and site.trainable and len(site.shape) > 1


def skipped_steps(case: Case) -> set[int]:
    """Return the steps that a GradScaler left out."""
    series = case.scalar("scaler.skipped")
    return set(series.steps[series.values > 0].tolist())


def roll(values: NDArray[np.float64], length: int, reduce: Any) -> NDArray[np.float64]:
    """Return a reduction over each value and those before it, up to a number of them."""
    padded = np.concatenate([np.full(length - 1, values[0]), values])
    windows = np.lib.stride_tricks.sliding_window_view(padded, length)
    result: NDArray[np.float64] = reduce(windows, axis=1)
    return result


def round_number(value: float) -> float:
    """Return a number with four significant digits, as evidence is told."""
    return float(f"{value:.4g}")
