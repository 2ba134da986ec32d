"""From a long series to the few buckets a curve can show."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from clew.views.block import Curve

if TYPE_CHECKING:
    from collections.abc import Sequence

BUCKETS = 120
"""More than a terminal is wide in half columns, few enough to send anywhere."""


def thin(title: str, steps: Sequence[int], values: Sequence[float], *, buckets: int = BUCKETS) -> Curve:
    """Return a curve of at most ``buckets`` buckets of equally many steps; a jump is never averaged away.

    ``steps`` ascend. A run that was thinned has gaps between them: empty buckets are left out.
    """
    starts: list[int] = []
    low: list[float | None] = []
    mean: list[float | None] = []
    high: list[float | None] = []
    nonfinite = []
    for begin, end in itertools.pairwise(_cut(steps, buckets)):
        finite = [float(value) for value in values[begin:end] if math.isfinite(value)]
        starts.append(int(steps[begin]))
        low.append(min(finite, default=None))
        # Divided before the sum: values near the end of the float range would overflow it.
        mean.append(sum(value / len(finite) for value in finite) if finite else None)
        high.append(max(finite, default=None))
        if len(finite) < end - begin:
            nonfinite.append(int(steps[begin]))
    return Curve(
        title=title,
        steps=tuple(starts),
        low=tuple(low),
        mean=tuple(mean),
        high=tuple(high),
        nonfinite=tuple(nonfinite),
        scale=choose_scale([value for value in (*low, *high) if value is not None]),
        last_step=int(steps[-1]) if len(steps) else 0,
    )


def _cut(steps: Sequence[int], buckets: int) -> list[int]:
    """Return the positions where a new bucket begins, and the end."""
    if not len(steps):
        return []
    first, span = steps[0], max(steps[-1] - steps[0] + 1, 1)
    numbers = [(step - first) * buckets // span for step in steps] if span > buckets else list(steps)
    cuts = [index for index in range(1, len(steps)) if numbers[index] != numbers[index - 1]]
    return [0, *cuts, len(steps)]


def choose_scale(values: Sequence[float]) -> str:
    """Return ``log`` for positive values over more than two decades, else ``linear``."""
    if not values or min(values) <= 0:
        return "linear"
    return "log" if max(values) / min(values) > 100 else "linear"
