"""A compiler backend that has the real one give back every intermediate result, so that each can be judged."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from clew.api.apart import compare_tensors, to_numpy
from clew.compare.origin import Origin
from clew.compare.referee import say_referee

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CALLS: Final = ("call_function", "call_method", "call_module")


class GraphSpy:
    """Given to ``torch.compile`` as its backend; keeps each graph with what the real backend computed in it."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._seen: list[tuple[fx.GraphModule, list[fx.Node], list[Any], Sequence[Any]]] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph whose results are its own and, after them, every intermediate tensor."""
        wide = fx.GraphModule(graph, _copy(graph.graph))
        output = next(node for node in wide.graph.nodes if node.op == "output")
        nodes = [node for node in wide.graph.nodes if node.op in _CALLS and _is_tensor(node)]
        own = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
        output.args = ((*own, *nodes),)
        wide.recompile()
        compiled = torch._dynamo.lookup_backend(self._backend)(wide, inputs)
        names = {node.name for node in nodes}
        kept = [node for node in graph.graph.nodes if node.name in names]

        def run(*args: Any) -> Any:
            given = [arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            values = compiled(*args)
            self._seen.append((graph, kept, list(values[len(own) :]), given))
            return tuple(values[: len(own)])

        return run

    def find_origin(self) -> Origin | None:
        """Return the first operation that gives something else than the eager one does for the same inputs."""
        for graph, nodes, values, given in self._seen:
            known = dict(zip((node.name for node in nodes), values, strict=True))
            judged = _Judge(graph, known)
            judged.run(*given)
            if judged.origin is not None:
                return judged.origin
        return None


class _Judge(fx.Interpreter):
    """Executes each node eagerly with what the compiled code had computed before it."""

    def __init__(self, graph: fx.GraphModule, known: dict[str, Any]) -> None:
        super().__init__(graph)
        self._known = known
        self.origin: Origin | None = None

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        theirs = self._known.get(n.name)
        if theirs is None or not isinstance(value, torch.Tensor):
            return value
        if self.origin is None:
            self._judge(n, value, theirs)
        return theirs

    def _judge(self, node: fx.Node, eager: torch.Tensor, compiled: torch.Tensor) -> None:
        row = compare_tensors(eager, compiled, site=node.name, site_b=node.name)
        if row.verdict != "different":
            return
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        site, op, line = _find_module(node), _name(node), _find_line(node)
        told = f"{op}{f' ({line})' if line else ''} is given the same and gives something else, "
        told += f"relative error {row.error:.2g}; eager is a, compiled is b"
        exact = _execute_exactly(self, node, args, kwargs)
        if exact is not None and exact.shape == eager.shape:
            told += f"; {say_referee(*(to_numpy(each) for each in (eager, compiled, exact)))}"
        self.origin = Origin(0, "forward", site, "output", "operation", told, op=op)


def _execute_exactly(judge: fx.Interpreter, node: fx.Node, args: Any, kwargs: Any) -> torch.Tensor | None:
    def widen(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    try:
        found = getattr(judge, node.op)(
            node.target, fx.node.map_aggregate(args, widen), fx.node.map_aggregate(kwargs, widen)
        )
    except Exception:  # noqa: BLE001 - an operation without a float64 form has no referee
        return None
    return found if isinstance(found, torch.Tensor) else None


def _copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    outputs = copied.graph_copy(graph, {})
    copied.output(outputs)
    return copied


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("example_value", node.meta.get("val"))
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", node.target))


def _find_module(node: fx.Node) -> str:
    """Return the path of the module whose code the operation belongs to."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "(model)"
    path = re.sub(r"^L\[['\"]\w+['\"]\]", "", str(stack[-1][0]))
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).replace("_modules.", "")
    return path.strip(".") or "(model)"


def _find_line(node: fx.Node) -> str:
    lines = re.findall(r'File "([^"]+)", line (\d+)', str(node.meta.get("stack_trace") or ""))
    own = [each for each in lines if "/torch/" not in each[0]] or lines
    return f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else ""
