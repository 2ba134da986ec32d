"""Numbers, histograms and graphs as the event files that TensorBoard shows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.errors import MissingExtra, UsageError
from clew.model.schema import HIST_LOW_EXPONENT, HIST_MAGNITUDES
from clew.views.graph_table import args_text

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from clew.model.graph import Graph, Operation, TensorNode

_DTYPES: Final = {
    "float32": 1, "float64": 2, "int32": 3, "uint8": 4, "int16": 5, "int8": 6, "complex64": 8, "int64": 9,
    "bool": 10, "bfloat16": 14, "uint16": 17, "complex128": 18, "float16": 19, "uint32": 22, "uint64": 23,
}  # fmt: skip
"""The numbers of TensorFlow's types."""

EDGES: Final = 2.0 ** np.arange(HIST_LOW_EXPONENT, HIST_LOW_EXPONENT + HIST_MAGNITUDES)
"""Upper edges of the bins of a recorded histogram, for one sign."""


class EventFile:
    """An event file in a folder, open for writing; times are seconds since 1970."""

    def __init__(self, folder: Path | str) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtra(
                "TensorBoard files need the package tensorboard", next_step="pip install 'clew[tensorboard]'"
            ) from error
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2
        self.folder = Path(folder)
        try:
            self._writer: Any = EventFileWriter(str(self.folder))
        except OSError as error:
            raise UsageError(
                f"cannot write TensorBoard files: {error.strerror}", where=str(folder),
                next_step="choose another folder",
            ) from error  # fmt: skip

    def __enter__(self) -> EventFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def add_scalar(self, name: str, value: float, *, step: int, time: float) -> None:
        """Add a number of a step."""
        self._add(self._summary.Summary.Value(tag=name, simple_value=value), step, time)

    def add_histogram(
        self, name: str, counts: NDArray[Any], numbers: dict[str, float], *, step: int, time: float
    ) -> None:
        """Add a recorded histogram with its ``min max mean l2 zero`` and how many elements were finite."""
        limits, buckets = spread(counts, numbers["zero"])
        count = numbers["finite"]
        proto = self._summary.HistogramProto(
            min=numbers["min"], max=numbers["max"], num=count, sum=numbers["mean"] * count,
            sum_squares=numbers["l2"] ** 2, bucket_limit=limits, bucket=buckets,
        )  # fmt: skip
        self._add(self._summary.Summary.Value(tag=name, histo=proto), step, time)

    def add_graph(self, graph: Graph, *, time: float = 0.0) -> None:
        """Add the graph of a model."""
        self._writer.add_event(self._event(graph_def=encode_graph(graph), wall_time=time))

    def _add(self, value: Any, step: int, time: float) -> None:
        self._writer.add_event(
            self._event(summary=self._summary.Summary(value=[value]), step=step, wall_time=time)
        )


def spread(counts: NDArray[Any], zero: float) -> tuple[list[float], list[float]]:
    """Return upper limits and counts of buckets in ascending order from a recorded histogram and its zeros.

    Bins of negative numbers are turned around; zeros lie between the two smallest bins. Empty ends are left out.
    """
    positive, negative = counts[:HIST_MAGNITUDES], counts[HIST_MAGNITUDES:]
    lower = np.concatenate([-EDGES[::-1][1:], [0.0]])
    limits = np.concatenate([lower, [EDGES[0] / 2], EDGES])
    found = np.concatenate([negative[::-1], [zero], positive]).astype(np.float64)
    filled = np.flatnonzero(found)
    if not len(filled):
        return [0.0], [0.0]
    first, last = max(filled[0] - 1, 0), filled[-1] + 1
    return limits[first:last].tolist(), found[first:last].tolist()


def encode_graph(graph: Graph) -> bytes:
    """Return a graph in TensorBoard's form: modules are scopes, arguments and lines stand with each operation."""
    from tensorboard.compat.proto import graph_pb2, versions_pb2

    nodes = _Nodes(graph)
    for number in graph.inputs:
        nodes.add_source(graph.tensors[number])
    for operation in graph.operations:
        nodes.add_operation(operation)
    made = graph_pb2.GraphDef(node=nodes.made, versions=versions_pb2.VersionDef(producer=22))
    return bytes(made.SerializeToString())


class _Nodes:
    """Turns operations and the tensors they begin with into nodes with names of their own."""

    def __init__(self, graph: Graph) -> None:
        from tensorboard.compat.proto import node_def_pb2

        self.made: list[Any] = []
        self._node: Any = node_def_pb2.NodeDef
        self._graph = graph
        self._taken: set[str] = set()
        self._names: dict[int, str] = {}

    def add_source(self, tensor: TensorNode) -> None:
        """Add an input, a parameter, a buffer or a constant."""
        if tensor.id not in self._names:
            name = self._names[tensor.id] = self._name(tensor.name)
            self.made.append(self._node(name=name, op=tensor.role, attr=_describe([tensor])))

    def add_operation(self, operation: Operation) -> None:
        """Add an operation after what it reads."""
        read = [self._graph.tensors[number] for number in operation.inputs]
        for tensor in read:
            if tensor.producer < 0:
                self.add_source(tensor)
        made = [self._graph.tensors[number] for number in operation.outputs]
        name = self._name(operation.name)
        for place, tensor in enumerate(made):
            self._names[tensor.id] = f"{name}:{place}" if place else name
        attributes = _describe(made)
        for key, text in (("parameters", args_text(operation.args)), ("line", operation.source)):
            if text:
                attributes[key] = _text(text)
        inputs = [self._names[tensor.id] for tensor in read if tensor.id in self._names]
        self.made.append(self._node(name=name, op=operation.op, input=inputs, attr=attributes))

    def _name(self, dotted: str) -> str:
        """Return a name that no other node has; the dots of modules become scopes."""
        plain = dotted.replace(".", "/") or "model"
        name, number = plain, 1
        while name in self._taken:
            name, number = f"{plain}_{number}", number + 1
        self._taken.add(name)
        return name


def _text(text: str) -> Any:
    from tensorboard.compat.proto import attr_value_pb2

    return attr_value_pb2.AttrValue(s=text.encode())


def _describe(tensors: list[TensorNode]) -> dict[str, Any]:
    """Return the attributes that TensorBoard reads: dtype and shapes of what comes out."""
    from tensorboard.compat.proto import attr_value_pb2, tensor_shape_pb2

    shapes = [
        tensor_shape_pb2.TensorShapeProto(
            dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in tensor.shape]
        )
        for tensor in tensors
    ]
    listed = attr_value_pb2.AttrValue.ListValue(shape=shapes)
    attributes = {"_output_shapes": attr_value_pb2.AttrValue(list=listed)}
    if tensors and tensors[0].dtype in _DTYPES:
        attributes["T"] = attr_value_pb2.AttrValue(type=_DTYPES[tensors[0].dtype])
    return attributes
