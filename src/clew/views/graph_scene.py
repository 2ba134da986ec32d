"""A graph as a drawing: the boxes that are open and closed, the wires between them, a title and a legend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from clew.errors import UsageError
from clew.views.graph_card import LABEL, SMALL, TITLE, Cards, describe_shape
from clew.views.graph_color import choose_coloring
from clew.views.graph_layout import Layout, Open, Placed
from clew.views.graph_tree import build_tree, choose_depth, opened_keys
from clew.views.scene import Rect, Scene, Shape, Wire, Words
from clew.views.text_width import measure_text, shorten

if TYPE_CHECKING:
    from clew.model.graph import Graph
    from clew.views.graph_color import Coloring, LegendEntry
    from clew.views.graph_tree import Box

MARGIN: Final = 24.0
HEAD: Final = 46.0
SWATCH: Final = 14.0


def draw_graph(graph: Graph, *, color: str = "op", verbose: bool = False, depth: int | None = None) -> Scene:
    """Return the drawing of a graph with so many levels open, as many as stay readable by default."""
    coloring = choose_coloring(graph, color)
    root = build_tree(graph)
    levels = check_depth(depth) or choose_depth(root)
    layout = Layout(graph, root, Cards(graph, coloring, verbose=verbose))
    inside = layout.open(root, opened_keys(root, levels))
    painter = _Painter(graph)
    painter.add_group(inside, MARGIN, MARGIN + HEAD, level=0)
    return _finish(graph, painter, inside, coloring, verbose=verbose)


def check_depth(depth: int | None) -> int | None:
    """Return the depth if it is one."""
    if depth is not None and depth < 1:
        raise UsageError(
            f"depth is {depth}", next_step="1 shows the parts of the model, 2 what is inside them"
        )
    return depth


def summarize_graph(graph: Graph) -> str:
    """Return one line: how many operations and parameters the picture stands for."""
    parameters = graph.parameters
    count = len(graph.operations)
    text = f"{count:,} operation{'s' if count != 1 else ''}"
    return f"{text} · {parameters:,} parameters" if parameters else text


class _Painter:
    """Collects shapes in layers, so that frames lie below wires and wires below boxes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.frames: list[Shape] = []
        self.wires: list[Shape] = []
        self.boxes: list[Shape] = []
        self.labels: list[Shape] = []

    def add_group(self, group: Open, x: float, y: float, *, level: int) -> None:
        for points, arrow, tensors in group.wires:
            moved = tuple((x + px, y + py) for px, py in points)
            self.wires.append(Wire(moved, arrow=arrow, tip=self._name(tensors)))
        for placed in group.boxes:
            if placed.inside is None:
                self._add_card(placed, x + placed.x, y + placed.y, level)
            else:
                self._add_frame(placed.box, placed.inside, x + placed.x, y + placed.y, level + 1)

    def _add_frame(self, box: Box, inside: Open, x: float, y: float, level: int) -> None:
        left = x - inside.axis
        fill = _fill(level)
        self.frames.append(Rect(left, y, inside.width, inside.height, 10, fill, "frame", 1.2, tip=box.path))
        self.labels.append(Words(left + 11, y + 17.5, box.title, TITLE, bold=True, halo=fill))
        if box.subtitle:
            right = left + inside.width - 11
            self.labels.append(Words(right, y + 17.5, box.subtitle, SMALL, "quiet", "right", halo=fill))
        self.add_group(inside, left, y, level=level)

    def _add_card(self, placed: Placed, x: float, y: float, level: int) -> None:
        self.boxes.extend(_move(shape, x, y) for shape in placed.card.shapes)
        if placed.card.label:
            bottom = y + placed.card.height + 12
            self.labels.append(
                Words(x, bottom, placed.card.label, LABEL, "quiet", "middle", halo=_fill(level))
            )

    def _name(self, tensors: tuple[int, ...]) -> str:
        known = [self.graph.tensors[index] for index in tensors[:6]]
        return "\n".join(f"{tensor.name} {describe_shape(tensor)}" for tensor in known)


