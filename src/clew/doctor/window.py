"""What the doctor keeps of a long run: its beginning and its newest part, within a fixed amount of memory."""

from __future__ import annotations

from array import array
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from clew.model.record import new_tuple
from clew.model.schema import STAT_INDEX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from clew.model.record import StepRecord, StretchRows

T = TypeVar("T")

HEAD_STEPS: Final = 64
TAIL_STEPS: Final = 64
LEAST_STEPS: Final = 20
MOST_BYTES: Final = 96 << 20
"""Rows of recorded steps: so many at either end of the run, fewer when a step has very many rows."""

SERIES_LENGTH: Final = 4096
_MOST_NUMBERS: Final = 4 * SERIES_LENGTH


class Ends(Generic[T]):
    """The first and the last things of a long sequence; ``total`` counts those in between as well."""

    def __init__(self, head: int, tail: int) -> None:
        self._most = head
        self.head: list[T] = []
        self.tail: deque[T] = deque(maxlen=tail)
        self.total = 0

    def add(self, thing: T) -> None:
        """Take the next thing."""
        self.total += 1
        if len(self.head) < self._most:
            self.head.append(thing)
        else:
            self.tail.append(thing)

    def __iter__(self) -> Iterator[T]:
        yield from self.head
        yield from self.tail

    def __len__(self) -> int:
        return len(self.head) + len(self.tail)

    def last(self, number: int) -> list[T]:
        """Return the newest things, the oldest of them first."""
        if number <= len(self.tail):
            return list(islice(self.tail, len(self.tail) - number, None))
        missing = number - len(self.tail)
        return [*self.head[max(len(self.head) - missing, 0) :], *self.tail]


