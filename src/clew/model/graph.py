"""The graph of a model as plain data: operations in forward order, tensors between them, the module tree."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

from clew.errors import UsageError, suggest
from clew.model.glob import compile_globs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GRAPH_FORMAT: Final = 1

_ITEM_BYTES: Final = {
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "complex64": 8,
    "complex128": 16,
    "complex32": 4,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "qint32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
}  # fmt: skip - everything else (bool, bytes, the 8-bit floats) takes one byte

_G = TypeVar("_G", bound="Graph")


@dataclass(frozen=True, slots=True)
class TensorNode:
    """A tensor in the graph, named after its producer or its path in the model.

    ``role`` is ``value input param buffer constant``. ``aliases`` are the further names of a tied parameter,
    ``source`` is the line that made a constant, ``stats`` and ``grad_stats`` if it was measured.
    """

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
    aliases: tuple[str, ...] = ()
    source: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the elements in memory."""
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True, slots=True)
class Operation:
    """One executed operation: ``id`` is its place in forward order, ``depth`` the longest path to it."""

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
    """A module of the tree: dotted path (empty for the root), class, own parameters and how often it ran.

    ``aliases`` are the other paths of a module that stands in several places; it goes by the first.
    A parameter that several modules share counts for the first of them only, so that counts add up.
    """

    path: str
    type: str
    parameters: int = 0
    trainable: int = 0
    calls: int = 0
    order: int = -1
    aliases: tuple[str, ...] = ()


