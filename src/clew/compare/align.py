"""Which site of one run is which of another, when names, order and structure need not agree.

Certain pairs first: what the user's map says, then sites with equal name, kind and shape, as far as they keep one
order. What lies between them is laid side by side so that the sum of likenesses is largest, again in order. At
last, equal names that stand elsewhere: modules that run in another order. Parameters follow their modules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from clew.compare.align_fused import Fused, find_fused, join_names
from clew.compare.align_rename import find_renamed
from clew.compare.likeness import Likeness, is_laid_out_otherwise
from clew.compare.name import own_name, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from clew.model.record import Site

HOWS: Final = ("map", "renamed", "name", "unwrapped", "likeness", "moved", "parent")
"""Why two sites are a pair, from certain to inferred."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sites that stand for one place, why, and whether the second one's matrix is transposed.

    ``parts`` of side ``parts_in`` are together what the site of the other side is; the first of them stands for all.
    """

    a: str
    b: str
    how: str
    is_transposed: bool = False
    parts: tuple[str, ...] = ()
    parts_in: str = ""

    def sites(self, side: str) -> tuple[str, ...]:
        """Return the sites on a side: one, or the parts."""
        if self.parts_in == side:
            return self.parts
        return (self.a if side == "a" else self.b,)

    def label(self, side: str) -> str:
        """Return the name on a side, all parts of it in one."""
        return join_names(self.parts) if self.parts_in == side else self.sites(side)[0]


@dataclass(frozen=True, slots=True)
class Alignment:
    """Pairs in the order of the first side, and from both sides what has no partner."""

    pairs: tuple[Pair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    fused: tuple[Fused, ...] = ()

    @property
    def joined(self) -> tuple[Pair, ...]:
        """A pair for each place that is several sites on one side and one on the other."""
        return tuple(
            Pair(each.parts[0], each.whole, "fused", parts=each.parts, parts_in="a")
            if each.whole_is_in == "b"
            else Pair(each.whole, each.parts[0], "fused", parts=each.parts, parts_in="b")
            for each in self.fused
        )

    @property
    def names(self) -> dict[str, str]:
        """The name on the second side of each paired name of the first."""
        return {pair.a: pair.b for pair in self.pairs}


@dataclass(slots=True)
class _Search:
    """The two sides and what is paired so far, by position."""

    a: Sequence[Site]
    b: Sequence[Site]
    likeness: Likeness
    partner: dict[int, int] = field(default_factory=dict)
    how: dict[int, str] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)

    def join(self, i: int, j: int, how: str) -> None:
        self.partner[i] = j
        self.how[i] = how
        self.taken.add(j)

    def free_a(self, indices: Iterable[int]) -> list[int]:
        return [i for i in indices if i not in self.partner]

    def free_b(self, indices: Iterable[int]) -> list[int]:
        return [j for j in indices if j not in self.taken]


def align(
    a: Sequence[Site],
    b: Sequence[Site],
    *,
    names: Mapping[str, str] | None = None,
    fingerprints: tuple[Mapping[str, int], Mapping[str, int]] | None = None,
) -> Alignment:
    """Return the alignment of two lists of sites, each in its own order of definition or execution.

    ``names`` is the user's map from names of ``a`` to names of ``b``, and wins over everything. ``fingerprints``
    are hashes of what the sites held at the start (initial weights, first outputs) by name: equal ones tell
    apart places that look alike.
    """
    prints = fingerprints or ({}, {})
    search = _Search(a, b, Likeness(a, b, prints))
    _join_mapped(search, names or {})
    _join_renamed(search, find_renamed(a, b, prints))
    for role in ("module", "rest"):
        left = [i for i, site in enumerate(a) if (site.role == "module") == (role == "module")]
        right = [j for j, site in enumerate(b) if (site.role == "module") == (role == "module")]
        if role == "rest":
            _join_by_parent(search, left, right)
        _join_in_order(search, left, right)
        _join_moved(search, left, right)
    return _finish(search)


def _join_mapped(search: _Search, names: Mapping[str, str]) -> None:
    left = {site.name: i for i, site in enumerate(search.a)}
    right = {site.name: j for j, site in enumerate(search.b)}
    for first, second in names.items():
        if first in left and second in right:
            search.join(left[first], right[second], "map")


def _join_renamed(search: _Search, names: Mapping[str, str]) -> None:
    """Pair what stands under another path, where kind and shape do not speak against it."""
    left = {site.name: i for i, site in enumerate(search.a)}
    right = {site.name: j for j, site in enumerate(search.b)}
    for first, second in names.items():
        i, j = left[first], right[second]
        if i not in search.partner and j not in search.taken and search.likeness.is_kin(i, j):
            search.join(i, j, "unwrapped" if unwrap(first) == unwrap(second) else "renamed")


def _join_by_parent(search: _Search, left: Sequence[int], right: Sequence[int]) -> None:
    """Pair parameters, buffers and leaves of paired modules: by own name, then the only ones of a shape."""
    modules = {unwrap(search.a[i].name): unwrap(search.b[j].name) for i, j in search.partner.items()}
    children_a = _by_parent(search.a, search.free_a(left))
    children_b = _by_parent(search.b, search.free_b(right))
    for parent, mine in children_a.items():
        theirs = children_b.get(modules.get(parent, ""), [])
        if parent not in modules or not theirs:
            continue
        for key in (_by_own_name, _by_shape):
            first = _unique(search.a, search.free_a(mine), key)
            second = _unique(search.b, search.free_b(theirs), key)
            for value, i in first.items():
                j = second.get(value)
                if j is not None and search.likeness.is_possible(i, j):
                    search.join(i, j, _how_named(search, i, j, otherwise="parent"))


def _by_parent(sites: Sequence[Site], indices: Iterable[int]) -> dict[str, list[int]]:
    table: dict[str, list[int]] = defaultdict(list)
    for index in indices:
        table[unwrap(sites[index].name).rpartition(".")[0]].append(index)
    return table


def _by_own_name(site: Site) -> object:
    return (site.role, own_name(site.name))


def _by_shape(site: Site) -> object:
    return (site.role, tuple(sorted(site.shape)))


def _unique(
    sites: Sequence[Site], indices: Iterable[int], key: Callable[[Site], object]
) -> dict[object, int]:
    """Return the index of each key that only one of the sites has."""
    table: dict[object, list[int]] = defaultdict(list)
    for index in indices:
        table[key(sites[index])].append(index)
    return {value: found[0] for value, found in table.items() if len(found) == 1}


def _how_named(search: _Search, i: int, j: int, *, otherwise: str) -> str:
    first, second = search.a[i].name, search.b[j].name
    if first == second:
        return "name"
    return "unwrapped" if unwrap(first) == unwrap(second) else otherwise


def _join_in_order(search: _Search, left: Sequence[int], right: Sequence[int]) -> None:
    """Pair in order: fix what is certain, then fill each gap between the fixed ones."""
    anchors = _keep_order([*_mapped_between(search, left, right), *_find_certain(search, left, right)])
    for i, j in anchors:
        if i not in search.partner:
            search.join(i, j, _how_named(search, i, j, otherwise="likeness"))
    low_i = low_j = 0
    for i, j in [*anchors, (len(search.a), len(search.b))]:
        high_i, high_j = bisect_left(left, i), bisect_left(right, j)
        mine, theirs = search.free_a(left[low_i:high_i]), search.free_b(right[low_j:high_j])
        for first, second in _lay(search.likeness, mine, theirs):
            search.join(first, second, _how_named(search, first, second, otherwise="likeness"))
        low_i, low_j = high_i, high_j


def _mapped_between(search: _Search, left: Sequence[int], right: Sequence[int]) -> list[tuple[int, int]]:
    inside = set(right)
    return [(i, search.partner[i]) for i in left if i in search.partner and search.partner[i] in inside]


def _find_certain(search: _Search, left: Sequence[int], right: Sequence[int]) -> list[tuple[int, int]]:
    """Return the free pairs with one unwrapped name, which nothing else on either side has, and no objection.

    Where a wrapper and what it wraps have one name, the outer one stands for it: its output is what others see.
    """
    first = _by_unwrapped(search.a, search.free_a(left))
    second = _by_unwrapped(search.b, search.free_b(right))
    return [
        (mine[0], second[key][0])
        for key, mine in first.items()
        if any(search.likeness.is_same(i, j) for i in mine for j in second.get(key, ()))
    ]


def _by_unwrapped(sites: Sequence[Site], indices: Iterable[int]) -> dict[tuple[str, str], list[int]]:
    """Return the sites of each role and unwrapped name, the outermost first."""
    table: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in sorted(indices, key=lambda index: len(sites[index].name)):
        table[sites[index].role, unwrap(sites[index].name)].append(index)
    return table


def _keep_order(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the most pairs whose positions rise on both sides."""
    ordered = sorted(set(pairs))
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, (_, j) in enumerate(ordered):
        place = bisect_left(tails, j)
        before.append(ends[place - 1] if place else -1)
        if place == len(tails):
            tails.append(j)
            ends.append(index)
        else:
            tails[place], ends[place] = j, index
    chain = []
    index = ends[-1] if ends else -1
    while index >= 0:
        chain.append(ordered[index])
        index = before[index]
    return chain[::-1]


