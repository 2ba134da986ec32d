"""Taps inside compiled code: one operator without output that the compiler keeps and runs in its place.

While the compiler traces, a tap becomes ``clew::tap(tensors, text)``. The text holds everything that is known then:
what to do, the arguments, the user's line and module, so that a graph from the compiler's cache works too. Only
Python objects (a function, an open file) live in a table of this process.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from clew.capture.torch.taps_place import Place, at_place, is_internal, place_at

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

is_compiling = torch.compiler.is_compiling
_is_exporting: Final[Callable[[], bool]] = getattr(torch.compiler, "is_exporting", lambda: False)

_runners: Final[dict[str, Callable[..., None]]] = {}
_objects: Final[dict[int, Any]] = {}
_numbers: Final = itertools.count()
_told: Final[set[str]] = set()


def fold(function: F) -> F:
    """Make the compiler call a function while it traces and take the result for a constant.

    ``torch.compiler.assume_constant_result`` does the same and imports the whole compiler for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def runs(kind: str) -> Callable[[F], F]:
    """Register the function that does a kind of tap when compiled code comes to it: ``(tensors, order, key)``."""

    def register(function: F) -> F:
        _runners[kind] = function
        return function

    return register


def emit(tensors: list[Any], order: dict[str, Any]) -> None:
    """Put a tap into the graph that is being traced; an order holds constants only."""
    if _is_exporting():
        _tell_exported()
        return
    text = _write(order)
    if text:
        torch.ops.clew.tap([torch.as_tensor(each) for each in tensors], text)


@fold
def keep(value: Any) -> int:
    """Return the number of a Python object that an order may hold."""
    known = next((number for number, each in _objects.items() if each is value), None)
    if known is not None:
        return known
    number = next(_numbers)
    _objects[number] = value
    return number


def release(number: int) -> None:
    """Forget a kept object; a graph that still asks for it is told so by None."""
    _objects.pop(number, None)


def kept(number: int) -> Any:
    """Return the object that was kept under a number in this process, or None."""
    return _objects.get(number)


@fold
def _write(order: dict[str, Any]) -> str:
    if not _is_registered:
        tell_once(
            "old",
            f"clew: torch {torch.__version__} drops taps from compiled code; they are silent there "
            "(torch.compiler.set_stance('force_eager') brings them back)",
        )
        return ""
    region = _name_silent_region()
    if region:
        tell_once(
            region,
            f"clew: taps inside {region} are left out of compiled code: torch would drop or break them",
        )
        return ""
    place, instruction = _find_traced_place()
    return json.dumps({**order, "place": [place.file, place.line, place.site], "instruction": instruction})


@lru_cache(maxsize=4096)
def _read(text: str) -> tuple[dict[str, Any], Place]:
    order: dict[str, Any] = json.loads(text)
    file, line, site = order.pop("place")
    return order, place_at(file, line, site) if file else Place(site=site)


@fold
def _tell_exported() -> None:
    tell_once("export", "clew: taps (clew.print, clew.check, clew.tap) are left out of exported programs")


def tell_once(key: str, message: str) -> None:
    """Say something to the user on stderr, once for each key."""
    if key not in _told:
        _told.add(key)
        sys.stderr.write(message + "\n")


def is_left_out(x: Any) -> bool:
    """Return whether a tracer other than the compiler is at work, whose graphs have no taps; said once."""
    if torch._C._get_tracing_state() is None and not type(x).__module__.startswith("torch.fx"):
        return False
    tell_once(
        "trace", "clew: taps (clew.print, clew.check, clew.tap) are left out of torch.jit and torch.fx graphs"
    )
    return True


_KEEPING: Final = frozenset({"None", "tag_activation_checkpoint", "autograd.Function"})
"""Regions of a graph, by the operation that runs them, in which torch keeps operators without output."""


def _name_silent_region() -> str:
    """Return the name of the region being traced if torch loses taps in it, such as ``torch.cond``."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracer: Any = InstructionTranslator.current_tx().output.current_tracer
        while tracer is not None:
            target = str(tracer.source_target)
            if target not in _KEEPING:
                return str(tracer.description or target)
            tracer = tracer.parent
    except Exception:  # noqa: BLE001 - internals of torch: as if there were no region
        return ""
    return ""


def _find_traced_place() -> tuple[Place, int]:
    """Return the user's line and module that the compiler is tracing, and the instruction in its function."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracer: Any = InstructionTranslator.current_tx()
        site = _name_traced_module(tracer)
        while is_internal(tracer.f_code.co_filename):
            tracer = tracer.parent
        stack = torch._guards.TracingContext.extract_stack()
        frame = next(each for each in reversed(stack) if not is_internal(each.filename))
        return place_at(frame.filename, frame.lineno or 0, site), tracer.current_instruction.offset or 0
    except Exception:  # noqa: BLE001 - internals of torch: a tap without a line is better than none
        return Place(), 0


def _name_traced_module(tracer: Any) -> str:
    """Return the path of the module being traced within the one that was compiled: ``blocks.0``."""
    if not tracer.nn_module_stack:
        return ""
    path, kind = list(tracer.nn_module_stack.values())[-1][:2]
    code = tracer.output.root_tx.f_code
    compiled = f"L['{code.co_varnames[0]}']" if code.co_argcount else ""
    name = re.sub(r"^[LG]\['(\w+)'\]", r"\1", path.removeprefix(compiled))
    return name.lstrip(".") or f"({kind.__name__})"


def _tap(tensors: list[torch.Tensor], text: str) -> None:
    order, place = _read(text)
    with at_place(place):
        _runners[order["tap"]](tensors, order, text)


def _tap_batched(info: Any, in_dims: Any, tensors: list[torch.Tensor], text: str) -> tuple[None, None]:  # noqa: ARG001
    torch.ops.clew.tap(tensors, text)
    return None, None


def _register() -> bool:
    """Define the operator and its effect; False when this torch cannot keep an operator without output."""
    try:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        tags = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []
        _library.define("tap(Tensor[] tensors, str text) -> ()", tags=tags)  # type: ignore[no-untyped-call]
        _library.impl("tap", _tap, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake("clew::tap", lambda tensors, text: None, lib=_library)  # noqa: ARG005
        if hasattr(torch.library, "register_vmap"):
            torch.library.register_vmap("clew::tap", _tap_batched, lib=_library)
        _register_effectful_op(torch.ops.clew.tap.default, _EffectType.ORDERED)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return False
    return True


_library: Final = torch.library.Library("clew", "FRAGMENT")  # type: ignore[no-untyped-call]
_is_registered: Final = _register()