def _fill(level: int) -> str:
    """Return the ground of a group at some depth; the page itself is level 0."""
    return ("paper", "frame-fill", "frame-fill-2")[0 if level == 0 else 2 - level % 2]


def _move(shape: Shape, x: float, y: float) -> Shape:
    """Return a shape of a card at its place in the picture."""
    if isinstance(shape, Rect):
        return Rect(
            shape.x + x, shape.y + y, shape.width, shape.height, shape.radius,
            shape.fill, shape.stroke, shape.stroke_width, shape.dashed, shape.tip,
        )  # fmt: skip
    if isinstance(shape, Words):
        return Words(
            shape.x + x, shape.y + y, shape.text, shape.size, shape.color, shape.align, shape.bold, shape.halo
        )
    return replace(shape, points=tuple((px + x, py + y) for px, py in shape.points))


def legend_entries(
    graph: Graph, coloring: Coloring, *, verbose: bool
) -> list[tuple[str, str, float, bool, str]]:
    """Return fill, outline, thickness, whether it is dashed, and the meaning, for everything that occurs."""
    entries: list[LegendEntry] = list(coloring.legend())
    rows = [(entry.fill, entry.stroke, 1.2, False, entry.text) for entry in entries]
    roles = {tensor.role for tensor in graph.tensors}
    if "param" in roles:
        rows.append(("param", "param-line", 1.2, False, "parameter"))
    if roles & {"buffer", "constant"}:
        rows.append(("buffer", "buffer-line", 1.2, False, "buffer, constant"))
    if verbose:
        rows.append(("paper", "ink", 2.2, False, "needs a gradient"))
        rows.append(("paper", "other-line", 1.2, True, "needs none"))
    return rows


def _draw_legend(
    rows: list[tuple[str, str, float, bool, str]], y: float, width: float
) -> tuple[list[Shape], float]:
    """Return the legend in lines of the given width, and where it ends."""
    shapes: list[Shape] = []
    x, line = MARGIN, y
    for fill, stroke, thickness, dashed, text in rows:
        needed = SWATCH + 6 + measure_text(text, SMALL) + 18
        if x + needed > width - MARGIN and x > MARGIN:
            x, line = MARGIN, line + 22
        shapes.append(Rect(x, line, SWATCH, SWATCH, 3, fill, stroke, thickness, dashed))
        shapes.append(Words(x + SWATCH + 6, line + 11, text, SMALL, "quiet"))
        x += needed
    return shapes, line + SWATCH


def _draw_notes(notes: tuple[str, ...], y: float, width: float) -> tuple[list[Shape], float]:
    """Return what was remarked about the graph in lines of the given width, and where they end."""
    shapes: list[Shape] = []
    for note in notes:
        for line in _break_lines(f"· {note}", width - 2 * MARGIN):
            shapes.append(Words(MARGIN, y + 8, line, SMALL, "quiet"))
            y += 15
    return shapes, y - 10


def _break_lines(text: str, width: float) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and measure_text(longer, SMALL) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _finish(graph: Graph, painter: _Painter, inside: Open, coloring: Coloring, *, verbose: bool) -> Scene:
    title = shorten(graph.name or "model", 60)
    summary = f"{summarize_graph(graph)} · coloured by {coloring.title}"
    text_width = max(measure_text(title, 16, bold=True), measure_text(summary, SMALL))
    width = max(inside.width, text_width, 320.0) + 2 * MARGIN
    legend, bottom = _draw_legend(
        legend_entries(graph, coloring, verbose=verbose), MARGIN + HEAD + inside.height + 22, width
    )
    notes, bottom = _draw_notes(graph.notes, bottom + 16, width)
    heading = [
        Words(MARGIN, MARGIN + 8, title, 16, bold=True),
        Words(MARGIN, MARGIN + 25, summary, SMALL, "quiet"),
    ]
    shapes = (*painter.frames, *painter.wires, *painter.boxes, *painter.labels, *heading, *legend, *notes)
    return Scene(width, bottom + MARGIN, shapes, f"Graph of {title}", summary)
