"""Rows for the inside of a group: which node stands in which row, and in which order within it.

Nothing here knows sizes, so equal blocks of a model share one arrangement. The method is the layered one:
rows by longest path, waypoints where an edge passes a row, then sweeps that reduce crossings.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from clew.views.graph_wiring import Wiring

SWEEPS: Final = 8


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Rows of node numbers from top to bottom; numbers from ``real`` on are waypoints of long edges.

    ``chains`` gives the waypoints of each edge that has some. Edges of one source share theirs: they travel
    together and branch off. ``links`` are the pairs of neighbouring rows.
    """

    real: int
    rows: tuple[tuple[int, ...], ...]
    chains: dict[tuple[int, int], tuple[int, ...]]
    links: tuple[tuple[int, int], ...]


def arrange(wiring: Wiring) -> Arrangement:
    """Return rows and orders for a wiring."""
    ranks = _rank(wiring)
    chains, links = _add_waypoints(wiring, ranks)
    rows: list[list[int]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for node, rank in sorted(enumerate(ranks), key=lambda pair: pair[0] >= wiring.nodes):
        rows[rank].append(node)
    ordered = _order([row for row in rows if row], links)
    return Arrangement(wiring.nodes, tuple(map(tuple, ordered)), chains, tuple(links))


def _rank(wiring: Wiring) -> list[int]:
    """Return the row of each node: below everything it uses, and sources close to their first user."""
    before: list[list[int]] = [[] for _ in range(wiring.nodes)]
    after: list[list[int]] = [[] for _ in range(wiring.nodes)]
    for source, target in wiring.edges:
        before[target].append(source)
        after[source].append(target)
    top = 1 if wiring.ins else 0
    ranks = [0] * wiring.nodes
    for node in range(wiring.children):
        ranks[node] = max((ranks[one] + 1 for one in before[node]), default=top)
    first_out = wiring.children + len(wiring.ins)
    bottom = max(ranks[: wiring.children], default=0) + 1
    for node in range(first_out, wiring.nodes):
        ranks[node] = bottom
    for node in reversed(range(wiring.children)):
        if after[node] and len(after[node]) > len(before[node]):
            ranks[node] = min(ranks[one] for one in after[node]) - 1
    return _close_gaps(ranks)


def _close_gaps(ranks: list[int]) -> list[int]:
    """Number the rows that are used from zero, in place of those that moving nodes left empty."""
    number = {rank: index for index, rank in enumerate(sorted(set(ranks)))}
    return [number[rank] for rank in ranks]


def _add_waypoints(
    wiring: Wiring, ranks: list[int]
) -> tuple[dict[tuple[int, int], tuple[int, ...]], list[tuple[int, int]]]:
    """Give every edge a node in each row it passes, shared by the edges of one source; ``ranks`` grows."""
    waypoints: dict[tuple[int, int], int] = {}
    chains: dict[tuple[int, int], tuple[int, ...]] = {}
    links: dict[tuple[int, int], None] = {}
    for source, target in sorted(wiring.edges):
        chain = []
        for rank in range(ranks[source] + 1, ranks[target]):
            if (source, rank) not in waypoints:
                waypoints[source, rank] = len(ranks)
                ranks.append(rank)
            chain.append(waypoints[source, rank])
        if chain:
            chains[source, target] = tuple(chain)
        steps = [source, *chain, target]
        links.update(dict.fromkeys(itertools.pairwise(steps)))
    return chains, list(links)


def _order(rows: list[list[int]], links: list[tuple[int, int]]) -> list[list[int]]:
    """Return the rows reordered so that few edges cross: the best of some sweeps down and up."""
    above: dict[int, list[int]] = {}
    below: dict[int, list[int]] = {}
    for upper, lower in links:
        above.setdefault(lower, []).append(upper)
        below.setdefault(upper, []).append(lower)
    best, fewest = [list(row) for row in rows], _count_crossings(rows, below)
    for sweep in range(SWEEPS):
        if fewest == 0:
            break
        _sweep(rows, above if sweep % 2 == 0 else below, down=sweep % 2 == 0)
        crossings = _count_crossings(rows, below)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    return best


def _sweep(rows: list[list[int]], neighbours: dict[int, list[int]], *, down: bool) -> None:
    order = range(1, len(rows)) if down else range(len(rows) - 2, -1, -1)
    for index in order:
        fixed = rows[index - 1 if down else index + 1]
        position = {node: place for place, node in enumerate(fixed)}
        own = {node: place for place, node in enumerate(rows[index])}

        def middle(
            node: int, position: dict[int, int] = position, own: dict[int, int] = own
        ) -> tuple[float, int]:
            places = sorted(position[one] for one in neighbours.get(node, ()) if one in position)
            return (_median(places) if places else float(own[node])), own[node]

        rows[index].sort(key=middle)


def _median(places: list[int]) -> float:
    half = len(places) // 2
    return float(places[half]) if len(places) % 2 else (places[half - 1] + places[half]) / 2


def _count_crossings(rows: list[list[int]], below: dict[int, list[int]]) -> int:
    crossings = 0
    for upper, lower in itertools.pairwise(rows):
        position = {node: place for place, node in enumerate(lower)}
        seen: list[int] = []
        for node in upper:
            ends = sorted(position[one] for one in below.get(node, ()) if one in position)
            crossings += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return crossings