class Series:
    """One number over the steps: all of them, or the first and last few thousand of very many."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._values = array("d")
        self.add_step, self.add_value = self._steps.append, self._values.append
        """Take the number of a step, in two calls of C; whoever adds very many shortens now and then."""

    def extend(self, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Take the numbers of several steps."""
        self._steps.frombytes(steps.tobytes())
        self._values.frombytes(values.tobytes())
        self.shorten()

    def __len__(self) -> int:
        return len(self._steps)

    def shorten(self) -> None:
        """Let go of the middle where there are very many."""
        if len(self._steps) > _MOST_NUMBERS:
            for column in (self._steps, self._values):
                del column[SERIES_LENGTH:-SERIES_LENGTH]

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps that are kept."""
        return np.array(self._steps)

    @property
    def values(self) -> NDArray[np.float64]:
        """The numbers that are kept, one for each of ``steps``."""
        return np.array(self._values)


class Rows(NamedTuple):
    """Rows of one kind over several steps, in order of execution; ``values`` has one column per statistic."""

    steps: NDArray[np.int64]
    sites: NDArray[np.int32]
    ordinals: NDArray[np.int16]
    values: NDArray[np.float64]
    hashes: NDArray[np.uint64] | None

    def __len__(self) -> int:
        return len(self.steps)

    def stat(self, name: str) -> NDArray[np.float64]:
        """Return one statistic of every row."""
        column: NDArray[np.float64] = self.values[:, STAT_INDEX[name]]
        return column

    def take(self, which: NDArray[Any]) -> Rows:
        """Return the rows of a mask or of row numbers."""
        hashes = None if self.hashes is None else self.hashes[which]
        return Rows(self.steps[which], self.sites[which], self.ordinals[which], self.values[which], hashes)

    def by_site(self) -> dict[int, Rows]:
        """Return the rows of each site, sites in order of their first row."""
        if not len(self):
            return {}
        order = np.argsort(self.sites, kind="stable")
        edges = np.flatnonzero(np.diff(self.sites[order])) + 1
        groups = sorted(np.split(order, edges), key=lambda rows: int(rows[0]))
        return {int(self.sites[rows[0]]): self.take(rows) for rows in groups}


class Kept(NamedTuple):
    """The rows of one step without what the doctor does not use."""

    step: int
    sites: NDArray[np.int32]
    kinds: NDArray[np.int8]
    ordinals: NDArray[np.int16]
    modes: NDArray[np.int8]
    values: NDArray[np.float64]
    hashes: NDArray[np.uint64] | None

    @classmethod
    def of(cls, record: StepRecord) -> Kept:
        """Keep the rows of a record; its histograms are let go."""
        rows = (record.sites, record.kinds, record.ordinals, record.modes, record.values, record.hashes)
        return new_tuple(cls, (record.step, *rows))

    @classmethod
    def each_of(cls, first: int, rows: StretchRows) -> list[Kept]:
        """Keep the rows of several steps in a row."""
        same = (rows.sites, rows.kinds, rows.ordinals, rows.modes)
        hashes = [None] * len(rows.values) if rows.hashes is None else rows.hashes
        pairs = zip(rows.values, hashes, strict=True)
        return [new_tuple(cls, (step, *same, *pair)) for step, pair in enumerate(pairs, first)]


class Selector:
    """Finds the rows of a kind in a step; a loop leaves the same rows step after step, so the answer is kept."""

    def __init__(self) -> None:
        self._kinds: NDArray[np.int8] | None = None
        self._modes: NDArray[np.int8] | None = None
        self._known: dict[tuple[int, int | None], NDArray[np.intp]] = {}

    def select(self, kept: Kept, kind: int, mode: int | None) -> Rows:
        """Return the rows of a kind and a mode (None for both)."""
        if kept.kinds is not self._kinds or kept.modes is not self._modes:
            self._kinds, self._modes = kept.kinds, kept.modes
            self._known.clear()
        rows = self._known.get((kind, mode))
        if rows is None:
            chosen = kept.kinds == kind
            rows = np.flatnonzero(chosen if mode is None else chosen & (kept.modes == mode))
            self._known[kind, mode] = rows
        hashes = None if kept.hashes is None else kept.hashes[rows]
        steps = np.full(len(rows), kept.step, np.int64)
        return Rows(steps, kept.sites[rows], kept.ordinals[rows], kept.values[rows], hashes)


class StepWindow:
    """The rows of the first and of the newest recorded steps."""

    def __init__(self) -> None:
        self._head: list[Kept] = []
        self._tail: deque[Kept] = deque()
        self.total = 0

    def add(self, steps: Sequence[Kept]) -> None:
        """Keep the rows of recorded steps, which have as many each, and let older ones in the middle go."""
        self.total += len(steps)
        most = MOST_BYTES // max(steps[0].values.nbytes, 1) // 2
        room = 0 if self._tail else max(max(LEAST_STEPS, min(HEAD_STEPS, most)) - len(self._head), 0)
        self._head += steps[:room]
        self._tail += steps[room:]
        while len(self._tail) > max(LEAST_STEPS, min(TAIL_STEPS, most)):
            self._tail.popleft()

    def __len__(self) -> int:
        return len(self._head) + len(self._tail)

    def choose(self, first: int | None, last: int | None) -> list[Kept]:
        """Return the first so many recorded steps, or the last so many, or all that are kept."""
        if first is not None:
            return [*self._head, *self._tail][:first]
        kept = [*self._head, *self._tail]
        return kept if last is None else kept[max(len(kept) - last, 0) :]


def join(pieces: list[Rows]) -> Rows:
    """Return the rows of several steps as one; hashes only where every step has them."""
    if not pieces:
        nothing = np.zeros((0, len(STAT_INDEX)))
        return Rows(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int16), nothing, None)
    hashes = [piece.hashes for piece in pieces if piece.hashes is not None]
    return Rows(
        np.concatenate([piece.steps for piece in pieces]),
        np.concatenate([piece.sites for piece in pieces]),
        np.concatenate([piece.ordinals for piece in pieces]),
        np.concatenate([piece.values for piece in pieces]),
        np.concatenate(hashes) if len(hashes) == len(pieces) else None,
    )
