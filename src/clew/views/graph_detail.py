"""What a reader of a graph may ask about a box or a tensor, as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clew.views.graph_card import describe_argument
from clew.views.number import format_bytes, format_integer, format_number
from clew.views.text_width import shorten

if TYPE_CHECKING:
    from clew.model.graph import Graph, Operation, TensorNode
    from clew.views.graph_tree import Box


def describe_operation(operation: Operation) -> dict[str, Any]:
    """Return arguments, inputs and outputs of an operation."""
    return {
        "code": operation.code,
        "args": [(name, shorten(describe_argument(value), 200)) for name, value in operation.args.items()],
        "inputs": list(dict.fromkeys(operation.inputs)),
        "outputs": list(operation.outputs),
    }


def describe_tensor(tensor: TensorNode) -> dict[str, Any]:
    """Return a tensor with its statistics as text."""
    plain = {
        "name": tensor.name or tensor.role,
        "role": tensor.role,
        "shape": "×".join(map(str, tensor.shape)) or "scalar",
        "dtype": tensor.dtype,
        "grad": tensor.needs_grad,
    }
    if tensor.stats:
        plain["stats"] = _describe_stats(tensor.stats)
    if tensor.grad_stats:
        plain["gradStats"] = _describe_stats(tensor.grad_stats)
    return plain


def _describe_stats(stats: dict[str, float]) -> list[tuple[str, str]]:
    return [(name, format_number(float(value))) for name, value in stats.items()]


def describe_box(graph: Graph, box: Box) -> list[tuple[str, str]]:
    """Return the facts about a box, most wanted first."""
    if box.kind in ("input", "output"):
        return []
    facts = [("module", box.path)] if box.path else []
    inside = graph.operations[box.first : box.last + 1]
    if box.kind == "op":
        (operation,) = inside
        facts = [("name", operation.name), ("operation", operation.op), *facts]
        facts.append(("needs grad", "yes" if operation.needs_grad else "no"))
        facts += [("line", operation.source)] if operation.source else []
    else:
        facts.append(("operations", format_integer(len(inside))))
        parameters = {i for op in inside for i in op.inputs if graph.tensors[i].role == "param"}
        facts.append(("parameters", format_integer(sum(graph.tensors[i].numel for i in parameters))))
    macs, size = sum(op.macs for op in inside), sum(op.bytes for op in inside)
    facts += [("multiply-adds", format_integer(macs))] if macs else []
    facts += [("bytes read, written", format_bytes(size))] if size else []
    return facts


def search_words(graph: Graph, box: Box) -> str:
    """Return what a search looks at, in lower case."""
    words = [box.title, box.subtitle, box.path]
    if box.kind == "op":
        operation = graph.operations[box.operation]
        words += [operation.name, operation.op, operation.source]
        words += [graph.tensors[i].name for i in operation.inputs if graph.tensors[i].role != "value"]
    return " ".join(dict.fromkeys(word.lower() for word in words if word))
