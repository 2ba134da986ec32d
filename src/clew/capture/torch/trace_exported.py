"""Graphs that exist without running: exported programs and fx graph modules."""

from __future__ import annotations

import operator
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from clew.capture.torch.trace_build import SourceNames, plain_arguments, type_name
from clew.capture.torch.trace_cost import count_bytes, count_macs
from clew.capture.torch.trace_function import plain_name
from clew.capture.torch.trace_recorder import Ref, is_user_code
from clew.model.graph import Graph, ModuleNode, Operation, TensorNode

if TYPE_CHECKING:
    from collections.abc import Iterable

_PARAMETERS = ("PARAMETER", "BUFFER", "CONSTANT_TENSOR")
_ROLES = {"PARAMETER": "param", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant"}


def trace_exported(program: torch.export.ExportedProgram) -> Graph:
    """Return the graph of an exported program, with the modules and parameters it was exported from."""
    named = {
        spec.arg.name: (_ROLES[spec.kind.name], str(spec.target))
        for spec in program.graph_signature.input_specs
        if spec.kind.name in _PARAMETERS
    }
    reader = _Reader(program.graph_module, named)
    return reader.read("ExportedProgram", ())


def trace_fx(module: torch.fx.GraphModule) -> Graph:
    """Return the graph of an fx graph module; shapes are known only if something has propagated them."""
    note = "read from the fx graph without running it: give inputs to see shapes and values"
    reader = _Reader(module, {})
    return reader.read(type(module).__name__, (note,) if reader.lacks_shapes() else ())


@dataclass(slots=True)
class _Reader:
    """Turns the nodes of an fx graph into operations and tensors."""

    module: torch.fx.GraphModule
    named: dict[str, tuple[str, str]]
    operations: list[Operation] = field(default_factory=list)
    tensors: list[TensorNode] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)
    numbers: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    sources: SourceNames = field(default_factory=SourceNames)
    taken: dict[str, int] = field(default_factory=dict)
    crowd: Counter[str] = field(default_factory=Counter)

    def lacks_shapes(self) -> bool:
        """Return whether no node tells the shape of its value."""
        return not any(_value_of(node) is not None for node in self.module.graph.nodes)

    def read(self, name: str, notes: tuple[str, ...]) -> Graph:
        """Return the whole graph."""
        outputs: list[int] = []
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                role, title = self.named.get(node.name, ("input", node.name))
                self.numbers[node] = (self._add_tensor(title, role, _value_of(node)),)
            elif node.op == "output":
                outputs += self._inputs_of(node)
            elif node.op == "get_attr":
                self.numbers[node] = (self._add_attribute(str(node.target)),)
            elif _is_unpacking(node):
                self.numbers[node] = (self._pick(node),)
            else:
                self._add_operation(node)
        return Graph(
            name=name,
            operations=tuple(self.operations),
            tensors=tuple(self.tensors),
            modules=self._modules(),
            inputs=tuple(tensor.id for tensor in self.tensors if tensor.role == "input"),
            outputs=tuple(dict.fromkeys(outputs)),
            notes=notes,
        )

    def _add_operation(self, node: torch.fx.Node) -> None:
        site = self._site_of(node)
        op, extra = self._kind_of(node)
        name = self._free(site if self._is_alone(node, site) else f"{site}.{op}".lstrip("."))
        number = len(self.operations)
        inputs = [*self._inputs_of(node), *(self._add_attribute(each) for each in extra)]
        values = _values_of(node)
        titles = [f"{name}:{index}" if index else name for index in range(len(values))]
        made = tuple(
            self._add_tensor(*pair, producer=number)
            for pair in zip(titles, ["value"] * len(titles), values, strict=True)
        )
        self.numbers[node] = made
        self.operations.append(self._operation(node, number, (name, op, site), (inputs, made)))

    def _is_alone(self, node: torch.fx.Node, site: str) -> bool:
        """Whether a node is all its module does, so that the module's name is name enough."""
        if not self.crowd:
            self.crowd.update(path for each in self.module.graph.nodes for path in _paths_of(each))
        return node.op == "call_module" or (bool(site) and self.crowd[site] == 1)

    def _operation(
        self,
        node: torch.fx.Node,
        number: int,
        titles: tuple[str, str, str],
        ends: tuple[list[int], tuple[int, ...]],
    ) -> Operation:
        name, op, site = titles
        taken, made = ([self.tensors[each] for each in end] for end in ends)
        named = self._named_arguments(node)
        producers = [tensor.producer for tensor in taken if tensor.producer >= 0]
        place, code = self.sources.look_up(_source_of(node))
        return Operation(
            id=number,
            name=name,
            op=op,
            inputs=tuple(ends[0]),
            outputs=tuple(ends[1]),
            args=plain_arguments(named),
            site=site,
            source=place,
            code=code,
            needs_grad=any(tensor.needs_grad for tensor in made),
            depth=1 + max((self.operations[each].depth for each in producers), default=-1),
            macs=count_macs(op, named, taken, made),
            bytes=count_bytes(op, taken, made, is_view=False),
        )

    def _kind_of(self, node: torch.fx.Node) -> tuple[str, Iterable[str]]:
        """Return what a node does, and the parameters it reads without naming them."""
        if node.op == "call_module":
            called = self.module.get_submodule(str(node.target))
            return type(called).__name__, (f"{node.target}.{name}" for name, _ in called.named_parameters())
        if node.op == "call_method":
            return str(node.target), ()
        target: Any = node.target
        return plain_name(target, getattr(target, "__name__", str(target))), ()

    def _named_arguments(self, node: torch.fx.Node) -> dict[str, Any]:
        schema = getattr(node.target, "_schema", None)
        names = [each.name for each in schema.arguments] if schema is not None else []
        named = {
            names[index] if index < len(names) else f"arg{index}": self._strip(value)
            for index, value in enumerate(node.args)
        }
        return {**named, **{key: self._strip(value) for key, value in node.kwargs.items()}}

    def _strip(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return Ref(self.numbers[value][0]) if self.numbers.get(value) else None
        if isinstance(value, (list, tuple)):
            return tuple(self._strip(each) for each in value)
        return value if value is None or isinstance(value, (bool, int, float, slice)) else str(value)

    def _inputs_of(self, node: torch.fx.Node) -> list[int]:
        return [number for before in node.all_input_nodes for number in self.numbers.get(before, ())[:1]]

    def _pick(self, node: torch.fx.Node) -> int:
        made = self.numbers.get(node.args[0], ())
        index: Any = node.args[1]
        return made[index] if index < len(made) else made[0]

    def _add_attribute(self, name: str) -> int:
        for tensor in self.tensors:
            if tensor.name == name and tensor.role in ("param", "buffer", "constant"):
                return tensor.id
        value: Any = self.module
        for part in name.split("."):
            value = getattr(value, part)
        role = "param" if isinstance(value, torch.nn.Parameter) else "buffer"
        return self._add_tensor(name, role, value if isinstance(value, torch.Tensor) else None)

    def _add_tensor(self, name: str, role: str, value: Any, *, producer: int = -1) -> int:
        number = len(self.tensors)
        shape = tuple(_size(each) for each in value.shape) if value is not None else ()
        dtype = str(value.dtype).removeprefix("torch.") if value is not None else ""
        self.tensors.append(
            TensorNode(
                id=number,
                name=name,
                role=role,
                shape=shape,
                dtype=dtype,
                device=str(getattr(value, "device", "")),
                needs_grad=bool(getattr(value, "requires_grad", False)),
                producer=producer,
            )
        )
        return number

    def _site_of(self, node: torch.fx.Node) -> str:
        """Note the modules a node lies in, and return the innermost."""
        if node.op == "call_module":
            self.types[str(node.target)] = type_name(self.module.get_submodule(str(node.target)))
            return str(node.target)
        path = ""
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            self.types.setdefault(
                path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            )
        return path.partition("@")[0]

    def _modules(self) -> tuple[ModuleNode, ...]:
        own: dict[str, list[TensorNode]] = {}
        for tensor in self.tensors:
            if tensor.role == "param":
                own.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
        paths = {**self.types, **{path: self.types.get(path, "") for path in own}}
        return tuple(
            ModuleNode(
                path=path,
                type=kind,
                parameters=sum(tensor.numel for tensor in own.get(path, ())),
                trainable=sum(tensor.numel for tensor in own.get(path, ()) if tensor.needs_grad),
                calls=int(path in self.types),
                order=order,
            )
            for order, (path, kind) in enumerate(paths.items())
        )

    def _free(self, name: str) -> str:
        count = self.taken.get(name, 0)
        self.taken[name] = count + 1
        return f"{name}_{count}" if count else name


def _value_of(node: torch.fx.Node) -> Any:
    """Return the fake tensor or the metadata of a node's value, None when there is none."""
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    return value if hasattr(value, "shape") and hasattr(value, "dtype") else None


def _values_of(node: torch.fx.Node) -> list[Any]:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return [each if isinstance(each, torch.Tensor) else None for each in value]
    return [_value_of(node)]


def _is_unpacking(node: torch.fx.Node) -> bool:
    """Whether a node only picks one of several outputs of the node before."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    source, index = node.args[:2]
    is_several = isinstance(source, torch.fx.Node) and isinstance(source.meta.get("val"), (list, tuple))
    return is_several and isinstance(index, int)


def _paths_of(node: torch.fx.Node) -> list[str]:
    """Return the paths of the modules a node lies in, outermost first."""
    return [path.partition("@")[0] for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _source_of(node: torch.fx.Node) -> tuple[str, int] | None:
    frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    found = [frame for frame in frames if is_user_code(frame[0])] or frames
    return (found[-1][0], int(found[-1][1])) if found else None


def _size(size: Any) -> int:
    """Return a size as a number: for one that may vary, the one it was exported with."""
    return size if isinstance(size, int) else int(getattr(size.node, "hint", None) or 0)
