"""Modules and arguments as plain data: classes by name, numbers and texts as they are, tensors beside it.

What is written here is read by generated tests that know torch and safetensors alone, so nothing is pickled: a module
comes back as an empty object of its class, with its attributes, parameters and children put in place.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Final

import torch

_SCALARS: Final = (bool, int, str, type(None))
_OWN: Final = frozenset(vars(torch.nn.Module()))
_REBUILT: Final = frozenset({"_flat_weight_refs", "_flat_weights"})
"""Attributes that recurrent layers make anew from their parameters."""


class Unfit(Exception):
    """Something that cannot be written as plain data; the text says what."""


class Writer:
    """Turns values into plain data; ``tensors`` collects the tensors by the names given to them there."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def value(self, value: Any, name: str) -> Any:
        """Return a value as data that fits JSON, or raise Unfit."""
        if isinstance(value, torch.Tensor):
            return {"tensor": self._keep(value, name), "grad": bool(value.requires_grad)}
        if type(value) in _SCALARS:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if type(value) in (tuple, torch.Size):
            return {"tuple": [self.value(part, f"{name}.{i}") for i, part in enumerate(value)]}
        if type(value) is list:
            return [self.value(part, f"{name}.{i}") for i, part in enumerate(value)]
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {"dict": [[key, self.value(part, f"{name}.{key}")] for key, part in value.items()]}
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if callable(value) and str(getattr(value, "__module__", "")).startswith(
            ("torch", "_VariableFunctions")
        ):
            return {"function": _torch_name(value)}
        raise Unfit(f"{name} is a {type(value).__qualname__}")

    def module(self, module: torch.nn.Module, name: str) -> dict[str, Any]:
        """Return a module with everything below it, or raise Unfit for one that has hooks or odd attributes."""
        kind = type(module)
        if "<locals>" in kind.__qualname__ or module._forward_hooks or module._forward_pre_hooks:
            raise Unfit(f"{name} is a class inside a function, or has hooks")
        attributes = {
            key: self.value(part, f"{name}.{key}")
            for key, part in vars(module).items()
            if key not in _OWN | _REBUILT
        }
        return {
            "class": {"module": kind.__module__, "name": kind.__qualname__, "file": file_of(kind)},
            "training": module.training,
            "attributes": attributes,
            "parameters": self._table(module._parameters, f"{name}.p"),
            "buffers": self._table(module._buffers, f"{name}.b"),
            "modules": {
                key: None if child is None else self.module(child, f"{name}.{key}")
                for key, child in module._modules.items()
            },
        }

    def _table(self, tensors: Any, name: str) -> dict[str, Any]:
        return {key: self.value(tensor, f"{name}.{key}") for key, tensor in tensors.items()}

    def _keep(self, tensor: torch.Tensor, name: str) -> str:
        """Name a tensor; one that is used twice is kept once."""
        if tensor.layout != torch.strided or tensor.is_meta:
            raise Unfit(f"{name} is not a plain tensor")
        known = next((key for key, each in self.tensors.items() if each is tensor), None)
        if known is None:
            known = name
            self.tensors[name] = tensor
        return known


def _torch_name(function: Any) -> str:
    name = getattr(function, "__name__", "")
    for home, prefix in ((torch.nn.functional, "nn.functional"), (torch, "")):
        if getattr(home, name, None) is function:
            return f"{prefix}.{name}".lstrip(".")
    raise Unfit(f"the function {name}")


def file_of(kind: type) -> str:
    """Return the file that a class was written in: where its own functions are."""
    codes = (getattr(part, "__code__", None) for part in vars(kind).values())
    own = next((code for code in codes if code is not None), None)
    if own is not None:
        return str(own.co_filename)
    try:
        return inspect.getsourcefile(kind) or ""
    except (TypeError, OSError):
        return ""
