"""The op lens: every operation of a piece of training, with what went in, what came out and which line asked for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clew.errors import UnsupportedTensor
from clew.model.schema import STAT_INDEX
from clew.replay.frames import Line, find_user_line, is_inside_optimizer
from clew.stats.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
OPTIMIZER: Final = "optimizer"

_NAN, _POS, _NEG = STAT_INDEX["nan"], STAT_INDEX["pos_inf"], STAT_INDEX["neg_inf"]
_NO_NODE: Final = 1 << 63
_MOST_ELEMENTS: Final = 5
_GARBAGE: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)
_FILLS: Final = frozenset(
    {"full", "full_like", "fill", "fill_", "masked_fill", "masked_fill_", "where", "scalar_tensor", "new_full",
     "index_fill", "index_fill_", "constant_pad_nd", "lift_fresh", "lift_fresh_copy", "index_put", "index_put_",
     "copy_", "to", "triu", "tril", "clone", "expand", "view", "add", "add_"}
)  # fmt: skip
"""Operations that carry an infinity somebody wrote: a mask, not an accident."""

_WRITES_INFINITY: Final = frozenset(
    {"full", "full_like", "fill", "fill_", "masked_fill", "masked_fill_", "where", "scalar_tensor", "new_full",
     "index_fill", "index_fill_", "constant_pad_nd", "lift_fresh", "lift_fresh_copy"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as an operation saw it: shape, range over finite elements, how many are not, who made it."""

    shape: tuple[int, ...]
    dtype: str
    minimum: float
    maximum: float
    nan: int
    inf: int
    producer: int
    role: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether some element is NaN or infinite."""
        return bool(self.nan or self.inf)


@dataclass(frozen=True, slots=True)
class Element:
    """One offending element: where it is, what came out and what went in at the same place."""

    index: tuple[int, ...]
    value: float
    inputs: tuple[float, ...] = ()


@dataclass(slots=True)
class Event:
    """One executed operation. ``meant``: its infinities were written on purpose."""

    index: int
    op: str
    phase: str
    line: Line | None
    site: str
    node: str = ""
    is_custom: bool = False
    forward: int = -1
    bad: bool = False
    meant: bool = False
    outputs: tuple[Value, ...] = ()
    inputs: tuple[Value, ...] = ()
    elements: tuple[Element, ...] = field(default_factory=tuple)
    arrived: tuple[Element, ...] = ()
    """Bad elements of the first input that came in bad from outside the step."""
    place: tuple[int, ...] = ()
    """Where the first bad element of the output is."""
    scalars: tuple[float, ...] = ()
    """Arguments that are plain numbers and not finite."""


class OpLens(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every operation on this thread; ``role_of`` names tensors that come from outside."""

    def __init__(
        self, *, role_of: Callable[[torch.Tensor], str] | None = None, site: Callable[[], str] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.in_optimizer = False
        self.excuse: Callable[[Event], bool] | None = None
        """Asked of each bad operation: may it be? What it says yes to counts as meant."""
        self.on_bad: Callable[[Event], None] | None = None
        """Called after each operation that made or carried on a bad value nobody meant."""
        self.on_birth: Callable[[Event, Any, Any, list[torch.Tensor]], None] | None = None
        """Called where good values became bad: the event, the operation, its arguments, the tensors among them."""
        self.before_write: Callable[[torch.Tensor], None] | None = None
        """Called with each tensor that an operation is about to write into."""
        self.on_event: Callable[[Event, Any, Any, list[torch.Tensor], list[torch.Tensor]], None] | None = None
        """Called after every operation: the event, the operation, its arguments, tensors as they went in, results."""
        self.role_of = role_of or (lambda _: "")
        self._site = site or (lambda: "")
        self._writers: dict[int, int] = {}
        self._meant: set[int] = set()
        self._by_sequence: dict[int, int] = {}
        self._rows = Rows(hashes=True, capacity=4)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute one operation and take note of it."""
        kwargs = kwargs or {}
        before = self._look_before(args, kwargs) if func._schema.is_mutable else None
        result = func(*args, **kwargs)
        if func.namespace in ("profiler", "prim"):
            return result
        self._note(func, args, kwargs, result=result, before=before)
        return result

    def forget(self) -> None:
        """Drop what was noted: a new step begins."""
        self.events.clear()
        self._writers.clear()
        self._meant.clear()
        self._by_sequence.clear()

    def writer_of(self, tensor: torch.Tensor) -> int:
        """Return the operation that last wrote into a tensor's memory, or -1."""
        return self._writers.get(_address(tensor), -1)

    def is_meant(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's infinities were written on purpose."""
        return _address(tensor) in self._meant

    def measure(self, tensor: torch.Tensor) -> Value:
        """Return a tensor as a value; one that cannot be read counts as fine."""
        low = high = float("nan")
        nan = inf = 0
        try:
            self._rows.measure(tensor, 0)
            self._rows.settle()
            row = self._rows.values[0]
            low, high = float(row[STAT_INDEX["min"]]), float(row[STAT_INDEX["max"]])
            nan, inf = int(row[_NAN]), int(row[_POS] + row[_NEG])
        except UnsupportedTensor:
            pass
        return Value(
            () if tensor.is_nested else tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            low,
            high,
            nan,
            inf,
            self.writer_of(tensor),
            self.role_of(tensor),
        )

    def fingerprint(self, tensor: torch.Tensor) -> int:
        """Return the hash of a tensor, 0 for one that cannot be read."""
        try:
            self._rows.measure(tensor, 1, hash=True)
            self._rows.settle()
        except UnsupportedTensor:
            return 0
        return int(self._rows.hashes[1]) if self._rows.hashes is not None else 0

    # ---------------------------------------------------------------- one operation

    def _look_before(self, args: Any, kwargs: Any) -> tuple[tuple[Value, ...], list[torch.Tensor]]:
        """An operation in place leaves nothing of its inputs: they are measured and kept beforehand."""
        tensors = list(tensors_in((args, kwargs)))
        if self.before_write is not None:
            for tensor in tensors:
                self.before_write(tensor)
        # Below this mode nothing records autograd, and the copies are gone with the event.
        return tuple(self.measure(tensor) for tensor in tensors), [tensor.clone() for tensor in tensors]

    def _note(self, func: Any, args: Any, kwargs: Any, *, result: Any, before: Any) -> None:
        name = plain_name(func)
        node: Any = torch._C._current_autograd_node()
        by_optimizer = self.in_optimizer and is_inside_optimizer()
        phase = BACKWARD if node is not None else OPTIMIZER if by_optimizer else FORWARD
        event = Event(len(self.events), name, phase, None, self._site(), forward=-1)
        if node is not None:
            event.node = node.name().removeprefix("torch::autograd::")
            event.is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
            event.forward = self._by_sequence.get(_sequence_of(node), -1)
        else:
            # The first operation after a node was made is the one the node belongs to.
            self._by_sequence.setdefault(_next_sequence() - 1, event.index)
        event.line = find_user_line()
        outputs = list(tensors_in(result))
        measured = tuple(self.measure(tensor) for tensor in outputs)
        if any(value.is_bad for value in measured) and name not in _GARBAGE:
            tensors = list(tensors_in((args, kwargs))) if before is None else before[1]
            self._note_bad(event, (args, kwargs), tensors, outputs=outputs, measured=measured, before=before)
            if event.elements and self.on_birth is not None:
                self.on_birth(event, func, (args, kwargs), tensors)
        self.events.append(event)
        for tensor in outputs:
            self._writers[_address(tensor)] = event.index
            self._mark(tensor, meant=event.meant)
        if self.on_event is not None:
            tensors = list(tensors_in((args, kwargs))) if before is None else before[1]
            self.on_event(event, func, (args, kwargs), tensors, outputs)
        if self.on_bad is not None and event.bad and not event.meant:
            self.on_bad(event)

    def _note_bad(
        self,
        event: Event,
        given: Any,
        tensors: list[torch.Tensor],
        *,
        outputs: Any,
        measured: tuple[Value, ...],
        before: Any,
    ) -> None:
        inputs = before[0] if before is not None else tuple(self.measure(tensor) for tensor in tensors)
        clean = [v for v in inputs if not (v.is_bad and not self._is_meant_value(v))]
        event.bad = True
        event.outputs, event.inputs = measured, inputs
        event.meant = self._writes_on_purpose(event.op, given, measured, inputs) or (
            self.excuse is not None and self.excuse(event)
        )
        if len(clean) == len(inputs) and not event.meant:
            culprit = next(i for i, value in enumerate(measured) if value.is_bad)
            event.elements = tuple(find_elements(outputs[culprit], tensors))
            event.scalars = tuple(bad_scalars(given))
        elif not event.meant:
            self._note_arrival(event, tensors, outputs)

    def _note_arrival(self, event: Event, tensors: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Note where the bad elements are of a value that came in bad, and where they are in the result."""
        for value, tensor in zip(event.inputs, tensors, strict=False):
            if value.is_bad and value.producer < 0:
                event.arrived = tuple(find_elements(tensor, []))
                break
        culprit = next(i for i, value in enumerate(event.outputs) if value.is_bad)
        event.place = next((element.index for element in find_elements(outputs[culprit], [], most=1)), ())

    def _writes_on_purpose(
        self, op: str, given: Any, outputs: tuple[Value, ...], inputs: tuple[Value, ...]
    ) -> bool:
        """A mask: infinities and no NaN, from a scalar that says so or from tensors that were meant already."""
        if any(value.nan for value in outputs):
            return False
        bad = [value for value in inputs if value.is_bad]
        if bad:
            return op in _FILLS and all(self._is_meant_value(value) for value in bad)
        return op in _WRITES_INFINITY and _has_infinite_scalar(given)

    def _is_meant_value(self, value: Value) -> bool:
        """An infinite constant from outside, or one that an earlier operation wrote on purpose."""
        if value.nan:
            return False
        if value.producer < 0:
            return value.role == ""
        return self.events[value.producer].meant

    def _mark(self, tensor: torch.Tensor, *, meant: bool) -> None:
        if meant:
            self._meant.add(_address(tensor))
        else:
            self._meant.discard(_address(tensor))


def plain_name(func: Any) -> str:
    """Return what people call an operation: ``aten._softmax.default`` is ``softmax``."""
    name = str(func._schema.name).rpartition("::")[2]
    known = {"_softmax": "softmax", "_log_softmax": "log_softmax", "nll_loss_forward": "nll_loss",
             "nll_loss2d_forward": "nll_loss", "linalg_vector_norm": "norm", "native_batch_norm": "batch_norm",
             "native_layer_norm": "layer_norm", "addmm": "linear", "convolution": "conv", "_to_copy": "to"}  # fmt: skip
    return known.get(name, name.removeprefix("_foreach_"))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments or the result of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def replace_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a nest of containers with every tensor changed, in the order of ``tensors_in``."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(replace_tensors(part, change) for part in value)
    if isinstance(value, dict):
        return {key: replace_tensors(part, change) for key, part in value.items()}
    return value


def find_elements(
    output: torch.Tensor, inputs: list[torch.Tensor], *, most: int = _MOST_ELEMENTS
) -> list[Element]:
    """Return the first offending elements with what each input of a fitting shape held at the same place."""
    bad = ~torch.isfinite(output) if output.is_floating_point() or output.is_complex() else None
    if bad is None:
        return []
    found = []
    for index in bad.nonzero()[:most].tolist():
        place = tuple(index)
        partners = tuple(_value_at(tensor, output.shape, place) for tensor in inputs)
        found.append(
            Element(place, _number(output[place]), tuple(value for value in partners if value is not None))
        )
    return found


def _value_at(tensor: torch.Tensor, shape: torch.Size, place: tuple[int, ...]) -> float | None:
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return None
    try:
        return _number(tensor.expand(shape)[place])
    except RuntimeError:
        return None


def _number(value: torch.Tensor) -> float:
    return float(value.real) if value.is_complex() else float(value)


def _address(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided:
        return id(tensor)
    try:
        return int(tensor.untyped_storage().data_ptr()) or id(tensor)
    except RuntimeError:
        return id(tensor)


def _has_infinite_scalar(given: Any) -> bool:
    if isinstance(given, float):
        return given in (float("inf"), float("-inf")) or abs(given) >= torch.finfo(torch.float16).max
    if isinstance(given, (list, tuple)):
        return any(_has_infinite_scalar(part) for part in given)
    if isinstance(given, dict):
        return any(_has_infinite_scalar(part) for part in given.values())
    if isinstance(given, torch.Tensor):
        # A mask value may come as a tensor without dimensions: where(mask, x, tensor(-inf)).
        return given.numel() == 1 and given.is_floating_point() and bool(torch.isinf(given))
    return False


def bad_scalars(given: Any) -> Iterator[float]:
    """Yield the plain numbers among the arguments of an operation that are NaN or infinite."""
    if isinstance(given, float) and not math.isfinite(given):
        yield given
    elif isinstance(given, (list, tuple)):
        for part in given:
            yield from bad_scalars(part)
    elif isinstance(given, dict):
        yield from bad_scalars(tuple(given.values()))


def _sequence_of(node: Any) -> int:
    number = int(node._sequence_nr())
    return number if number < _NO_NODE else -1


def _next_sequence() -> int:
    return int(torch._C._autograd._get_sequence_nr())
