"""What can be said of a numpy array at a glance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from clew.model.schema import STAT_NAMES
from clew.model.value import ValueFacts
from clew.stats import reference

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMALL: Final = 8
"""A value of at most so many elements is told in full."""


def examine_array(array: NDArray[Any]) -> ValueFacts:
    """Return form and numbers of an array; one of text or objects has no numbers."""
    if array.dtype.kind not in "biufc":
        return ValueFacts("numpy", array.shape, str(array.dtype), array.nbytes, note="not numbers")
    row = reference.summarise(array)
    return ValueFacts(
        kind="numpy",
        shape=array.shape,
        dtype=str(array.dtype),
        bytes=array.nbytes,
        stats=dict(zip(STAT_NAMES, row.tolist(), strict=True)),
        entries=tuple(array.reshape(-1).tolist()) if array.size <= SMALL else None,
    )