class BoundOperation:
    """An operation with its graph: every field of ``Operation``, and inputs and outputs as tensors."""

    __slots__ = ("_graph", "operation")

    def __init__(self, graph: Graph, operation: Operation) -> None:
        self._graph = graph
        self.operation = operation

    @property
    def type(self) -> str:
        """What kind of operation it is, such as ``conv2d``: another word for ``op``."""
        return self.operation.op

    @property
    def inputs(self) -> tuple[TensorNode, ...]:
        """The tensors it read, parameters included, in the order of its arguments."""
        return tuple(self._graph.tensors[i] for i in self.operation.inputs)

    @property
    def outputs(self) -> tuple[TensorNode, ...]:
        """The tensors it made."""
        return tuple(self._graph.tensors[i] for i in self.operation.outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operation, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundOperation) and other.operation == self.operation

    def __hash__(self) -> int:
        return hash((self.operation.id, self.operation.name))

    def __repr__(self) -> str:
        taken = " ".join(_brief(tensor) for tensor in self.inputs)
        made = " ".join(_brief(tensor) for tensor in self.outputs)
        where = f"  {self.operation.source}" if self.operation.source else ""
        return f"{self.operation.name} {self.operation.op}: {taken} -> {made}{where}"


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

    def __len__(self) -> int:
        return len(self.operations)

    def __iter__(self) -> Iterator[BoundOperation]:
        return (BoundOperation(self, operation) for operation in self.operations)

    def __repr__(self) -> str:
        counts = (
            f"{len(self.operations)} operations, {len(self.modules)} modules, {self.parameters:,} parameters"
        )
        return f"<{type(self).__name__} {self.name}: {counts}>"

    @property
    def parameters(self) -> int:
        """Elements of all parameters of the model, tied ones counted once."""
        return sum(tensor.numel for tensor in self.tensors if tensor.role == "param")

    @property
    def trainable(self) -> int:
        """Elements of the parameters that need a gradient."""
        return sum(tensor.numel for tensor in self.tensors if tensor.role == "param" and tensor.needs_grad)

    @property
    def macs(self) -> int:
        """Multiply-adds of all matrix products and convolutions of one forward pass."""
        return sum(operation.macs for operation in self.operations)

    @property
    def bytes(self) -> int:
        """Bytes all operations read and wrote."""
        return sum(operation.bytes for operation in self.operations)

    def visit(self, function: Callable[[BoundOperation], Any]) -> None:
        """Call ``function`` with every operation in forward order."""
        for operation in self:
            function(operation)

    def visit_check(self, function: Callable[[BoundOperation], Any]) -> bool:
        """Call ``function`` in forward order until it says yes; return whether it did."""
        return any(function(operation) for operation in self)

    def find(
        self, pattern: str = "*", *, op: str = "*", site: str = "*", line: str = "", role: str = ""
    ) -> list[BoundOperation]:
        """Return the operations whose name or site, kind, module path and line match, in forward order.

        Patterns: ``*`` any text, ``?`` a character, ``{a,b}`` one of several. ``line`` is ``model.py:41``;
        ``role`` asks for operations that read a tensor of that role, such as ``param``.
        """
        for value in (pattern, op, site, line):
            if not isinstance(value, str):
                raise UsageError(
                    f"find takes text, not {value!r}", next_step="write find('block.*', line='model.py:41')"
                )
        is_named, is_op, is_site = (compile_globs((each,)) for each in (pattern, op, site))
        return [
            bound
            for bound in self
            if (is_named(bound.name) or is_named(bound.site))
            and is_op(bound.op)
            and is_site(bound.site)
            and _is_line(bound.source, line)
            and (not role or any(tensor.role == role for tensor in bound.inputs))
        ]

    def __getitem__(self, name: str | int) -> BoundOperation:
        if isinstance(name, int):
            return BoundOperation(self, self.operations[name])
        named = [operation for operation in self.operations if operation.name == name]
        found = named or [operation for operation in self.operations if operation.site == name]
        if len(found) == 1:
            return BoundOperation(self, found[0])
        raise self._no_single(name, found)

    def tensor(self, name: str) -> TensorNode:
        """Return the tensor of that name: a parameter, a buffer, an input or the output of an operation."""
        for tensor in self.tensors:
            if tensor.name == name or name in tensor.aliases:
                return tensor
        near = suggest(name, (tensor.name for tensor in self.tensors))
        raise UsageError(f"no tensor '{name}' in the graph of {self.name}", next_step=near)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the graph as JSON text that ``from_json`` reads back to an equal graph."""
        plain = {"format": GRAPH_FORMAT, **{part.name: getattr(self, part.name) for part in fields(Graph)}}
        return json.dumps(_to_plain(plain), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls: type[_G], text: str) -> _G:
        """Rebuild a graph from the text of ``to_json``."""
        try:
            plain = _from_plain(json.loads(text))
            if plain.pop("format") != GRAPH_FORMAT:
                raise UsageError(
                    "this graph was written by another version of clew", next_step="trace it again"
                )
            plain["operations"] = tuple(Operation(**each) for each in plain["operations"])
            plain["tensors"] = tuple(TensorNode(**each) for each in plain["tensors"])
            plain["modules"] = tuple(ModuleNode(**each) for each in plain["modules"])
            return cls(**plain)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                "this text is not a graph", where=f"{type(error).__name__}: {error}",
                next_step="give the text that graph.to_json() returned",
            ) from error  # fmt: skip

    def _no_single(self, name: str, found: list[Operation]) -> UsageError:
        if found:
            names = ", ".join(operation.name for operation in found[:6])
            return UsageError(
                f"'{name}' ran {len(found)} operations: {names}{' …' if len(found) > 6 else ''}",
                next_step=f"name one of them, or take all: find('{name}*')",
            )
        first = next((module.path for module in self.modules if name in module.aliases), "")
        if first:
            return UsageError(
                f"'{name}' is another name of the module '{first}'",
                next_step=f"take all of its calls: find('{first}*')",
            )
        known = [operation.name for operation in self.operations] + [module.path for module in self.modules]
        return UsageError(
            f"no operation or module '{name}' in the graph of {self.name}",
            next_step=suggest(name, known) or "graph.find('*') lists the operations",
        )


def _brief(tensor: TensorNode) -> str:
    size = ",".join(str(each) for each in tensor.shape)
    return f"{tensor.name}({size})" if tensor.role != "value" else f"({size})"


def _is_line(source: str, line: str) -> bool:
    """Whether ``dir/model.py:41`` is meant by ``model.py:41``, ``model.py`` or the whole path."""
    if not line:
        return True
    path = source.rpartition(":")[0]
    return any(each == line or each.endswith("/" + line) for each in (source, path))


def _to_plain(value: Any) -> Any:
    """Turn dataclasses, tuples and floats that JSON does not know into what it knows."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, dict):
        return {key: _to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(each) for each in value]
    if isinstance(value, TensorNode | Operation | ModuleNode):
        return _to_plain(asdict(value))
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$float"}:
            return float(value["$float"])
        return {key: _from_plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return tuple(_from_plain(each) for each in value)
    return value
