"""Rows of a step put together for the record: unseen ones left out, very many calls of one module merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from clew.stats import reference

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


def copy_rows(columns: Columns, copies: list[tuple[int, int]]) -> None:
    """Fill rows that repeat an earlier row: several sites, one tensor."""
    to, source = np.array(copies, dtype=np.intp).T
    columns.values[to] = columns.values[source]
    if columns.hashes is not None:
        columns.hashes[to] = columns.hashes[source]
    if columns.hists is not None:
        columns.hists[to] = columns.hists[source]


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
            chained = reference.chain(chained, int(columns.hashes[member]))
        columns.hashes[members[0]] = chained
