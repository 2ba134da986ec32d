"""Which box feeds which, worked out once for every group: edges inside it, and the tensors that cross its border."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clew.model.graph import Graph
    from clew.views.graph_tree import Box


@dataclass(frozen=True, slots=True)
class Wiring:
    """The inside of one group.

    Nodes are numbered: the children first, then one port for each tensor of ``ins``, then one for each of
    ``outs``. ``edges`` maps a pair of nodes to the tensors that travel between them.
    """

    children: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    edges: dict[tuple[int, int], tuple[int, ...]]

    @property
    def nodes(self) -> int:
        """How many nodes there are, ports included."""
        return self.children + len(self.ins) + len(self.outs)

    @property
    def key(self) -> tuple[object, ...]:
        """What an arrangement depends on: equal blocks of a model have equal keys."""
        return self.children, len(self.ins), len(self.outs), tuple(sorted(self.edges))


@dataclass(slots=True)
class _Draft:
    """A wiring that grows; the tensors of each edge keep their order and appear once."""

    ins: dict[int, None] = field(default_factory=dict)
    outs: dict[int, None] = field(default_factory=dict)
    inner: dict[tuple[int, int], dict[int, None]] = field(default_factory=dict)
    entering: dict[tuple[int, int], None] = field(default_factory=dict)
    leaving: dict[tuple[int, int], None] = field(default_factory=dict)

    def finish(self, children: int) -> Wiring:
        edges = {pair: tuple(tensors) for pair, tensors in self.inner.items()}
        in_port = {tensor: children + index for index, tensor in enumerate(self.ins)}
        out_port = {tensor: children + len(self.ins) + index for index, tensor in enumerate(self.outs)}
        edges.update({(in_port[tensor], child): (tensor,) for tensor, child in self.entering})
        edges.update({(child, out_port[tensor]): (tensor,) for tensor, child in self.leaving})
        return Wiring(children, tuple(self.ins), tuple(self.outs), edges)


@dataclass(slots=True)
class _Place:
    """Where a box stands: its parent's key, its position among the children, its level."""

    parent: str
    position: int
    level: int


def wire(graph: Graph, root: Box) -> dict[str, Wiring]:
    """Return the wiring of every group of the tree, by the key of the group."""
    places, producers, consumers = _survey(graph, root)
    drafts = {box.key: _Draft() for box in root.walk() if box.is_group}
    for tensor, box_key in consumers:
        source = producers.get(tensor)
        if source is not None and source != box_key:
            _connect(drafts, places, source=source, target=box_key, tensor=tensor)
    return {box.key: drafts[box.key].finish(len(box.children)) for box in root.walk() if box.is_group}


def _survey(graph: Graph, root: Box) -> tuple[dict[str, _Place], dict[int, str], list[tuple[int, str]]]:
    """Return the place of each box, the box that makes each tensor, and who uses which tensor."""
    places: dict[str, _Place] = {}
    producers: dict[int, str] = {}
    consumers: list[tuple[int, str]] = []

    def visit(parent: Box, level: int) -> None:
        for position, box in enumerate(parent.children):
            places[box.key] = _Place(parent.key, position, level)
            if box.kind == "op":
                operation = graph.operations[box.operation]
                producers.update(dict.fromkeys(operation.outputs, box.key))
                consumers.extend((tensor, box.key) for tensor in dict.fromkeys(operation.inputs))
            elif box.kind == "input":
                producers.setdefault(box.tensor, box.key)
            elif box.kind == "output":
                consumers.append((box.tensor, box.key))
            visit(box, level + 1)

    visit(root, 1)
    return places, producers, consumers


def _connect(
    drafts: dict[str, _Draft], places: dict[str, _Place], *, source: str, target: str, tensor: int
) -> None:
    """Draw a tensor's way from box to box: out of the groups around its source, into those around its user."""
    a, b = places[source], places[target]
    while a.parent != b.parent:
        level_a, level_b = a.level, b.level
        if level_a >= level_b:
            draft = drafts[a.parent]
            draft.outs[tensor] = None
            draft.leaving[tensor, a.position] = None
            a = places[a.parent]
        if level_b >= level_a:
            draft = drafts[b.parent]
            draft.ins[tensor] = None
            draft.entering[tensor, b.position] = None
            b = places[b.parent]
    # Operations stand in forward order, so an edge leads on; one that does not is no data flow.
    if a.position < b.position:
        drafts[a.parent].inner.setdefault((a.position, b.position), {})[tensor] = None
