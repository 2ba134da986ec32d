"""The graph of a model as plain data: operations in forward order, the tensors between them, the module tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorNode:
    """A tensor in the graph. ``role``: ``value input param buffer constant``; named after its producer or path."""

    id: int
    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    needs_grad: bool = False
    producer: int = -1
    stats: dict[str, float] | None = None
    grad_stats: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One executed operation: ``id`` is its position in forward order, ``depth`` its longest path from an input."""

    id: int
    name: str
    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    args: dict[str, Any] = field(default_factory=dict)
    site: str = ""
    call: int = 0
    source: str = ""
    code: str = ""
    needs_grad: bool = False
    depth: int = 0
    macs: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """A module of the tree: dotted path (empty for the root), class, own parameters and how often it ran."""

    path: str
    type: str
    parameters: int = 0
    trainable: int = 0
    calls: int = 0
    order: int = -1


@dataclass(frozen=True, slots=True)
class Graph:
    """A traced model. ``tensors[i].id == i`` and ``operations[i].id == i``."""

    name: str
    operations: tuple[Operation, ...]
    tensors: tuple[TensorNode, ...]
    modules: tuple[ModuleNode, ...] = ()
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
