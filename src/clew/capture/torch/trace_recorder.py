"""The lens of a trace: sees every torch function that a forward pass calls, and the modules around it.

During the pass only what cannot be had later is kept, as cheaply as possible; names, arguments and costs are
worked out from it afterwards (``trace_build``). No intermediate tensor is kept alive.
"""

from __future__ import annotations

import numbers
import os
import sys
import sysconfig
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

import clew
from clew.capture.torch.leaves import walk
from clew.capture.torch.trace_function import Plan, plan_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.trace_names import ModelNames

_PLAIN: Final = frozenset({int, float, bool, str, type(None), complex})
_USER, _TORCH, _OURS = 1, 2, 3


class Ref(int):
    """The number of a tensor where an argument was a tensor."""

    __slots__ = ()


class RawTensor:
    """A tensor as it was when it came into the graph."""

    __slots__ = ("device", "dtype", "index", "name", "needs_grad", "producer", "role", "shape", "source")

    def __init__(
        self, tensor: torch.Tensor, role: str, name: str = "", producer: int = -1, index: int = 0
    ) -> None:
        self.shape = _shape_of(tensor)
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.needs_grad = tensor.requires_grad
        self.role = role
        self.name = name
        self.producer = producer
        self.index = index
        self.source: tuple[str, int] | None = None


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tensor.shape
    except RuntimeError:  # a nested tensor has no one shape
        return ()


