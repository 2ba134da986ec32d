"""How far two runs that should be equal are apart, tensor by tensor: the measure of what a difference means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clew.compare.diff_rows import match_rows, relative_errors
from clew.compare.diff_sides import join_sides
from clew.compare.tolerance import NOISE_FACTOR

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clew.compare.diff_rows import Rows
    from clew.compare.diff_sides import Sides
    from clew.query import Run


class NoiseLimits:
    """The error up to which a tensor counts as equal: its dtype's tolerance, or the noise so far if that is larger."""

    def __init__(self, noise: dict[int, tuple[NDArray[Any], NDArray[Any]]], tolerances: NDArray[Any]) -> None:
        self._noise = noise
        self._tolerances = tolerances

    def of(self, rows: Rows) -> NDArray[np.float64]:
        """Return the limit of each row."""
        limits: NDArray[np.float64] = self._tolerances[rows["pair"]].astype(np.float64)
        series = _series(rows["pair"], rows)
        for key in np.unique(series).tolist():
            known = self._noise.get(key)
            if known is None:
                continue
            chosen = np.flatnonzero(series == key)
            # Noise grows along a run: what counts is the most that was seen up to this step.
            place = np.searchsorted(known[0], rows["step"][chosen], side="right") - 1
            measured = np.where(place >= 0, known[1][np.maximum(place, 0)], 0.0)
            limits[chosen] = np.maximum(limits[chosen], NOISE_FACTOR * measured)
        return limits


def find_limits(sides: Sides, baseline: tuple[Run, Run], tolerances: NDArray[np.float64]) -> NoiseLimits:
    """Measure the noise between two runs that should be equal, for the tensors of a comparison."""
    between = join_sides(*baseline)
    rows = match_rows(between, with_stats=True)
    places = {pair.a: index for index, pair in enumerate(sides.pairs)}
    pairs = np.array([places.get(pair.a, -1) for pair in between.pairs], np.int64)[rows["pair"]]
    errors = relative_errors(rows)
    series = _series(pairs, rows)
    noise = {}
    order = np.lexsort((rows["step"], series))
    edges = np.flatnonzero(np.diff(series[order])) + 1
    for members in np.split(order, edges):
        if len(members) and pairs[members[0]] >= 0:
            steps, worst = rows["step"][members], np.maximum.accumulate(errors[members])
            noise[int(series[members[0]])] = (steps, worst)
    return NoiseLimits(noise, tolerances)


def _series(pairs: NDArray[np.int64], rows: Rows) -> NDArray[np.int64]:
    """Return one number for each tensor that is recorded again and again."""
    key = pairs.astype(np.int64)
    for name, size in (("kind", 16), ("ordinal", 64), ("mode", 2)):
        key = key * size + rows[name]
    return key
