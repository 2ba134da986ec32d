"""Every box in its place: rows and columns of each group, wires from border to border."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from clew.views.graph_card import SMALL, TITLE, Card, Cards
from clew.views.graph_layers import Arrangement, arrange
from clew.views.graph_place import Extent, align, place
from clew.views.graph_wiring import Wiring, wire
from clew.views.text_width import measure_text

if TYPE_CHECKING:
    from clew.model.graph import Graph
    from clew.views.graph_tree import Box
    from clew.views.scene import Point

HEADER: Final = 24.0
BELOW_HEADER: Final = 18.0
SIDE: Final = 16.0
GAP: Final = 22.0
PORT: Final = 4.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What the picture of a group is made from, however much of it is open."""

    wiring: Wiring
    arrangement: Arrangement
    blocks: tuple[int, ...]
    cards: tuple[Card, ...]


@dataclass(slots=True)
class Placed:
    """A box at its place in an open group: axis and top, and its inside when it is open."""

    box: Box
    card: Card
    x: float
    y: float
    inside: Open | None = None


@dataclass(slots=True)
class Open:
    """An open group: its size, how far its axis is from its left border, its boxes, wires and ports."""

    width: float = 0.0
    height: float = 0.0
    axis: float = 0.0
    boxes: list[Placed] = field(default_factory=list)
    wires: list[tuple[tuple[Point, ...], bool, tuple[int, ...]]] = field(default_factory=list)
    ins: dict[int, float] = field(default_factory=dict)
    outs: dict[int, float] = field(default_factory=dict)


class Layout:
    """Lays out the groups of one graph; equal blocks are worked out once."""

    def __init__(self, graph: Graph, root: Box, cards: Cards) -> None:
        self.root = root
        self.cards = cards
        self.wirings = wire(graph, root)
        self._arrangements: dict[tuple[object, ...], tuple[Arrangement, tuple[int, ...]]] = {}
        self._axes: dict[tuple[object, ...], tuple[float, ...]] = {}

    def plan(self, group: Box) -> Plan:
        """Return rows, blocks and closed boxes of a group."""
        wiring = self.wirings[group.key]
        known = self._arrangements.get(wiring.key)
        if known is None:
            arrangement = arrange(wiring)
            known = self._arrangements[wiring.key] = arrangement, tuple(align(arrangement))
        leaving: dict[int, dict[int, None]] = {}
        for (source, _), tensors in wiring.edges.items():
            leaving.setdefault(source, {}).update(dict.fromkeys(tensors))
        cards = tuple(self.cards.draw(box, list(leaving.get(i, ()))) for i, box in enumerate(group.children))
        return Plan(wiring, *known, cards)

    def open(self, group: Box, opened: frozenset[str]) -> Open:
        """Return a group with those boxes open whose keys are given."""
        insides = {
            index: self.open(box, opened)
            for index, box in enumerate(group.children)
            if box.is_group and box.key in opened
        }
        opening = _Opening(group, self.plan(group), insides, is_root=group is self.root)
        return opening.build(self._place(opening))

    def _place(self, opening: _Opening) -> list[float]:
        plan = opening.plan
        extents = tuple(map(opening.extent, range(plan.wiring.nodes)))
        key = (plan.wiring.key, extents)
        if key not in self._axes:
            self._axes[key] = tuple(place(plan.arrangement, plan.blocks, extents))
        return list(self._axes[key])


