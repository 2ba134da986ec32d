"""The graph behind a tensor that already exists, as far as autograd remembers it."""

from __future__ import annotations

import heapq
import re
from typing import TYPE_CHECKING, Any

import torch

from clew.errors import UsageError
from clew.model.graph import Graph, Operation, TensorNode

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOTE = (
    "read from autograd: operations are torch's inner ones, parts without gradient and most arguments are "
    "unknown, and so are module paths and lines; trace the model on its inputs to see them"
)


def trace_tensor(tensor: torch.Tensor, model: torch.nn.Module | None = None) -> Graph:
    """Return the operations that made a tensor; names of parameters come from the model, if it is given."""
    if tensor.grad_fn is None:
        raise UsageError(
            "this tensor has no graph behind it",
            next_step="give a tensor that was computed from parameters outside no_grad and is not detached",
        )
    walker = _Walker(model)
    for node in _in_forward_order(tensor.grad_fn):
        walker.add(node)
    last = walker.output_of(tensor.grad_fn, int(tensor.output_nr))
    return Graph(
        name="tensor",
        operations=tuple(walker.operations),
        tensors=tuple(walker.tensors),
        inputs=tuple(each.id for each in walker.tensors if each.role == "input"),
        outputs=(last,),
        notes=(_NOTE,),
    )


def _in_forward_order(last: Any) -> Iterator[Any]:
    """Yield every node behind one, inputs before users, and otherwise in the order they were made."""
    users: dict[Any, list[Any]] = {}
    waits: dict[Any, int] = {}
    found = [last]
    while found:
        node = found.pop()
        if node in waits:
            continue
        before = [each for each, _ in node.next_functions if each is not None]
        waits[node] = len(before)
        for each in before:
            users.setdefault(each, []).append(node)
        found += before
    ready = [(_age(node), number, node) for number, node in enumerate(waits) if not waits[node]]
    heapq.heapify(ready)
    while ready:
        _, number, node = heapq.heappop(ready)
        yield node
        for user in users.get(node, ()):
            waits[user] -= 1
            if not waits[user]:
                heapq.heappush(ready, (_age(user), number, user))


def _age(node: Any) -> int:
    """Leaves come first: they have no place in the order of operations."""
    return -1 if hasattr(node, "variable") else int(node._sequence_nr())


class _Walker:
    """Turns autograd nodes, oldest first, into operations and tensors."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self.operations: list[Operation] = []
        self.tensors: list[TensorNode] = []
        self._outputs: dict[Any, list[int]] = {}
        self._depths: dict[int, int] = {}
        self._taken: dict[str, int] = {}
        self._names = {id(each): name for name, each in model.named_parameters()} if model is not None else {}

    def output_of(self, node: Any, index: int) -> int:
        """Return the number of an output of a node that was added."""
        numbers = self._outputs[node]
        return numbers[min(index, len(numbers) - 1)]

    def add(self, node: Any) -> None:
        """Add a node whose inputs have all been added."""
        if hasattr(node, "variable"):
            self._outputs[node] = [self._add_leaf(node.variable)]
            return
        op = _plain_name(node.name())
        name = self._free(op)
        number = len(self.operations)
        inputs = tuple(
            self.output_of(before, index) for before, index in node.next_functions if before is not None
        )
        self._outputs[node] = self._add_outputs(node, name, number)
        self._depths[number] = 1 + max((self._depth(each) for each in inputs), default=-1)
        self.operations.append(
            Operation(
                id=number,
                name=name,
                op=op,
                inputs=inputs,
                outputs=tuple(self._outputs[node]),
                args=_saved_arguments(node),
                needs_grad=True,
                depth=self._depths[number],
            )
        )

    def _depth(self, tensor: int) -> int:
        return self._depths.get(self.tensors[tensor].producer, -1)

    def _add_leaf(self, tensor: torch.Tensor) -> int:
        known = self._names.get(id(tensor))
        is_parameter = known is not None or isinstance(tensor, torch.nn.Parameter)
        role = "param" if is_parameter else "input"
        return self._add_tensor(known or self._free(role), role, tensor)

    def _add_outputs(self, node: Any, name: str, number: int) -> list[int]:
        """What a backward node takes in has the shapes of what its forward operation gave out."""
        values = getattr(node, "_input_metadata", ()) or (torch.empty(()),)
        titles = [f"{name}:{index}" if index else name for index in range(len(values))]
        return [
            self._add_tensor(title, "value", value, producer=number)
            for title, value in zip(titles, values, strict=True)
        ]

    def _add_tensor(self, name: str, role: str, like: Any, *, producer: int = -1) -> int:
        number = len(self.tensors)
        self.tensors.append(
            TensorNode(
                id=number,
                name=name,
                role=role,
                shape=tuple(int(size) for size in like.shape),
                dtype=str(like.dtype).removeprefix("torch."),
                device=str(like.device),
                needs_grad=True,
                producer=producer,
            )
        )
        return number

    def _free(self, name: str) -> str:
        taken = self._taken.get(name, 0)
        self._taken[name] = taken + 1
        return f"{name}_{taken}" if taken else name


def _plain_name(name: str) -> str:
    """Return ``leaky_relu`` for ``LeakyReluBackward0``; the class for a function of the user's."""
    stem = re.sub(r"Backward\d*$", "", name.rsplit("::", 1)[-1])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower() if stem != name else name


def _saved_arguments(node: Any) -> dict[str, Any]:
    """Return the plain numbers that the node keeps for its backward: strides, padding, dimensions."""
    shown = {}
    for attribute in dir(node):
        if attribute.startswith("_saved_") and "_sym_" not in attribute:
            try:
                value = _plain(getattr(node, attribute))
            except RuntimeError:  # freed by a backward pass
                continue
            if value is not None:
                shown[attribute.removeprefix("_saved_")] = value
    return shown


def _plain(value: Any) -> Any:
    """Return a number, text or tuple of numbers as it is, None for anything else."""
    if isinstance(value, int) and value >= 2**63:
        return value - 2**64  # a dimension counted from the end, kept as unsigned
    if isinstance(value, (bool, int, float, str)):
        return value
    is_numbers = isinstance(value, (tuple, list)) and all(isinstance(each, (int, float)) for each in value)
    return tuple(_plain(each) for each in value) if is_numbers else None
