"""Rows of a step put together for the record: unseen ones left out, very many calls of one module merged."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from clew.model.schema import KIND_INDEX
from clew.stats import reference, spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

SITE_SHIFT: Final = 32
KIND_SHIFT: Final = 24
MODE_SHIFT: Final = 16
ORDINAL_MASK: Final = 0xFFFF
"""A row's key is one integer: site, kind, mode and ordinal side by side."""
MODE_MASK: Final = 0x7F
OUTSIDE: Final = 1 << 23
"""Beside the mode: the gradient of a parameter that no optimizer holds."""

_GRAD: Final = KIND_INDEX["grad"]

DROPPED: Final = -1
"""The key of a row that is left out: it could not be measured, or another was measured in its place."""

MAX_CALLS: Final = 16
"""Calls of one module in a step that are told apart; later ones are merged into the last."""


class _Recorder(Protocol):
    keys: list[int]

    @property
    def lock(self) -> AbstractContextManager[Any]: ...


class Latest:
    """What may be measured several times in a step, and of which the last time stands."""

    def __init__(self) -> None:
        self.rows: dict[object, range] = {}
        """The rows of each such thing in the step that goes on."""

    @contextmanager
    def measuring(self, what: object, recorder: _Recorder) -> Iterator[None]:
        """Leave out the rows that were measured of this thing before; those measured inside stand for it."""
        with recorder.lock:
            first = self.forget(what, recorder.keys)
            yield
            self.rows[what] = range(first, len(recorder.keys))

    def forget(self, what: object, keys: list[int]) -> int:
        """Leave out the rows that were measured of this thing before; return where new ones begin."""
        if what in self.rows:
            for row in self.rows[what]:
                keys[row] = DROPPED
        return len(keys)


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
        "grads_at",
        "is_plain",
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
        told = tell_apart(keys)
        self.is_plain = DROPPED not in keys and len(set(told)) == len(told)
        """Whether no rows are to be left out or merged."""
        self.packed = np.array(told, dtype=np.int64)
        self.decode(self.packed)

    def decode(self, packed: NDArray[np.int64]) -> None:
        """Take the parts of the keys apart."""
        self.sites = (packed >> SITE_SHIFT).astype(np.int32)
        self.kinds = (packed >> KIND_SHIFT & 0xFF).astype(np.int8)
        self.modes = (packed >> MODE_SHIFT & MODE_MASK).astype(np.int8)
        self.ordinals = (packed & ORDINAL_MASK).astype(np.int16)
        # Each tensor once; and what nobody uses is in no norm: it is not cleared either, and grows from step to step.
        used = (self.ordinals == 0) & (packed & OUTSIDE == 0)
        self.grads = np.flatnonzero((self.kinds == _GRAD) & used)
        self.grads_at = self.grads.ctypes.data

    def fits(self, keys: list[int], copies: list[tuple[int, int]]) -> bool:
        """Return whether a step left the same rows."""
        return keys == self.keys and copies == self.copies


def tell_apart(keys: list[int]) -> list[int]:
    """Give a row whose key was there before the next free ordinal: no two rows of a step share their key.

    So it is with a gradient that comes to an output again, as in double backward, and with a parameter of two
    optimizers. Rows of the last ordinal are many calls and stay together.
    """
    taken = set(keys)
    if len(taken) == len(keys):
        return keys
    seen, told = set(), []
    for key in keys:
        if key in seen and key != DROPPED:
            key = _find_free(key, taken)  # noqa: PLW2901 - the same row
            taken.add(key)
        seen.add(key)
        told.append(key)
    return told


def _find_free(key: int, taken: set[int]) -> int:
    last = (key & ~ORDINAL_MASK) + MAX_CALLS - 1
    return next((free for free in range(key + 1, last) if free not in taken), last)


def drop_unseen(columns: Columns) -> Columns:
    """Leave out the rows that were dropped."""
    seen = columns.keys != DROPPED
    return columns if seen.all() else columns.select(seen)


def merge_repeats(columns: Columns) -> Columns:
    """Merge rows of the same key into the first of them, as if their tensors had been measured as one."""
    _, first, group = np.unique(columns.keys, return_index=True, return_inverse=True)
    if len(first) == len(columns.keys):
        return columns
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
