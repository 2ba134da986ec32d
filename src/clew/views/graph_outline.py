"""The boxes of a graph that show and the edges between them, for languages that do their own layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clew.views.graph_card import describe_argument, describe_shape, describe_tensors
from clew.views.graph_color import choose_coloring
from clew.views.graph_scene import check_depth
from clew.views.graph_tree import build_tree, choose_depth, opened_keys
from clew.views.scene import LIGHT
from clew.views.text_width import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.model.graph import Graph
    from clew.views.graph_tree import Box


@dataclass(frozen=True, slots=True)
class OutlineBox:
    """A box by a plain name; ``children`` where it is open, else its lines of text and its colours."""

    name: str
    lines: tuple[str, ...]
    kind: str
    fill: str
    stroke: str
    ink: str
    is_strong: bool = False
    children: tuple[OutlineBox, ...] = ()


@dataclass(frozen=True, slots=True)
class Outline:
    """Boxes of the top level and labelled edges between closed boxes."""

    title: str
    boxes: tuple[OutlineBox, ...]
    edges: tuple[tuple[str, str, str], ...]


def outline_graph(
    graph: Graph, *, color: str = "op", verbose: bool = False, depth: int | None = None
) -> Outline:
    """Return the outline of a graph with so many levels open."""
    return _Outliner(graph, color, verbose=verbose, depth=depth).build()


class _Outliner:
    def __init__(self, graph: Graph, color: str, *, verbose: bool, depth: int | None) -> None:
        self.graph = graph
        self.verbose = verbose
        self.coloring = choose_coloring(graph, color)
        self.root = build_tree(graph)
        self.opened = opened_keys(self.root, check_depth(depth) or choose_depth(self.root))
        self.names = {box.key: f"n{number}" for number, box in enumerate(self.root.walk())}

    def build(self) -> Outline:
        boxes = tuple(self._describe(child) for child in self.root.children)
        return Outline(self.graph.name or "model", boxes, tuple(self._edges()))

    def _is_open(self, box: Box) -> bool:
        return box.is_group and box.key in self.opened

    def _describe(self, box: Box) -> OutlineBox:
        paint = self.coloring.paint(box)
        is_end = box.kind in ("input", "output")
        fill, stroke = ("end", "end-line") if is_end else (paint.fill, paint.stroke)
        inside = tuple(self._describe(child) for child in box.children) if self._is_open(box) else ()
        needs_grad = box.kind == "op" and self.graph.operations[box.operation].needs_grad
        return OutlineBox(
            self.names[box.key], tuple(self._lines(box)), box.kind, _resolve(fill), _resolve(stroke),
            _resolve(paint.ink), self.verbose and needs_grad, inside,
        )  # fmt: skip

    def _lines(self, box: Box) -> Iterator[str]:
        yield box.title
        if box.subtitle:
            yield box.subtitle
        if box.tensor >= 0:
            yield describe_shape(self.graph.tensors[box.tensor])
        if box.kind != "op":
            return
        operation = self.graph.operations[box.operation]
        for index in dict.fromkeys(operation.inputs):
            tensor = self.graph.tensors[index]
            if tensor.role in ("param", "buffer"):
                yield f"{tensor.name.rpartition('.')[2]} {describe_shape(tensor)}"
        if self.verbose:
            yield from (f"{name}={shorten(describe_argument(v), 60)}" for name, v in operation.args.items())
            yield "needs grad" if operation.needs_grad else "needs no grad"

    def _edges(self) -> Iterator[tuple[str, str, str]]:
        home = {
            number: box.key for box in self._shown(self.root) for number in range(box.first, box.last + 1)
        }
        ends = {box.tensor: box.key for box in self.root.children if box.kind == "input"}
        users = [(box.tensor, box.key) for box in self.root.children if box.kind == "output"]
        users += [(tensor, home[op.id]) for op in self.graph.operations for tensor in op.inputs]
        between: dict[tuple[str, str], dict[int, None]] = {}
        for tensor, target in users:
            producer = self.graph.tensors[tensor].producer
            source = home[producer] if producer >= 0 else ends.get(tensor)
            if source is not None and source != target:
                between.setdefault((source, target), {})[tensor] = None
        for (source, target), tensors in between.items():
            label = describe_tensors([self.graph.tensors[index] for index in tensors])
            yield self.names[source], self.names[target], label

    def _shown(self, box: Box) -> Iterator[Box]:
        """Yield the closed boxes of the picture that hold operations."""
        for child in box.children:
            if self._is_open(child):
                yield from self._shown(child)
            elif child.last >= child.first:
                yield child


def _resolve(role: str) -> str:
    return LIGHT.get(role, role)
