"""What the functions of torch are called by people, and what their arguments are called."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, Final

import torch

_SAME_AS: Final = {
    "truediv": "div", "rtruediv": "div", "itruediv": "div_", "floordiv": "floor_divide", "rmul": "mul",
    "radd": "add", "rmatmul": "matmul", "pow": "pow", "iadd": "add_", "isub": "sub_", "imul": "mul_",
    "ipow": "pow_", "idiv": "div_", "rdiv": "div", "invert": "bitwise_not", "setitem": "setitem_",
}  # fmt: skip
"""Operators by the name of the function they stand for; an in-place one ends with an underscore."""

_READS: Final = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__"}
)
"""Calls that hand a value to Python: what follows may depend on the data."""

_PASSES: Final = frozenset(
    {"to", "type", "contiguous", "float", "double", "half", "bfloat16", "int", "long", "bool", "cpu", "cuda",
     "requires_grad_", "retain_grad", "type_as", "expand_as", "resolve_conj", "resolve_neg", "share_memory_"}
)  # fmt: skip
"""Calls that do nothing when they return the very tensor they were given."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How calls of one function are recorded. ``kind``: ``operation``, ``ignore`` (never one) or ``read``."""

    op: str
    kind: str = "operation"
    in_place: bool = False
    passes: bool = False


def plan_for(function: Any) -> Plan:
    """Return how calls of a function that torch reported are to be recorded."""
    name = getattr(function, "__name__", "") or type(function).__name__
    if name in {"__set__", "__delete__", "__len__", "register_hook"} or _is_initialiser(function):
        return Plan(name, "ignore")
    if name in _READS:
        return Plan(name.strip("_"), "read")
    op = plain_name(function, name)
    return Plan(op, in_place=op.endswith("_"), passes=op in _PASSES)


def plain_name(function: Any, name: str) -> str:
    """Return the everyday name: ``add`` for an operator, the attribute for a property, without overload."""
    if name == "__get__":
        name = function.__self__.__name__
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        space = str(function).partition(".")[0]
        short = name.partition(".")[0]
        return short if space == "aten" else f"{space}::{short}"
    if name.startswith("__") and name.endswith("__"):
        short = name.strip("_")
        return _SAME_AS.get(short, short)
    return name


def _is_initialiser(function: Any) -> bool:
    return getattr(function, "__module__", None) == "torch.nn.init"


@functools.cache
def _stand_ins() -> dict[Any, Any]:
    """Return functions with the signatures of torch's built-in ones, which have none of their own."""
    return dict(torch.overrides.get_testing_overrides())


@functools.lru_cache(maxsize=1024)
def argument_names(function: Any) -> tuple[str, ...]:
    """Return the names of a function's positional arguments, empty when nobody knows them."""
    stand_in = _stand_ins().get(function) or function
    try:
        parameters = inspect.signature(stand_in).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(each.name for each in parameters if each.kind in positional)


def name_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by name; what comes after the last known name joins it, as in ``view(2, -1)``."""
    names = argument_names(function)
    named = dict(zip(names, args, strict=False))
    if len(args) > len(names):
        rest = args[len(names) :]
        if len(names) > 1:
            named[names[-1]] = (named[names[-1]], *rest)
        else:
            named.update({f"arg{index}": value for index, value in enumerate(rest, start=len(names))})
    if kwargs:
        named.update(kwargs)
    return named
