"""A graph as a table: one row per operation or per module, in forward order, with totals that add up."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from clew.errors import UsageError
from clew.views.block import Block, Callout, Cell, Column, Heading, KeyValues, Page, Table
from clew.views.graph_card import describe_argument, describe_shape
from clew.views.number import format_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from clew.model.graph import Graph, Operation, TensorNode

WIDE: Final = 140
"""From this many columns on, a row is one line if names fit."""

UNUSED: Final = "(not used)"
SHOWN_STATS: Final = ("min", "max", "mean", "std", "median", "zero", "nan", "inf")
"""What is told of a tensor; ``zero`` is a share, ``nan`` and ``inf`` are counts."""

_MOST_SHAPES: Final = 3
NARROW: Final = 80
_FOLD: Final = 24
"""Names and arguments are folded into lines of this length on a narrow screen, shorter ones where columns are wide."""
_LEAST_FOLD: Final = 12
_ARGS: Final = 20
"""Columns that the arguments have at least on a wide screen."""
_LABEL: Final = 28
"""A label of a statistic longer than this takes two lines."""


@dataclass(frozen=True, slots=True)
class Row:
    """An operation, or everything a module did. Parameters count where they are read first, so counts add up."""

    name: str
    type: str
    operations: tuple[Operation, ...]
    args: dict[str, Any]
    inputs: tuple[TensorNode, ...]
    outputs: tuple[TensorNode, ...]
    weights: tuple[TensorNode, ...] = ()
    parameters: int = 0
    trainable: int = 0
    calls: int = 1

    @property
    def macs(self) -> int:
        """Multiply-adds of its operations."""
        return sum(operation.macs for operation in self.operations)

    @property
    def bytes(self) -> int:
        """Bytes its operations read and wrote."""
        return sum(operation.bytes for operation in self.operations)

    @property
    def needs_grad(self) -> bool:
        """Whether any of its outputs takes part in the backward pass."""
        return any(operation.needs_grad for operation in self.operations)


def make_rows(graph: Graph, depth: int | None = None) -> list[Row]:
    """Return one row per operation, or with ``depth`` one per module of that depth in the tree.

    Operations that lie higher in the tree than ``depth`` keep a row of their own. A last row holds the
    parameters that nothing read.
    """
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise UsageError(
            f"depth={depth!r} is no depth of the module tree", next_step="give 1 or more, or leave it out"
        )
    groups: dict[str, list[Operation]] = {}
    for operation in graph.operations:
        groups.setdefault(_group_of(operation, depth), []).append(operation)
    counted: set[int] = set()
    makers = _Makers(graph)
    rows = [
        makers.row(name, operations, counted, is_module=depth is not None)
        for name, operations in groups.items()
    ]
    left = [each for each in graph.tensors if each.role == "param" and each.id not in counted]
    if left:
        totals = {"parameters": _count(left), "trainable": _count(left, trainable=True)}
        rows.append(Row(UNUSED, "", (), {}, (), (), tuple(left), calls=0, **totals))
    return rows


def _group_of(operation: Operation, depth: int | None) -> str:
    parts = operation.site.split(".") if operation.site else []
    return operation.name if depth is None or len(parts) < depth else ".".join(parts[:depth])


class _Makers:
    """What rows of one graph share: who reads each tensor, and the modules by path."""

    def __init__(self, graph: Graph) -> None:
        self._tensors = graph.tensors
        self._modules = {module.path: module for module in graph.modules}
        self._leaving = set(graph.outputs)
        self._readers: dict[int, set[int]] = {}
        for operation in graph.operations:
            for number in operation.inputs:
                self._readers.setdefault(number, set()).add(operation.id)

    def row(self, name: str, operations: list[Operation], counted: set[int], *, is_module: bool) -> Row:
        """Return the row of some operations: what goes in from outside, what comes out of them."""
        inside = {operation.id for operation in operations}
        taken = dict.fromkeys(number for each in operations for number in each.inputs)
        made = [number for each in operations for number in each.outputs]
        read = [self._tensors[number] for number in taken]
        parameters = [each for each in read if each.role == "param" and each.id not in counted]
        counted.update(each.id for each in parameters)
        module = self._modules.get(name) if is_module else None
        single = operations[0]
        leaves = [number for number in made if self._goes_out(number, inside)] or made[-1:]
        return Row(
            name=name,
            type=module.type.rpartition(".")[2] if module else single.op,
            operations=tuple(operations),
            args=single.args if len(operations) == 1 and module is None else {},
            inputs=tuple(each for each in read if each.role != "param" and each.producer not in inside),
            outputs=tuple(self._tensors[number] for number in leaves),
            weights=tuple(each for each in read if each.role == "param"),
            parameters=_count(parameters),
            trainable=_count(parameters, trainable=True),
            calls=module.calls if module else 1,
        )

    def _goes_out(self, number: int, inside: set[int]) -> bool:
        return number in self._leaving or not self._readers.get(number, set()) <= inside


def _count(tensors: Iterable[TensorNode], *, trainable: bool = False) -> int:
    return sum(tensor.numel for tensor in tensors if tensor.needs_grad or not trainable)


# -------------------------------------------------------------------- what to show


def make_page(graph: Graph, *, depth: int | None = None, width: int | None = NARROW) -> Page:
    """Return the table of a graph with its totals and remarks, and the statistics if they were measured.

    ``width`` is that of the screen, None for a medium whose lines have any length.
    """
    rows = make_rows(graph, depth)
    is_wide = width is None or width >= WIDE
    has_grads = _has_grads(graph)
    table = _wide_table(rows, has_grads)
    if width is not None and not (is_wide and _least_width(table) <= width):
        table = _folded_table(rows, has_grads, width=width)
    blocks: list[Block] = [Heading(graph.name, 1), table]
    if any(tensor.stats for tensor in graph.tensors):
        blocks += _statistics(rows, is_wide=is_wide)
    blocks += [Heading("total"), _totals(graph)]
    blocks += [Callout("note", note) for note in graph.notes]
    return Page(graph.name, tuple(blocks))


def _has_grads(graph: Graph) -> bool:
    return any(tensor.grad_stats for tensor in graph.tensors)


def _number_columns(has_grads: bool, count: str) -> tuple[Column, ...]:
    columns = (
        Column("parameters", "params", count),
        Column("macs", "macs", count),
        Column("bytes", "bytes", "bytes"),
        Column("needs_grad", "grad"),
    )
    return (*columns, Column("grad", "|grad|", "number")) if has_grads else columns


def _wide_table(rows: list[Row], has_grads: bool) -> Table:
    what = (
        Column("name", "name", flexible=True),
        Column("type", "type"),
        Column("in", "in"),
        Column("out", "out"),
    )
    more = (Column("source", "line"), Column("args", "args", flexible=True))
    lines = tuple(_wide_line(row, has_grads) for row in rows)
    return Table((*what, *_number_columns(has_grads, "integer"), *more), lines)


def _least_width(table: Table) -> int:
    """Return how wide a table of one line per row is when nothing but the arguments is cut."""
    return _ARGS + sum(
        2 + max([len(column.title), *(len(_text(line[index], column)) for line in table.rows)])
        for index, column in enumerate(table.columns[:-1])
    )


def _text(cell: Cell, column: Column) -> str:
    return format_value(cell.value, cell.format or column.format)


def _folded_table(rows: list[Row], has_grads: bool, *, width: int) -> Table:
    what = (Column("name", "name / type args", flexible=True), Column("shape", "out / in", flexible=True))
    numbers = _number_columns(has_grads, "count")
    length = _fold_length(rows, numbers, has_grads=has_grads, width=width)
    lines = tuple(line for row in rows for line in _folded_lines(row, has_grads, length=length))
    return Table((*what, *numbers), lines)


def _fold_length(rows: list[Row], numbers: Iterable[Column], *, has_grads: bool, width: int) -> int:
    """Return how long a line of names and arguments can be beside shapes and numbers, so that nothing is cut."""
    cells = [_number_cells(row, has_grads) for row in rows]
    taken = sum(
        2 + max([len(column.title), *(len(_text(line[index], column)) for line in cells)])
        for index, column in enumerate(numbers)
    )
    shapes = max((len(text) for row in rows for text in (*_taken(row), shape_text(row.outputs))), default=0)
    return max(_LEAST_FOLD, min(_FOLD, width - taken - shapes - 6))


def _wide_line(row: Row, has_grads: bool) -> tuple[Cell, ...]:
    cells = [Cell(row.name), Cell(_title(row)), Cell(shape_text(row.inputs)), Cell(shape_text(row.outputs))]
    cells += [*_number_cells(row, has_grads), Cell(_source(row)), Cell(args_text(row.args))]
    return tuple(cells)


def _folded_lines(row: Row, has_grads: bool, *, length: int) -> Iterator[tuple[Cell, ...]]:
    """Yield the lines of a row on a narrow screen: what came out and its cost, then what it is and took."""
    numbers = _number_cells(row, has_grads)
    blank = tuple(Cell("") for _ in numbers)
    first, *more = fold_name(row.name, length)
    yield (Cell(first), Cell(shape_text(row.outputs)), *numbers)
    for part in more:
        yield (Cell(f"  {part}"), Cell(""), *blank)
    words = wrap(f"{_title(row)} {args_text(row.args)}", length, break_long_words=False)
    whats = [part for line in words for part in fold_name(line, length)]
    for what, shape in zip_longest(whats, _taken(row), fillvalue=""):
        yield (Cell(f"  {what}" if what else "", "quiet"), Cell(shape, "quiet"), *blank)


def _taken(row: Row) -> list[str]:
    """Return the shapes that went in, one to a line; of many, equal ones are counted and the first few told."""
    taken = [tensor for tensor in row.inputs if tensor.role != "buffer"]
    if len(taken) <= _MOST_SHAPES:
        return [f"< {shape_text((tensor,))}" for tensor in taken]
    texts = _count_shapes(taken)
    more = [f"< +{len(texts) - _MOST_SHAPES}"] if len(texts) > _MOST_SHAPES else []
    return [f"< {text}" for text in texts[:_MOST_SHAPES]] + more


def fold_name(name: str, length: int = _FOLD) -> list[str]:
    """Return a long name in several pieces that end after a dot, or after an underscore where a part is long."""
    if len(name) <= length:
        return [name]
    pieces = [""]
    for part in re.findall(r"[^.]*\.|[^.]+$", name):
        for each in [part] if len(part) <= length else re.findall(r"[^_]*_|[^_]+$", part):
            if pieces[-1] and len(pieces[-1]) + len(each) > length:
                pieces.append("")
            pieces[-1] += each
    return pieces


def _number_cells(row: Row, has_grads: bool) -> tuple[Cell, ...]:
    cells = [Cell(row.parameters or ""), Cell(row.macs or ""), Cell(row.bytes or "")]
    cells.append(Cell("yes" if row.needs_grad else "", "plain"))
    if has_grads:
        cells.append(_grad_cell(row))
    return tuple(cells)


def _grad_cell(row: Row) -> Cell:
    known = [each.grad_stats for each in row.outputs if each.grad_stats]
    if not known:
        return Cell("")
    is_bad = any(stats["nan"] or stats["pos_inf"] or stats["neg_inf"] for stats in known)
    return Cell(sum(stats["l2"] ** 2 for stats in known) ** 0.5, "bad" if is_bad else "plain")


def _title(row: Row) -> str:
    return f"{row.type} ×{row.calls}" if row.calls > 1 else row.type


def _source(row: Row) -> str:
    return row.operations[0].source.rpartition("/")[2] if row.operations else ""


def shape_text(tensors: Iterable[TensorNode]) -> str:
    """Return the shapes of tensors in few words; equal ones are counted."""
    texts = _count_shapes(tensor for tensor in tensors if tensor.role != "buffer")
    more = f" +{len(texts) - _MOST_SHAPES}" if len(texts) > _MOST_SHAPES else ""
    return ", ".join(texts[:_MOST_SHAPES]) + more


def _count_shapes(tensors: Iterable[TensorNode]) -> list[str]:
    shapes = Counter(describe_shape(tensor) for tensor in tensors)
    return [text if count == 1 else f"{count}·({text})" for text, count in shapes.items()]


def args_text(args: dict[str, Any]) -> str:
    """Return the arguments of an operation as ``stride=(1,1) groups=1``; a flag that is off is left out."""
    shown = {name: value for name, value in args.items() if value is not False}
    return " ".join(f"{name}={describe_argument(value).replace(', ', ',')}" for name, value in shown.items())


def _totals(graph: Graph) -> KeyValues:
    parameter_bytes = sum(tensor.bytes for tensor in graph.tensors if tensor.role == "param")
    # A recorded run knows its modules, not what their operations cost.
    cost = (
        ("multiply-adds", Cell(graph.macs, format="integer")),
        ("bytes read and written", Cell(graph.bytes, format="bytes")),
    )
    return KeyValues(
        (
            ("operations", Cell(len(graph.operations), format="integer")),
            ("parameters", Cell(graph.parameters, format="integer")),
            ("trainable", Cell(graph.trainable, format="integer")),
            ("size of parameters", Cell(parameter_bytes, format="bytes")),
            *(cost if graph.bytes else ()),
        )
    )


# -------------------------------------------------------------------- statistics


def _statistics(rows: list[Row], *, is_wide: bool) -> list[Block]:
    lines: list[tuple[Cell, ...]] = []
    for row in rows:
        told = list(row_statistics(row))
        if told:
            empty = tuple(Cell("") for _ in range(len(SHOWN_STATS) if is_wide else len(SHOWN_STATS) // 2))
            lines.append((Cell(f"{row.name} ({row.type})"), *empty))
        for side, tensor, stats in told:
            cells = _stat_cells(stats)
            name = "" if tensor.role == "value" else tensor.name
            label = f"  {side} {name}".rstrip()
            if is_wide:
                lines.append((Cell(label, "quiet"), *cells))
            else:
                above, below = (label, "") if len(label) <= _LABEL else (f"  {side}", f"    {name}")
                lines.append((Cell(above, "quiet"), *cells[:4]))
                if below or any(cell.value != "" for cell in cells[4:]):
                    lines.append((Cell(below, "quiet"), *cells[4:]))
    return [Heading("values"), Table(_stat_columns(is_wide=is_wide), tuple(lines))]


def row_statistics(row: Row) -> Iterator[tuple[str, TensorNode, dict[str, float]]]:
    """Yield what was measured of the tensors of a row: input data, output data, input grads, output grads."""
    read = [*(each for each in row.inputs if each.role != "buffer"), *row.weights]
    for kind in ("data", "grad"):
        for side, tensors in (("input", read), ("output", row.outputs)):
            for tensor in tensors:
                stats = tensor.stats if kind == "data" else tensor.grad_stats
                if stats:
                    yield f"{side} {kind}", tensor, shown_stats(stats)


def shown_stats(stats: dict[str, float]) -> dict[str, float]:
    """Return the numbers that are told of a tensor; those over finite values, and the counts of the others."""
    # A recorded run has no median: that would cost more than all its other numbers together.
    shown: dict[str, float] = {name: stats[name] for name in SHOWN_STATS[:5] if name in stats}
    shown["zero"] = stats["zero"] / stats["count"] if stats["count"] else float("nan")
    shown["nan"] = stats["nan"]
    shown["inf"] = stats["pos_inf"] + stats["neg_inf"]
    return shown


def _stat_cells(stats: dict[str, float]) -> list[Cell]:
    cells = [Cell(stats.get(name, "")) for name in SHOWN_STATS[:5]]
    cells.append(Cell(stats["zero"] or "", "warn" if stats["zero"] == 1 else "plain", "share"))
    cells += [Cell(int(stats[name]) or "", "bad" if stats[name] else "plain") for name in ("nan", "inf")]
    return cells


def _stat_columns(*, is_wide: bool) -> tuple[Column, ...]:
    titles = ["min", "max", "mean", "std", "median", "zeros", "NaN", "Inf"]
    if not is_wide:
        titles = [f"{above}/{below}" for above, below in zip(titles[:4], titles[4:], strict=True)]
    numbers = [Column(title, title, "number") for title in titles]
    return (Column("tensor", "tensor", flexible=True), *numbers)
