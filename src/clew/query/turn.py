"""Optimizers that take turns, as a GAN's two do: which steps are whose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from clew.query.table import Series

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clew.query.run import Run

_FEWEST_CHANGES: Final = 3
"""A, B, A, B: one that follows another for good, say after a warm-up, goes on with the same training."""
_MOST_NAMES: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The steps of one of the optimizers, or of some that always step together, and what they train."""

    name: str
    steps: NDArray[np.int64]


def find_turns(run: Run, *, rank: int = 0) -> list[Turn]:
    """Return whose steps are whose, in order of their first; nothing where all optimizers step together."""
    rates = run.scalars("lr", rank=rank)
    if len(rates) < 2:
        return []
    steps = np.unique(np.concatenate([each.steps for each in rates.values()]))
    has_stepped = np.stack([np.isin(steps, each.steps) for each in rates.values()])
    owner = _find_owners(has_stepped)
    which = owner[np.argmax(has_stepped, axis=0)]
    if np.count_nonzero(np.diff(which)) < _FEWEST_CHANGES:
        return []
    numbers = list(dict.fromkeys(which.tolist()))
    owned = [steps[which == number] for number in numbers]
    plain = [list(rates)[number] for number in numbers]
    names = [_name(run, each, rank) for each in owned]
    is_telling = all(names) and len(set(names)) == len(names)
    return [Turn(name, each) for name, each in zip(names if is_telling else plain, owned, strict=True)]


def _find_owners(has_stepped: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each learning rate, given the steps that have it, the first of those that ever share a step."""
    owner = np.arange(len(has_stepped))
    for kind in np.unique(has_stepped, axis=1).T:
        together = np.unique(owner[kind])
        owner[np.isin(owner, together)] = together[0]
    return owner


def _name(run: Run, steps: NDArray[np.int64], rank: int) -> str:
    """Return what the steps train: the place in the model, or the models, that hold all of its parameters."""
    marks = run.scalars("clew.recorded", rank=rank).get("clew.recorded")
    recorded = steps if marks is None else np.intersect1d(steps, marks.steps[marks.values > 0])
    if not len(recorded):
        return ""
    # Parameters that no optimizer holds may have rows there, too, but no updates.
    kinds: tuple[str, ...] = ("update",) if run.find(kind="update") else ("param", "grad")
    rows = run.stats(kind=kinds, step=int(recorded[-1]), rank=rank, columns=("count",))
    paths = [site.split(".")[:-1] for site in dict.fromkeys(rows["site"].tolist())]
    common = paths[0] if paths else []
    for path in paths:
        common = [a for a, b in zip(common, path, strict=False) if a == b]
    if common:
        return ".".join(common)
    tops = list(dict.fromkeys(path[0] for path in paths if path))
    return " and ".join(tops) if len(tops) <= _MOST_NAMES else ""


def tell_losses_apart(run: Run, *, rank: int = 0) -> dict[str, Series]:
    """Return the losses by name, those of optimizers that take turns each by what it trains."""
    losses = {name: each for name, each in run.scalars("loss", rank=rank).items() if len(each)}
    turns = find_turns(run, rank=rank)
    if not turns:
        return losses
    found: dict[str, Series] = {}
    for turn in turns:
        for name, series in losses.items():
            _keep(found, f"{name} of {turn.name}", series, np.isin(series.steps, turn.steps))
    owned = np.concatenate([turn.steps for turn in turns])
    for name, series in losses.items():  # of a step that did not come to its end
        _keep(found, name, series, ~np.isin(series.steps, owned))
    return found


def _keep(found: dict[str, Series], name: str, series: Series, chosen: NDArray[np.bool_]) -> None:
    if chosen.any():
        found[name] = Series(name, series.steps[chosen], series.values[chosen])
