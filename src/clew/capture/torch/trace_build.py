"""From what a pass left in the recorder to the graph: names, arguments, sources, costs."""

from __future__ import annotations

import functools
import linecache
import os
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from clew.capture.torch.trace_cost import count_bytes, count_macs
from clew.capture.torch.trace_function import name_arguments
from clew.capture.torch.trace_recorder import Ref
from clew.model.graph import Graph, ModuleNode, Operation, TensorNode

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from clew.capture.torch.trace_recorder import OperationRecorder, RawOperation, RawTensor

_LONGEST: Final = 8
"""Tuples of at most so many plain values are shown as arguments."""


class Measures:
    """Statistics of values and of gradients, by the number of the tensor."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}
        self.grads: dict[int, dict[str, float]] = {}


def build_graph(
    recorder: OperationRecorder,
    name: str,
    *,
    inputs: Iterable[int],
    outputs: Iterable[int],
    notes: Iterable[str] = (),
    measures: Measures | None = None,
) -> Graph:
    """Return the graph of a recorded pass; parameters that took no part are in it too."""
    add_unused(recorder)
    builder = _Builder(recorder, measures or Measures())
    return Graph(
        name=name,
        operations=builder.operations(),
        tensors=builder.tensors,
        modules=_modules(recorder),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        notes=tuple(notes),
    )


def add_unused(recorder: OperationRecorder) -> None:
    """Bring the parameters and buffers that no operation read into the graph."""
    for named in list(recorder.names.tensors.values()):
        recorder.add_fixed(named.tensor, named.role, named.names[0])


def name_operations(recorder: OperationRecorder) -> list[str]:
    """Return a name for each operation that no other has.

    The only operation of a module that has no modules inside bears the module's name; others add their kind.
    Further calls of a module are told apart by ``#1``, ``#2`` …, repeats within a call by ``_1``, ``_2`` …
    """
    sizes = Counter((operation.site, operation.call) for operation in recorder.operations)
    leaves = {path for path, module in recorder.names.modules.items() if not module._modules}
    taken: Counter[str] = Counter()
    names = []
    for operation in recorder.operations:
        place = (operation.site, operation.call)
        stem = f"{operation.site}#{operation.call}" if operation.call else operation.site
        if not operation.site or operation.site not in leaves or sizes[place] > 1:
            stem = f"{stem}.{operation.op}".lstrip(".")
        names.append(f"{stem}_{taken[stem]}" if taken[stem] else stem)
        taken[stem] += 1
    return names


class SourceNames:
    """Turns files and lines into ``model.py:41`` and the text of that line, each looked up once."""

    def __init__(self) -> None:
        self._home = os.getcwd() + os.sep  # noqa: PTH109 - text is what is compared
        self._known: dict[tuple[str, int] | None, tuple[str, str]] = {None: ("", "")}

    def look_up(self, source: tuple[str, int] | None) -> tuple[str, str]:
        """Return file and line, the file relative to the working directory, and the text of the line."""
        found = self._known.get(source)
        if found is None and source is not None:
            # A library is known by its own name, wherever it is installed.
            file = source[0].rpartition("site-packages/")[2].removeprefix(self._home)
            found = self._known[source] = (f"{file}:{source[1]}", linecache.getline(*source).strip())
        return found or ("", "")

    def place(self, source: tuple[str, int] | None) -> str:
        """Return file and line alone."""
        return self.look_up(source)[0]


class _Builder:
    """Holds what every tensor and operation of one graph needs to get its final form."""

    def __init__(self, recorder: OperationRecorder, measures: Measures) -> None:
        self._raws = recorder.operations
        self._names = name_operations(recorder)
        self._aliases = recorder.names.aliases
        self._sources = SourceNames()
        self._measures = measures
        self.tensors = tuple(self._tensor(number, raw) for number, raw in enumerate(recorder.tensors))

    def _tensor(self, number: int, raw: RawTensor) -> TensorNode:
        name = raw.name or "constant"
        if raw.producer >= 0:
            name = self._names[raw.producer] + (f":{raw.index}" if raw.index else "")
        # By position, and the rest only where there is any: thousands of these are made.
        shape, dtype, device = tuple(raw.shape), _short(raw.dtype), _short(raw.device)
        rest = self._extras(number, raw)
        return TensorNode(number, name, raw.role, shape, dtype, device, raw.needs_grad, raw.producer, **rest)

    def _extras(self, number: int, raw: RawTensor) -> dict[str, Any]:
        """Return what few tensors have: statistics, further names, the line that made a constant."""
        found: dict[str, Any] = {}
        if number in self._measures.values:
            found["stats"] = self._measures.values[number]
        if number in self._measures.grads:
            found["grad_stats"] = self._measures.grads[number]
        if raw.name in self._aliases and raw.role in ("param", "buffer"):
            found["aliases"] = self._aliases[raw.name]
        if raw.source:
            found["source"] = self._sources.place(raw.source)
        return found

    def operations(self) -> tuple[Operation, ...]:
        """Return the operations, each as deep as its deepest input."""
        depths: list[int] = []
        built = []
        for number, raw in enumerate(self._raws):
            makers = [self.tensors[each].producer for each in raw.inputs]
            depths.append(1 + max([depths[maker] for maker in makers if maker >= 0], default=-1))
            built.append(self._operation(number, raw, depths[number]))
        return tuple(built)

    def _operation(self, number: int, raw: RawOperation, depth: int) -> Operation:
        inputs = [self.tensors[each] for each in raw.inputs]
        outputs = [self.tensors[each] for each in raw.outputs]
        named = name_arguments(raw.function, raw.args, raw.kwargs)
        place, code = self._sources.look_up(raw.source)
        needs_grad = any(tensor.needs_grad for tensor in outputs)
        return Operation(
            number,
            self._names[number],
            raw.op,
            tuple(raw.inputs),
            tuple(raw.outputs),
            plain_arguments(named),
            raw.site,
            raw.call,
            place,
            code,
            needs_grad,
            depth,
            count_macs(raw.op, named, inputs, outputs),
            count_bytes(raw.op, inputs, outputs, is_view=raw.is_view),
        )


@functools.lru_cache(maxsize=64)
def _short(thing: torch.dtype | torch.device) -> str:
    return str(thing).removeprefix("torch.")


def plain_arguments(named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are numbers, texts or small tuples of them; tensors are inputs instead."""
    shown = {}
    for key, value in named.items():
        plain = _plain(value)
        if plain is not None:
            shown[key] = plain
    return shown


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, Ref):
        return None
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, slice):
        return _slice_text(value)
    if isinstance(value, tuple):
        if len(value) > _LONGEST or (value and all(isinstance(each, Ref) for each in value)):
            return None
        return tuple("tensor" if isinstance(each, Ref) else _plain(each) for each in value)
    return repr(value)


def _slice_text(value: slice) -> str:
    start, stop = ("" if each is None else str(each) for each in (value.start, value.stop))
    return f"{start}:{stop}" if value.step is None else f"{start}:{stop}:{value.step}"


def _modules(recorder: OperationRecorder) -> tuple[ModuleNode, ...]:
    order = {path: number for number, path in enumerate(recorder.calls)}
    own: dict[str, list[torch.Tensor]] = {}
    for named in recorder.names.tensors.values():
        if named.role == "param":
            own.setdefault(named.owner, []).append(named.tensor)
    return tuple(
        ModuleNode(
            path=path,
            type=type_name(module),
            parameters=sum([tensor.numel() for tensor in own.get(path, ())]),
            trainable=sum([tensor.numel() for tensor in own.get(path, ()) if tensor.requires_grad]),
            calls=recorder.calls.get(path, 0),
            order=order.get(path, -1),
            aliases=tuple(recorder.names.shared.get(path, ())),
        )
        for path, module in recorder.names.modules.items()
    )


def type_name(thing: object) -> str:
    """Return the full name of the class of a thing."""
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"