class RawOperation:
    """A call of a torch function as it happened; arguments are plain values and ``Ref``."""

    __slots__ = ("args", "call", "function", "inputs", "is_view", "kwargs", "op", "outputs", "site", "source")

    def __init__(self, function: Any, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.site = ""
        self.call = 0
        self.source: tuple[str, int] | None = None
        self.is_view = False


class Failure:
    """Where the forward pass broke: the operation with its inputs, the module, the line."""

    __slots__ = ("args", "error", "kwargs", "op", "site", "source")

    def __init__(
        self,
        error: BaseException,
        site: str,
        *,
        op: str = "",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        source: tuple[str, int] | None = None,
    ) -> None:
        self.error = error
        self.site = site
        self.op = op
        self.args = args
        self.kwargs = kwargs or {}
        self.source = source


class Watcher(Protocol):
    """Sees the values of a traced pass while they exist."""

    def on_tensor(self, index: int, tensor: torch.Tensor) -> None:
        """A tensor came into the graph."""

    def on_module(self, site: str, call: int, output: Any) -> None:
        """A module returned."""

    def on_operation(self, operation: RawOperation, outputs: Sequence[torch.Tensor]) -> None:
        """An operation returned."""


class OperationRecorder(TorchFunctionMode):
    """Records one forward pass on the calling thread."""

    def __init__(self, names: ModelNames, watcher: Watcher | None = None) -> None:
        super().__init__()
        self.names = names
        self.watcher = watcher
        self.operations: list[RawOperation] = []
        self.tensors: list[RawTensor] = []
        self.calls: dict[str, int] = {}
        self.reads: dict[tuple[str, int], str] = {}
        self.failure: Failure | None = None
        self._plans: dict[Any, Plan] = {}
        self._stack: list[tuple[str, int]] = [("", 0)]
        self._live: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._fixed: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self._direct: tuple[FrameType, tuple[str, int]] | None = None
        self._muted = 0
        self._thread = threading.get_ident()
        self._given: list[torch.Tensor] = []
        self._numbers: list[int] = []

    # ---------------------------------------------------------------- tensors

    def add_fixed(self, tensor: torch.Tensor, role: str, name: str) -> int:
        """Give a tensor that outlives the pass its place in the graph, and return the number."""
        known = self._fixed.get(id(tensor))
        if known is not None:
            return known
        self._kept.append(tensor)
        self._fixed[id(tensor)] = number = len(self.tensors)
        self.tensors.append(RawTensor(tensor, role, name))
        if self.watcher is not None:
            self.watcher.on_tensor(number, tensor)
        return number

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor; a parameter, buffer or stranger comes into the graph now."""
        entry = self._live.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        known = self._fixed.get(id(tensor))
        if known is not None:
            return known
        named = self.names.tensors.get(id(tensor))
        if named is not None:
            return self.add_fixed(tensor, named.role, named.names[0])
        return self.add_fixed(tensor, "constant", "")

    def fixed_number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor that was there before the pass, -1 when nothing has read it."""
        return self._fixed.get(id(tensor), -1)

    def leaves_that_need_grad(self) -> list[tuple[int, torch.Tensor]]:
        """Return the parameters, inputs and constants in the graph that gradients can reach, with their numbers."""
        return [(self._fixed[id(each)], each) for each in self._kept if each.requires_grad]

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether the graph holds a tensor."""
        entry = self._live.get(id(tensor))
        return (entry is not None and entry[0]() is tensor) or id(tensor) in self._fixed

    def _add_value(self, tensor: torch.Tensor, producer: int, index: int, role: str = "value") -> int:
        number = len(self.tensors)
        self.tensors.append(RawTensor(tensor, role, producer=producer, index=index))
        self._live[id(tensor)] = (weakref.ref(tensor), number)
        if self.watcher is not None:
            self.watcher.on_tensor(number, tensor)
        return number

    # ---------------------------------------------------------------- functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._muted:
            return func(*args, **kwargs)
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = plan_for(func)
        if plan.kind == "ignore":
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._note_failure(error, plan.op, args, kwargs)
            raise
        if isinstance(result, torch.Tensor):
            self._record(func, plan, args, kwargs, (result,))
        elif isinstance(result, (tuple, list)):
            tensors = _tensors_in(result) if type(result) is not torch.Size else ()
            if tensors:
                self._record(func, plan, args, kwargs, tensors)
        elif result is None and plan.in_place:
            self._record(func, plan, args, kwargs, args[:1])
        elif plan.kind == "read":
            self.reads.setdefault(self._locate()[1] or ("", 0), plan.op)
        return result

    def _record(
        self,
        func: Any,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        given = self._given = []
        numbers = self._numbers = []
        strip = self._strip
        plain_args = tuple([value if type(value) in _PLAIN else strip(value) for value in args])
        plain_kwargs = {key: strip(value) for key, value in kwargs.items()} if kwargs else {}
        if not given:
            self._add_constants(plan.op, outputs)
            return
        repeats = _share(outputs, given)
        if repeats and (plan.passes or self._is_counter(plan, given[0])):
            return
        operation = RawOperation(func, plan.op, plain_args, plain_kwargs)
        operation.inputs = numbers
        self._add_operation(operation, outputs, in_place=repeats)

    def _add_operation(
        self, operation: RawOperation, outputs: Sequence[torch.Tensor], *, in_place: bool = False
    ) -> None:
        number = len(self.operations)
        self.operations.append(operation)
        (operation.site, operation.call), operation.source = self._locate()
        operation.is_view = (
            not in_place and bool(outputs) and outputs[0]._is_view() and self._shows_input(outputs[0])
        )
        operation.outputs = [self._add_value(tensor, number, index) for index, tensor in enumerate(outputs)]
        if in_place:
            self._renew_bases(operation, outputs, number)
        if self.watcher is not None:
            self.watcher.on_operation(operation, outputs)

    def _shows_input(self, output: torch.Tensor) -> bool:
        """Whether a view looks at memory of an input; some operations return a view of something new."""
        base = output._base
        return any(base is tensor or base is tensor._base for tensor in self._given)

    def _renew_bases(self, operation: RawOperation, outputs: Sequence[torch.Tensor], number: int) -> None:
        """Writing into a view changes the tensor it shows: later readers of that one depend on this write."""
        for tensor in outputs:
            base = tensor._base
            if base is not None and self.is_known(base):
                operation.outputs.append(self._add_value(base, number, len(operation.outputs)))

    def _add_constants(self, op: str, outputs: Sequence[torch.Tensor]) -> None:
        (site, _), source = self._locate()
        for tensor in outputs:
            if not self.is_known(tensor):
                raw = self.tensors[self._add_value(tensor, -1, 0, role="constant")]
                raw.name = f"{site}.{op}".lstrip(".")
                raw.source = source

    def _is_counter(self, plan: Plan, tensor: torch.Tensor) -> bool:
        """Whether this is bookkeeping such as BatchNorm counting its batches, not part of the network."""
        named = self.names.tensors.get(id(tensor))
        return plan.in_place and named is not None and named.role == "buffer" and tensor.dtype == torch.int64

    def _strip(self, value: Any) -> Any:
        """Return a value without tensors: they are noted in ``_given`` and leave their number."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            entry = self._live.get(id(value))
            number = entry[1] if entry is not None and entry[0]() is value else self.number_of(value)
            self._given.append(value)
            self._numbers.append(number)
            return Ref(number)
        if isinstance(value, (tuple, list)):
            return tuple([self._strip(each) for each in value])
        if isinstance(value, dict):
            return {str(key): self._strip(each) for key, each in value.items()}
        if isinstance(value, slice):
            return slice(self._strip(value.start), self._strip(value.stop), self._strip(value.step))
        if isinstance(value, numbers.Real):
            return value.item() if hasattr(value, "item") else value  # numpy's scalars are not Python's
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value).removeprefix("torch.")
        return (
            "..." if value is Ellipsis else str(value) if isinstance(value, torch.device) else _Thing(value)
        )

    # ---------------------------------------------------------------- places

    def _locate(self) -> tuple[tuple[str, int], tuple[str, int] | None]:
        """Return the module call that is running, and the nearest line outside torch and clew."""
        frame: FrameType | None = sys._getframe(2)
        source: tuple[str, int] | None = None
        methods: list[FrameType] = []
        is_inside = True
        while frame is not None:
            code = frame.f_code
            kind = _KINDS.get(code.co_filename) or _classify(code.co_filename)
            if kind == _TORCH:
                if is_inside and code.co_name == "forward":
                    methods.append(frame)
            elif kind == _USER:
                source = source or (code.co_filename, frame.f_lineno)
                if is_inside and code.co_argcount:
                    methods.append(frame)
            elif code.co_name in _BORDERS:
                is_inside = False
                if source is not None or code.co_name == "run_forward":
                    break
            frame = frame.f_back
        place = self._stack[-1]
        # One method inside the border is the forward of the module that was called; a further one may belong
        # to a module whose method was called directly, past Module.__call__.
        if len(methods) > 1 or (methods and len(self._stack) == 1):
            place = self._place_of(methods) or place
        return place, source

    def _place_of(self, methods: list[FrameType]) -> tuple[str, int] | None:
        """Return the innermost module that one of these frames is a method of, None when it was called."""
        for frame in methods:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0])
            path = self.names.paths.get(id(owner)) if isinstance(owner, torch.nn.Module) else None
            if path == self._stack[-1][0]:
                return None
            if path is not None:
                return self._direct_call(frame, path)
        return None

    def _direct_call(self, frame: FrameType, path: str) -> tuple[str, int]:
        """Return which call of a module a frame is; the frame that was seen last is still the same call."""
        if self._direct is None or self._direct[0] is not frame:
            call = self.calls.get(path, 0)
            self.calls[path] = call + 1
            self._direct = (frame, (path, call))
        return self._direct[1]

    def _note_failure(self, error: Exception, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        (site, _), source = self._locate()
        shown = tuple(_describe_argument(value) for value in args)
        named = {key: _describe_argument(value) for key, value in kwargs.items()}
        self.failure = Failure(error, site, op=op, args=shown, kwargs=named, source=source)

    # ---------------------------------------------------------------- modules and custom functions

    def patch(self, patches: Patches) -> None:
        """See the calls of modules and of custom autograd functions until the patches are undone."""
        patches.replace(torch.nn.Module, "_call_impl", self._wrap_module_call)
        patches.replace(torch.autograd.Function, "apply", self._wrap_custom_function)

    def _wrap_module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        paths, calls, stack, operations = self.names.paths, self.calls, self._stack, self.operations

        def call_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._muted or threading.get_ident() != self._thread:
                return original(module, *args, **kwargs)
            path = paths.get(id(module))
            if path is None:
                path = self.names.add_stranger(module, stack[-1][0])
            call = calls.get(path, 0)
            calls[path] = call + 1
            before = len(operations)
            stack.append((path, call))
            try:
                if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
                    # What gives a lazy module its parameters is no part of the network.
                    self._quietly(module._infer_parameters, module, args, kwargs)
                output = original(module, *args, **kwargs)
                if len(operations) == before:
                    self._quietly(self._add_opaque, type(module).__name__, (args, kwargs), output)
            except Exception as error:
                if self.failure is None or self.failure.error is not error:
                    self.failure = Failure(error, path)
                raise
            finally:
                stack.pop()
            if self.watcher is not None:
                self._quietly(self.watcher.on_module, path, call, output)
            return output

        return call_module

    def _wrap_custom_function(self, original: Any) -> Any:
        def call_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
            apply = original.__get__(None, cls)
            if self._muted or threading.get_ident() != self._thread:
                return apply(*args, **kwargs)
            # Checkpointing and the like are functions of torch's own: what runs inside them is the network.
            is_foreign = not cls.__module__.startswith("torch.")
            before = len(self.operations)
            self._muted += is_foreign
            try:
                output = apply(*args, **kwargs)
            finally:
                self._muted -= is_foreign
            if len(self.operations) == before:
                self._quietly(self._add_opaque, cls.__name__, (args, kwargs), output)
            return output

        return classmethod(call_function)

    def _quietly(self, function: Callable[..., None], *args: Any) -> None:
        """Call something of ours between the functions of the model, without recording what it does."""
        self._muted += 1
        try:
            function(*args)
        finally:
            self._muted -= 1

    def _add_opaque(self, op: str, given: tuple[tuple[Any, ...], dict[str, Any]], output: Any) -> None:
        """Record a call that nothing could be seen of as one operation, if it made new tensors."""
        outputs = [tensor for _, tensor in walk(output)]
        if all(self.is_known(tensor) or id(tensor) in self.names.tensors for tensor in outputs):
            return
        self._given, self._numbers = [], []
        args, kwargs = given
        operation = RawOperation(None, op, tuple(self._strip(each) for each in args), {})
        operation.kwargs = {key: self._strip(each) for key, each in kwargs.items()}
        operation.inputs = self._numbers
        self._add_operation(operation, outputs)


class _Thing:
    """An argument that is neither a tensor nor plain, by the name of its class."""

    __slots__ = ("name",)

    def __init__(self, value: Any) -> None:
        self.name = type(value).__name__

    def __repr__(self) -> str:
        return f"<{self.name}>"


_BORDERS: Final = frozenset({"call_module", "run_forward"})
"""Names of our own functions that stand between a module and its caller, and around the whole pass."""

_TORCH_HOME: Final = str(Path(torch.__file__).parent) + os.sep
_CLEW_HOME: Final = str(Path(clew.__file__).parent) + os.sep
_STANDARD_LIBRARY: Final = sysconfig.get_path("stdlib")
_KINDS: dict[str, int] = {}


def _classify(filename: str) -> int:
    """Return whose code a file is: clew's example models are a user's, the standard library is torch's."""
    kind = _USER
    if filename.startswith(_TORCH_HOME):
        kind = _TORCH
    elif filename.startswith(_CLEW_HOME) and not filename.startswith(_CLEW_HOME + "testing"):
        kind = _OURS
    elif filename.startswith((_STANDARD_LIBRARY, "<frozen")) and "site-packages" not in filename:
        kind = _TORCH
    _KINDS[filename] = kind
    return kind


def is_user_code(filename: str) -> bool:
    """Return whether a file belongs neither to torch nor to clew nor to Python itself."""
    return (_KINDS.get(filename) or _classify(filename)) == _USER


def _tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors_in(value)
    return found


def _share(outputs: Sequence[torch.Tensor], given: list[torch.Tensor]) -> bool:
    """Whether a call returned a tensor that it was given."""
    for output in outputs:
        for tensor in given:
            if output is tensor:
                return True
    return False


def _describe_argument(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        size = ", ".join(str(each) for each in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}({size})"
    if isinstance(value, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in value):
        return "[" + ", ".join(_describe_argument(each) for each in value) + "]"
    text = repr(value)
    return text if len(text) <= 40 else f"<{type(value).__name__}>"
