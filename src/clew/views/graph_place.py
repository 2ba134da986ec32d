"""Where the boxes of a group stand from left to right.

Nodes that should stand exactly below each other form a block; this depends on the rows alone. Then the blocks
move towards their neighbours as far as the sizes of the boxes allow. The page repeats the second part whenever
a reader opens or closes a box, so ``place`` has a twin in ``layout.js``; a test compares the two.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clew.views.graph_layers import Arrangement

GAP: Final = 26.0
NARROW_GAP: Final = 16.0
WAYPOINT: Final = 3.0
ROUNDS: Final = 24


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a box around its axis, the vertical line on which its edges begin and end."""

    left: float
    right: float
    height: float


def place(arrangement: Arrangement, blocks: Sequence[int], extents: Sequence[Extent]) -> list[float]:
    """Return the axis of every node, waypoints included."""
    axis = _Solver(arrangement, blocks, _Sizes(arrangement.real, extents)).solve()
    return [axis[block] for block in blocks]


class _Sizes:
    """Left and right reach of real nodes and waypoints."""

    def __init__(self, real: int, extents: Sequence[Extent]) -> None:
        self.real = real
        self.extents = extents

    def left(self, node: int) -> float:
        return self.extents[node].left if node < self.real else WAYPOINT

    def right(self, node: int) -> float:
        return self.extents[node].right if node < self.real else WAYPOINT

    def distance(self, a: int, b: int) -> float:
        """Return how far apart the axes of two neighbours in a row must be."""
        gap = GAP if a < self.real and b < self.real else NARROW_GAP
        return self.right(a) + gap + self.left(b)


def align(arrangement: Arrangement) -> list[int]:
    """Return a block number for each node: nodes of one block share an axis, so their edges are straight."""
    position = {
        node: (index, place) for index, row in enumerate(arrangement.rows) for place, node in enumerate(row)
    }
    upper_of: dict[int, int] = {}
    taken: set[int] = set()
    kept: dict[int, list[tuple[int, int]]] = {}
    for upper, lower in _by_importance(arrangement):
        (row, place), (_, lower_place) = position[upper], position[lower]
        beside = kept.setdefault(row, [])
        crosses = any((place - a) * (lower_place - b) <= 0 for a, b in beside)
        if upper in taken or lower in upper_of or crosses:
            continue
        beside.append((place, lower_place))
        upper_of[lower] = upper
        taken.add(upper)
    block = list(range(len(position)))
    for row_nodes in arrangement.rows:
        for node in row_nodes:
            block[node] = block[upper_of[node]] if node in upper_of else node
    return block


def _by_importance(arrangement: Arrangement) -> list[tuple[int, int]]:
    """Return the links in the order in which they deserve to be straight.

    Stretches of long edges come first, then links between boxes, then the ends of long edges. A box between an
    even number of boxes belongs in their middle, under none of them.
    """
    real = arrangement.real
    uppers: dict[int, list[int]] = {}
    lowers: dict[int, list[int]] = {}
    for upper, lower in arrangement.links:
        if upper < real and lower < real:
            uppers.setdefault(lower, []).append(upper)
            lowers.setdefault(upper, []).append(lower)
    order = {node: place for row in arrangement.rows for place, node in enumerate(row)}
    ranked: list[tuple[int, int, tuple[int, int]]] = []
    for number, (upper, lower) in enumerate(arrangement.links):
        if upper >= real and lower >= real:
            ranked.append((0, number, (upper, lower)))
        elif upper < real and lower < real:
            middle = _is_middle(upper, uppers[lower], order) and _is_middle(lower, lowers[upper], order)
            if middle:
                ranked.append((1, number, (upper, lower)))
        else:
            ranked.append((2, number, (upper, lower)))
    return [link for _, _, link in sorted(ranked)]


def _is_middle(node: int, group: list[int], order: dict[int, int]) -> bool:
    ordered = sorted(group, key=order.__getitem__)
    return len(ordered) % 2 == 1 and ordered[len(ordered) // 2] == node


class _Solver:
    """Moves blocks towards their neighbours as far as the blocks beside them allow."""

    def __init__(self, arrangement: Arrangement, blocks: Sequence[int], sizes: _Sizes) -> None:
        self.blocks = blocks
        self.right_of: dict[int, dict[int, float]] = {block: {} for block in blocks}
        self.left_of: dict[int, dict[int, float]] = {block: {} for block in blocks}
        self.pull: dict[int, list[int]] = {block: [] for block in blocks}
        for row in arrangement.rows:
            for a, b in itertools.pairwise(row):
                self._keep_apart(blocks[a], blocks[b], sizes.distance(a, b))
        for upper, lower in arrangement.links:
            a, b = blocks[upper], blocks[lower]
            if a != b:
                self.pull[a].append(b)
                self.pull[b].append(a)

    def _keep_apart(self, a: int, b: int, distance: float) -> None:
        self.right_of[a][b] = max(distance, self.right_of[a].get(b, 0.0))
        self.left_of[b][a] = max(distance, self.left_of[b].get(a, 0.0))

    def solve(self) -> dict[int, float]:
        order = self._sorted_left_to_right()
        axis: dict[int, float] = {}
        for block in order:
            axis[block] = max((axis[one] + gap for one, gap in self.left_of[block].items()), default=0.0)
        for round_number in range(ROUNDS):
            moved = 0.0
            for block in reversed(order) if round_number % 2 == 0 else order:
                moved = max(moved, self._move(block, axis))
            if moved < 0.5:
                break
        return axis

    def _move(self, block: int, axis: dict[int, float]) -> float:
        pull = self.pull[block]
        if not pull:
            return 0.0
        wanted = sum(axis[one] for one in pull) / len(pull)
        low = max((axis[one] + gap for one, gap in self.left_of[block].items()), default=float("-inf"))
        high = min((axis[one] - gap for one, gap in self.right_of[block].items()), default=float("inf"))
        new = min(max(wanted, low), high)
        distance = abs(new - axis[block])
        axis[block] = new
        return distance

    def _sorted_left_to_right(self) -> list[int]:
        waiting = {block: len(self.left_of[block]) for block in dict.fromkeys(self.blocks)}
        ready = [block for block, count in waiting.items() if count == 0]
        order: list[int] = []
        while ready:
            block = ready.pop()
            order.append(block)
            for other in self.right_of[block]:
                waiting[other] -= 1
                if waiting[other] == 0:
                    ready.append(other)
        return order
