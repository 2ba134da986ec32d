"""Everything a step depends on, taken apart into tensors and plain data: no pickles, nothing that could run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.capture.torch.registry import Registry

_DEEPEST: Final = 8
_SCALARS: Final = (bool, int, str, type(None))
_OWN: Final = frozenset(vars(torch.nn.Module()))
_CARRIERS: Final = {
    torch.bfloat16: torch.int16,
    **{
        getattr(torch, name): torch.uint8
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
        if hasattr(torch, name)
    },
}
_PLAIN: Final = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
     torch.bool, torch.complex64}
)  # fmt: skip


def is_storable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be written as it is: memory of a known element type."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and not tensor.is_quantized
        and (tensor.dtype in _PLAIN or tensor.dtype in _CARRIERS)
    )


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tensors as numpy arrays, and the names of the element types that numpy does not know."""
    arrays, dtypes = {}, {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        carrier = _CARRIERS.get(plain.dtype)
        if carrier is not None:
            dtypes[name] = str(plain.dtype).removeprefix("torch.")
            array = plain.view(carrier).numpy()
            arrays[name] = array.view(np.uint16) if carrier == torch.int16 else array
        else:
            arrays[name] = plain.numpy()
    return arrays, dtypes


def pack(value: Any, name: str, tensors: dict[str, torch.Tensor], *, depth: int = 0) -> Any:
    """Return a value as data that fits JSON; its tensors go into ``tensors`` under names that start with ``name``.

    Containers of other classes keep the name of their class, and what is no plain value becomes ``{"as": true}``: a
    replay takes it from what the script itself gives there.
    """
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, name, tensors)
    if type(value) in _SCALARS:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if depth >= _DEEPEST:
        return {"as": True}
    parts = [(key, pack(part, f"{name}.{key}", tensors, depth=depth + 1)) for key, part in _parts(value)]
    if type(value) in (list, tuple):
        return {type(value).__name__: [part for _, part in parts]}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, part] for key, part in parts]}
    if parts:
        return {
            "like": f"{type(value).__module__}.{type(value).__qualname__}",
            "parts": [[k, p] for k, p in parts],
        }
    return {"as": True}


def _pack_tensor(value: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    if not is_storable(value):
        return {"as": True}
    tensors[name] = value
    data: dict[str, Any] = {"tensor": name}
    if not value.is_contiguous():
        data["stride"] = list(value.stride())
    if value.requires_grad:
        data["grad"] = True
    return data


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=False))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields is not None:
        return [(field, getattr(value, field, None)) for field in fields]
    return []


def name_tensors(registry: Registry) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer that is still there, by the name of its site."""
    for entry in list(registry.tensors.values()):
        tensor = entry.ref()
        if tensor is not None and is_storable(tensor):
            yield entry.name, tensor


def describe_modules(registry: Registry) -> dict[str, dict[str, Any]]:
    """Return the plain numbers that modules keep as attributes, and whether they are in training."""
    found = {}
    for tree in registry.living_trees():
        top = tree.ref()
        for module in top.modules() if top is not None else ():
            entry = registry.modules.get(id(module))
            if entry is not None:
                numbers = {key: v for key, v in vars(module).items() if _is_number(v) and key not in _OWN}
                found[entry.name] = {"training": getattr(module, "training", False), **numbers}
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int) or (type(value) is float and math.isfinite(value))


def describe_numbers(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object that are numbers or lists of numbers: the state of a scheduler."""
    return {
        key: pack(value, key, {}) if type(value) is float else value
        for key, value in vars(thing).items()
        if type(value) is float
        or _is_number(value)
        or (type(value) is list and value and all(map(_is_number, value)))
    }


def describe_scaler(scaler: Any) -> dict[str, Any]:
    """Return the state of a gradient scaler, and whether it has found infinities that its update will act on."""
    found = [float(each) for each in _found_infinities(scaler)]
    return {**scaler.state_dict(), "found_inf": found}


def restore_scaler(scaler: Any, state: dict[str, Any]) -> None:
    """Put a gradient scaler into a described state."""
    scaler.load_state_dict({key: value for key, value in state.items() if key != "found_inf"})
    for tensor, value in zip(_found_infinities(scaler), state.get("found_inf", ()), strict=False):
        tensor.fill_(value)


def _found_infinities(scaler: Any) -> list[torch.Tensor]:
    known = getattr(scaler, "_per_optimizer_states", {}).values()
    return [tensor for each in known for tensor in each["found_inf_per_device"].values()]


def pack_optimizer(
    optimizer: torch.optim.Optimizer, name: str, tensors: dict[str, torch.Tensor], *, registry: Registry
) -> dict[str, Any]:
    """Return an optimizer's groups with the names of what they hold, and its state for each parameter, by position."""
    groups = [
        {
            key: pack(value, f"{name}.g{index}.{key}", tensors)
            for key, value in group.items()
            if key != "params"
        }
        for index, group in enumerate(optimizer.param_groups)
    ]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        str(position): pack(optimizer.state[parameter], f"{name}.{position}", tensors)
        for position, parameter in enumerate(parameters)
        if parameter in optimizer.state
    }
    held = [
        [entry.name for each in group["params"] if (entry := registry.tensors.get(id(each))) is not None]
        for group in optimizer.param_groups
    ]
    return {"type": type(optimizer).__name__, "groups": groups, "held": held, "state": state}
