"""The table of a graph for machines: nested records for JSON, flat ones for CSV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clew.views.graph_table import SHOWN_STATS, args_text, make_rows, row_statistics, shown_stats
from clew.views.number import format_number

if TYPE_CHECKING:
    from clew.model.graph import Graph, TensorNode
    from clew.views.graph_table import Row


def to_records(graph: Graph, depth: int | None = None) -> dict[str, Any]:
    """Return rows, totals and remarks in plain types, for JSON."""
    rows = make_rows(graph, depth)
    return {
        "name": graph.name,
        "rows": [_record(row) for row in rows],
        "totals": {
            "operations": len(graph.operations),
            "parameters": graph.parameters,
            "trainable": graph.trainable,
            "macs": graph.macs,
            "bytes": graph.bytes,
        },
        "notes": list(graph.notes),
    }


def _record(row: Row) -> dict[str, Any]:
    first = row.operations[0] if row.operations else None
    return {
        "name": row.name,
        "type": row.type,
        "site": first.site if first else "",
        "source": first.source if first else "",
        "depth": first.depth if first else 0,
        "calls": row.calls,
        "operations": len(row.operations),
        "args": row.args,
        "inputs": [_tensor_record(tensor) for tensor in row.inputs],
        "outputs": [_tensor_record(tensor) for tensor in row.outputs],
        "weights": [_tensor_record(tensor) for tensor in row.weights],
        "parameters": row.parameters,
        "trainable": row.trainable,
        "needs_grad": row.needs_grad,
        "macs": row.macs,
        "bytes": row.bytes,
    }


def _tensor_record(tensor: TensorNode) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": tensor.name,
        "role": tensor.role,
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "needs_grad": tensor.needs_grad,
    }
    if tensor.stats:
        record["data"] = shown_stats(tensor.stats)
    if tensor.grad_stats:
        record["grad"] = shown_stats(tensor.grad_stats)
    return record


def to_lines(graph: Graph, depth: int | None = None) -> list[dict[str, Any]]:
    """Return one flat record per row, for CSV; several tensors of a side are joined by ``;``."""
    rows = make_rows(graph, depth)
    is_measured = any(tensor.stats or tensor.grad_stats for tensor in graph.tensors)
    return [_line(row, is_measured=is_measured) for row in rows]


def _line(row: Row, *, is_measured: bool) -> dict[str, Any]:
    record = _record(row)
    record["args"] = args_text(row.args)
    for side, tensors in (("inputs", row.inputs), ("outputs", row.outputs), ("weights", row.weights)):
        record[side] = ";".join(f"{tensor.dtype}({','.join(map(str, tensor.shape))})" for tensor in tensors)
    if is_measured:
        told = list(row_statistics(row))
        for kind in ("input data", "output data", "input grad", "output grad"):
            mine = [stats for side, _, stats in told if side == kind]
            for name in SHOWN_STATS:
                key = f"{kind.replace(' ', '_')}_{name}"
                record[key] = ";".join(format_number(stats[name]) for stats in mine if name in stats)
    return record
