"""Quantiles of recorded tensors from their histograms, for many steps at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clew.model.schema import STAT_NAMES
from clew.query import merge
from clew.stats import reference
from clew.store import histogram

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


def quantiles(columns: Mapping[str, Any], q: float) -> NDArray[np.float64]:
    """Return the quantile of each row from its statistics and packed histogram."""
    counts = histogram.unpack(*columns["hist"])
    rows = np.stack([merge.derive(columns, name) for name in STAT_NAMES], axis=1)
    return np.array([reference.quantile(hist, row, q) for hist, row in zip(counts, rows, strict=True)])