def _lay(likeness: Likeness, left: Sequence[int], right: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs, in order on both sides, whose likenesses have the largest sum; unlike ones stay alone."""
    if not left or not right:
        return []
    best = np.zeros(len(right) + 1, np.float32)
    moves = np.zeros((len(left), len(right)), np.int8)
    for row, i in enumerate(left):
        scores = likeness.score(i, right, place=row / len(left))
        joined = best[:-1] + scores
        options = np.maximum(best[1:], np.where(scores > 0, joined, -np.inf))
        is_join = (scores > 0) & (joined >= best[1:])
        running = np.maximum.accumulate(np.concatenate(([best[0]], options)))
        # 0: take the result without this right one, 1: without this left one, 2: join the two.
        is_own = options >= running[:-1]
        moves[row] = np.where(is_own, np.where(is_join, 2, 1), 0)
        best = running.astype(np.float32)
    return _trace(moves, left, right)


def _trace(moves: np.ndarray, left: Sequence[int], right: Sequence[int]) -> list[tuple[int, int]]:
    pairs = []
    row, column = len(left) - 1, len(right) - 1
    while row >= 0 and column >= 0:
        move = moves[row, column]
        if move == 2:
            pairs.append((left[row], right[column]))
        row, column = row - (move != 0), column - (move != 1)
    return pairs[::-1]


def _join_moved(search: _Search, left: Sequence[int], right: Sequence[int]) -> None:
    """Pair what is left over and certain, wherever it stands."""
    for i, j in _find_certain(search, left, right):
        search.join(i, j, "moved")


def _finish(search: _Search) -> Alignment:
    pairs = [
        Pair(
            search.a[i].name,
            search.b[j].name,
            search.how[i],
            is_laid_out_otherwise(search.a[i], search.b[j]),
        )
        for i, j in sorted(search.partner.items())
    ]
    alone_a = [site for i, site in enumerate(search.a) if i not in search.partner]
    alone_b = [site for j, site in enumerate(search.b) if j not in search.taken]
    names = {pair.a: pair.b for pair in pairs}
    turned = {pair.b: pair.a for pair in pairs}
    fused = [
        *find_fused(alone_a, alone_b, whole_is_in="b", partners=names),
        *find_fused(alone_b, alone_a, whole_is_in="a", partners=turned),
    ]
    return Alignment(
        tuple(pairs),
        tuple(site.name for site in alone_a),
        tuple(site.name for site in alone_b),
        tuple(fused),
    )
