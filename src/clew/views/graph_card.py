"""What a closed box looks like: an operation with its parameters, a module, an input, an output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from clew.views.graph_color import CATEGORIES, categorize
from clew.views.graph_place import Extent
from clew.views.scene import Rect, Shape, Words
from clew.views.text_width import measure_text, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clew.model.graph import Graph, Operation, TensorNode
    from clew.views.graph_color import Coloring, Paint
    from clew.views.graph_tree import Box

TITLE: Final = 12.5
SMALL: Final = 10.5
PILL_TEXT: Final = 9.5
LABEL: Final = 9.5
LABEL_ROOM: Final = 15.0
PAD: Final = 12.0
LINE: Final = 14.0
PILL_HEIGHT: Final = 16.0
LONGEST: Final = 34
MOST_PILLS: Final = 4
MOST_ARGS: Final = 8
_BESIDE: Final = ("param", "buffer", "constant")


@dataclass(frozen=True, slots=True)
class Card:
    """A drawn box: shapes around its axis (x = 0) from its top (y = 0).

    ``label`` tells below the box what leaves it; ``extent`` has room for it, ``height`` is the box alone.
    """

    extent: Extent
    height: float
    shapes: tuple[Shape, ...]
    label: str = ""


def describe_shape(tensor: TensorNode) -> str:
    """Return ``4×64×32×32``, with the dtype where it is not the usual one."""
    size = "×".join(map(str, tensor.shape)) or "scalar"
    return size if tensor.dtype in ("float32", "") else f"{size} {tensor.dtype}"


def describe_tensors(tensors: Sequence[TensorNode]) -> str:
    """Return the shapes of tensors that travel together, in few words."""
    texts = [describe_shape(tensor) for tensor in tensors]
    distinct = list(dict.fromkeys(texts))
    if len(texts) > 1 and len(distinct) == 1:
        return f"{len(texts)} × ({distinct[0]})"
    rest = f" +{len(distinct) - 2}" if len(distinct) > 2 else ""
    return shorten(", ".join(distinct[:2]) + rest, 40)


class Cards:
    """Draws the closed box of anything in one graph, once."""

    def __init__(self, graph: Graph, coloring: Coloring, *, verbose: bool) -> None:
        self.graph = graph
        self.coloring = coloring
        self.verbose = verbose
        self.shows_kinds = coloring.title == "operation"
        self._parameters_before = _running_parameters(graph)

    def draw(self, box: Box, leaving: Sequence[int]) -> Card:
        """Return the card of a box; ``leaving`` are the tensors that go on to other boxes."""
        label = describe_tensors([self.graph.tensors[index] for index in leaving])
        if box.kind in ("input", "output"):
            return self._draw_end(box)
        if box.is_group:
            return self._draw_group(box, label)
        return self._draw_operation(box, label)

    def _draw_end(self, box: Box) -> Card:
        lines = [shorten(box.title, LONGEST), describe_shape(self.graph.tensors[box.tensor])]
        width = max(_title_width(lines[0]), measure_text(lines[1], SMALL)) + 2 * PAD + 6
        height = 38.0
        shapes = (
            Rect(-width / 2, 0, width, height, height / 2, "end", "end-line", 1.2),
            Words(0, 16.5, lines[0], TITLE, align="middle", bold=True),
            Words(0, 30, lines[1], SMALL, "quiet", "middle"),
        )
        return Card(Extent(width / 2, width / 2, height), height, shapes)

    def _draw_operation(self, box: Box, label: str) -> Card:
        operation = self.graph.operations[box.operation]
        paint = self.coloring.paint(box)
        title = shorten(box.title, LONGEST)
        lines = [shorten(text, LONGEST) for text in (box.subtitle, paint.note) if text]
        if self.verbose:
            lines += _argument_lines(operation)
        width = max(_title_width(title), *(measure_text(line, SMALL) for line in lines), 44.0) + 2 * PAD
        width = max(width, measure_text(label, LABEL) + 8)
        height = 24.0 + LINE * len(lines)
        pills, reach, height = self._draw_pills(operation, width, height)
        shapes: list[Shape] = [*pills, self._outline(operation, paint, width, height)]
        top = (height - LINE * len(lines) - 24.0) / 2 + 16.5
        shapes.append(Words(0, top, title, TITLE, paint.ink, "middle", bold=True))
        color = "quiet" if paint.ink == "ink" else paint.ink
        shapes += [
            Words(0, top + LINE * (i + 1) - 0.5, line, SMALL, color, "middle") for i, line in enumerate(lines)
        ]
        return _finish(width / 2 + reach, width / 2, height, shapes, label)

    def _outline(self, operation: Operation, paint: Paint, width: float, height: float) -> Rect:
        """Return the body of an operation; a verbose picture outlines strongly what needs a gradient."""
        is_strong = self.verbose and operation.needs_grad
        stroke = "ink" if is_strong else paint.stroke
        tip = f"{operation.name} · {operation.op}" + (f" · {paint.reason}" if paint.reason else "")
        thickness = 2.2 if is_strong else 1.2
        dashed = self.verbose and not operation.needs_grad
        return Rect(-width / 2, 0, width, height, 6, paint.fill, stroke, thickness, dashed, tip)

    def _draw_pills(
        self, operation: Operation, width: float, height: float
    ) -> tuple[list[Shape], float, float]:
        """Return parameters and buffers as pills left of the body, how far they reach, and the height of all."""
        tensors = [self.graph.tensors[index] for index in dict.fromkeys(operation.inputs)]
        beside = [tensor for role in _BESIDE for tensor in tensors if tensor.role == role]
        texts = [_describe_beside(tensor) for tensor in beside[:MOST_PILLS]]
        roles = ["param" if tensor.role == "param" else "buffer" for tensor in beside[:MOST_PILLS]]
        if len(beside) > MOST_PILLS:
            texts[-1], roles[-1] = f"{len(beside) - MOST_PILLS + 1} more", "buffer"
        if not texts:
            return [], 0.0, height
        pill = max(measure_text(text, PILL_TEXT) for text in texts) + 14
        height = max(height, (PILL_HEIGHT + 3) * len(texts) + 5)
        left = -width / 2 - 8 - pill
        top = (height - (PILL_HEIGHT + 3) * len(texts) + 3) / 2
        shapes: list[Shape] = []
        for index, (text, role) in enumerate(zip(texts, roles, strict=True)):
            y = top + index * (PILL_HEIGHT + 3)
            shapes.append(Rect(left + pill - 1, y + PILL_HEIGHT / 2 - 0.5, 10, 1, 0, f"{role}-line"))
            shapes.append(Rect(left, y, pill, PILL_HEIGHT, PILL_HEIGHT / 2, role, f"{role}-line", 1))
            shapes.append(Words(left + pill / 2, y + 11.4, text, PILL_TEXT, "ink", "middle"))
        return shapes, pill + 8, height

    def _draw_group(self, box: Box, label: str) -> Card:
        count = box.last - box.first + 1
        parameters = self._parameters_before[box.last + 1] - self._parameters_before[box.first]
        paint = self.coloring.paint(box)
        lines = [shorten(text, LONGEST) for text in (box.subtitle, paint.note) if text]
        size = f" · {_compact(parameters)} params" if parameters else ""
        lines.append(f"{count} op{'s' if count != 1 else ''}{size}")
        title = shorten(box.title, LONGEST)
        width = max(_title_width(title), *(measure_text(line, SMALL) for line in lines)) + 2 * PAD + 14
        width = max(width, measure_text(label, LABEL) + 8)
        height = 32.0 + LINE * len(lines)
        color = "quiet" if paint.ink == "ink" else paint.ink
        tip = f"{box.path or box.title}: click to open" + (f" · {paint.reason}" if paint.reason else "")
        shapes: list[Shape] = [
            Rect(-width / 2 + 4, 4, width, height, 8, paint.fill, paint.stroke, 1),
            Rect(-width / 2, 0, width, height, 8, paint.fill, paint.stroke, 1.4, tip=tip),
            Words(0, 18, title, TITLE, paint.ink, "middle", bold=True),
            *(Words(0, 32.5 + LINE * i, line, SMALL, color, "middle") for i, line in enumerate(lines)),
            *self._draw_mixture(box, width, height),
        ]
        return _finish(width / 2, width / 2 + 4, height + 4, shapes, label)

    def _draw_mixture(self, box: Box, width: float, height: float) -> list[Shape]:
        """Return a thin bar of the kinds of operations inside, or nothing when colours mean something else."""
        if not self.shows_kinds:
            return []
        counts = dict.fromkeys(CATEGORIES, 0)
        for operation in self.graph.operations[box.first : box.last + 1]:
            counts[categorize(operation.op)] += 1
        full, total, x = width - 2 * PAD, sum(counts.values()) or 1, -width / 2 + PAD
        shapes: list[Shape] = []
        for category, count in counts.items():
            if count:
                part = full * count / total
                shapes.append(Rect(x, height - 9, part, 4, 0, f"{category}-line"))
                x += part
        return shapes


def _finish(left: float, right: float, height: float, shapes: list[Shape], label: str) -> Card:
    room = LABEL_ROOM if label else 0.0
    return Card(Extent(left, right, height + room), height, tuple(shapes), label)


def _title_width(text: str) -> float:
    return measure_text(text, TITLE, bold=True)


def _describe_beside(tensor: TensorNode) -> str:
    name = shorten(tensor.name.rpartition(".")[2] or tensor.role, 18)
    return f"{name} {describe_shape(tensor)}"


def _argument_lines(operation: Operation) -> list[str]:
    lines = [shorten(f"{name}={describe_argument(value)}", LONGEST) for name, value in operation.args.items()]
    if len(lines) > MOST_ARGS:
        lines[MOST_ARGS - 1 :] = [f"… {len(lines) - MOST_ARGS + 1} more"]
    return lines


def describe_argument(value: Any) -> str:
    """Return an argument of an operation as short text."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe_argument(each) for each in value)})"
    return value if isinstance(value, str) else repr(value)


def _compact(number: int) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)


def _running_parameters(graph: Graph) -> list[int]:
    """Return the parameters first used before each operation, so that a group's count is a difference."""
    seen: set[int] = set()
    totals = [0]
    for operation in graph.operations:
        fresh = {i for i in operation.inputs if graph.tensors[i].role == "param"} - seen
        seen |= fresh
        totals.append(totals[-1] + sum(graph.tensors[i].numel for i in fresh))
    return totals
