"""Rows of a step put together for the record: unseen ones left out, very many calls of one module merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from clew.model.schema import KIND_INDEX
from clew.stats import reference, spec

if TYPE_CHECKING:
    from numpy.typing import NDArray

SITE_SHIFT: Final = 32
KIND_SHIFT: Final = 24
MODE_SHIFT: Final = 16
ORDINAL_MASK: Final = 0xFFFF
"""A row's key is one integer: site, kind, mode and ordinal side by side."""

_GRAD: Final = KIND_INDEX["grad"]

DROPPED: Final = -1
"""The key of a row that could not be measured."""


class Columns(NamedTuple):
    """Keys and numbers of the rows of one step."""

    keys: NDArray[np.int64]
    values: NDArray[np.float64]
    hashes: NDArray[np.uint64] | None
    hists: NDArray[np.uint32] | None

    def select(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Columns:
        """Return some of the rows."""
        return Columns(
            self.keys[rows],
            self.values[rows],
            None if self.hashes is None else self.hashes[rows],
            None if self.hists is None else self.hists[rows],
        )


class Layout:
    """Which row is what, decoded from the keys; a loop leaves the same rows step after step, so it is kept."""

    __slots__ = (
        "copies",
        "grads",
        "keys",
        "kinds",
        "modes",
        "ordinals",
        "packed",
        "sites",
    )

    def __init__(self, keys: list[int], copies: list[tuple[int, int]]) -> None:
        self.keys = keys
        self.copies = copies
        self.packed = np.array(keys, dtype=np.int64)
        self.decode(self.packed)

    def decode(self, packed: NDArray[np.int64]) -> None:
        """Take the parts of the keys apart."""
        self.sites = (packed >> SITE_SHIFT).astype(np.int32)
        self.kinds = (packed >> KIND_SHIFT & 0xFF).astype(np.int8)
        self.modes = (packed >> MODE_SHIFT & 0xFF).astype(np.int8)
        self.ordinals = (packed & ORDINAL_MASK).astype(np.int16)
        self.grads = np.flatnonzero(self.kinds == _GRAD)

    def fits(self, keys: list[int], copies: list[tuple[int, int]]) -> bool:
        """Return whether a step left the same rows."""
        return keys == self.keys and copies == self.copies


def drop_unseen(columns: Columns) -> Columns:
    """Leave out the rows that could not be measured."""
    seen = columns.keys != DROPPED
    return columns if seen.all() else columns.select(seen)


def merge_repeats(columns: Columns) -> Columns:
    """Merge rows of the same key into the first of them, as if their tensors had been measured as one."""
    _, first, group = np.unique(columns.keys, return_index=True, return_inverse=True)
    order = np.argsort(group, kind="stable")
    ends = np.cumsum(np.bincount(group))
    for members in np.split(order, ends[:-1]):
        if len(members) > 1:
            _merge_rows(columns, members)
    return columns.select(np.sort(first))


def _merge_rows(columns: Columns, members: NDArray[np.intp]) -> None:
    columns.values[members[0]] = reference.merge(columns.values[members])
    if columns.hists is not None:
        columns.hists[members[0]] = reference.merge_histograms(columns.hists[members])
    if columns.hashes is not None:
        chained = int(columns.hashes[members[0]])
        for member in members[1:]:
            chained = spec.chain(chained, int(columns.hashes[member]))
        columns.hashes[members[0]] = chained