class _Opening:
    """Puts one open group together."""

    def __init__(self, group: Box, plan: Plan, insides: dict[int, Open], *, is_root: bool) -> None:
        self.group = group
        self.plan = plan
        self.insides = insides
        self.is_root = is_root
        self.row_of = {node: i for i, row in enumerate(plan.arrangement.rows) for node in row}
        self.tops: list[float] = []
        self.bottoms: list[float] = []

    def build(self, axes: list[float]) -> Open:
        """Return the group with its boxes on the given axes."""
        result = Open()
        self._stack_rows(result)
        self._set_borders(result, axes)
        for index, box in enumerate(self.group.children):
            top, bottom = self._row(index)
            y = (top + bottom - self.extent(index).height) / 2
            result.boxes.append(Placed(box, self.plan.cards[index], axes[index], y, self.insides.get(index)))
        self._add_wires(result, axes)
        return result

    def extent(self, node: int) -> Extent:
        """Return the size of a node as it is now, open or closed."""
        if node in self.insides:
            inside = self.insides[node]
            return Extent(inside.axis, inside.width - inside.axis, inside.height)
        if node < len(self.plan.cards):
            return self.plan.cards[node].extent
        is_entry = self.plan.wiring.children <= node < self.plan.wiring.children + len(self.plan.wiring.ins)
        return Extent(PORT, PORT, HEADER if is_entry else 0.0)

    def _row(self, node: int) -> tuple[float, float]:
        row = self.row_of[node]
        return self.tops[row], self.bottoms[row]

    def _stack_rows(self, result: Open) -> None:
        """Set top and bottom of each row, and the height of the group."""
        rows, wiring = self.plan.arrangement.rows, self.plan.wiring
        y = 0.0 if wiring.ins or self.is_root else HEADER + BELOW_HEADER
        for index, row in enumerate(rows):
            height = max(self.extent(node).height if node < wiring.nodes else 0.0 for node in row)
            self.tops.append(y)
            self.bottoms.append(y + height)
            y += height + (BELOW_HEADER if index == 0 and wiring.ins else GAP)
        bottom = self.bottoms[-1] if rows else y
        result.height = bottom if wiring.outs or self.is_root else bottom + SIDE

    def _set_borders(self, result: Open, axes: list[float]) -> None:
        """Move everything right of the left border, leaving room for the header, and set width and axis."""
        wiring, children = self.plan.wiring, len(self.group.children)
        extents = [self.extent(node) for node in range(children)]
        low = min([axes[i] - extent.left for i, extent in enumerate(extents)] + axes, default=0.0)
        high = max([axes[i] + extent.right for i, extent in enumerate(extents)] + axes, default=0.0)
        main = axes[children] if wiring.ins else (low + high) / 2
        side = 0.0 if self.is_root else SIDE
        title = measure_text(self.group.title, TITLE, bold=True) + 22
        subtitle = measure_text(self.group.subtitle, SMALL) + 22
        left = max(main - low + side, 0.0 if self.is_root else title)
        right = max(high - main + side, 0.0 if self.is_root else subtitle)
        shift = left - main
        axes[:] = [x + shift for x in axes]
        result.axis, result.width = left, left + right
        for index, tensor in enumerate(wiring.ins):
            result.ins[tensor] = axes[children + index]
        for index, tensor in enumerate(wiring.outs):
            result.outs[tensor] = axes[children + len(wiring.ins) + index]

    def _add_wires(self, result: Open, axes: list[float]) -> None:
        """Add each stretch of each wire once: those of one source share their way."""
        stretches: dict[tuple[Point, ...], tuple[bool, dict[int, None]]] = {}
        for (source, target), tensors in self.plan.wiring.edges.items():
            stops = [source, *self.plan.arrangement.chains.get((source, target), ()), target]
            for tensor in tensors:
                for a, b in itertools.pairwise(stops):
                    points = (*self._leave(a, axes, tensor), *self._arrive(b, axes, tensor))
                    arrow = b < len(self.group.children) and b not in self.insides
                    stretches.setdefault(points, (arrow, {}))[1][tensor] = None
        result.wires = [(points, arrow, tuple(tensors)) for points, (arrow, tensors) in stretches.items()]

    def _leave(self, node: int, axes: list[float], tensor: int) -> tuple[Point, ...]:
        """Return the way from the bottom of a node to the bottom of its row."""
        top, bottom = self._row(node)
        if node in self.insides:
            inside = self.insides[node]
            x = axes[node] - inside.axis + inside.outs.get(tensor, inside.axis)
            return (x, (top + bottom + inside.height) / 2), (x, bottom)
        if node < len(self.group.children):
            start = (top + bottom - self.extent(node).height) / 2 + self.plan.cards[node].height
            return (axes[node], start), (axes[node], bottom)
        return (axes[node], top), (axes[node], bottom)

    def _arrive(self, node: int, axes: list[float], tensor: int) -> tuple[Point, ...]:
        """Return the way from the top of a row to the top of a node in it."""
        top, bottom = self._row(node)
        if node in self.insides:
            inside = self.insides[node]
            x = axes[node] - inside.axis + inside.ins.get(tensor, inside.axis)
            return (x, top), (x, (top + bottom - inside.height) / 2)
        if node < len(self.group.children):
            return (axes[node], top), (axes[node], (top + bottom - self.extent(node).height) / 2)
        return ((axes[node], top),)
