"""What is to be traced: a module, a function or a method, with its inputs by name."""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from clew.capture.torch.leaves import walk
from clew.capture.torch.registry import unwrap
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Subject:
    """A callable with its inputs; ``root`` is the module whose names are used, None for a plain function."""

    name: str
    call: Callable[..., Any]
    root: torch.nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def input_leaves(self) -> list[tuple[str, torch.Tensor]]:
        """Return every tensor of the inputs with its name, such as ``x`` or ``batch[ids]``."""
        target = self.root.forward if self.call is self.root and self.root is not None else self.call
        named = _bind(target, self.args, self.kwargs)
        return [(f"{name}{path}", tensor) for name, value in named for path, tensor in walk(value)]


def resolve_subject(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subject:
    """Return what a user's model really is: inside wrappers, behind ``partial``, the owner of a method."""
    while isinstance(model, functools.partial):
        args, kwargs, model = (*model.args, *args), {**model.keywords, **kwargs}, model.func
    root: torch.nn.Module | None = None
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise UsageError(
            f"{model.__name__} is a class, not a model",
            next_step=f"make one first, and give {model.__name__}(…) with its inputs",
        )
    if isinstance(model, torch.nn.Module):
        model = root = unwrap(model)
        name = type(model).__name__
    elif callable(model):
        owner = getattr(model, "__self__", None)
        root = owner if isinstance(owner, torch.nn.Module) else None
        name = getattr(model, "__qualname__", type(model).__name__).rpartition("<locals>.")[2]
    else:
        raise UsageError(
            f"cannot trace a {type(model).__name__}",
            next_step="give a module, a function, a tensor with a graph, or an exported program",
        )
    if root is not None and is_meta(root):
        args, kwargs = _to_meta(args), _to_meta(kwargs)
    return Subject(name, model, root, tuple(args), kwargs)


def is_meta(root: torch.nn.Module) -> bool:
    """Return whether a model has parameters and all of them are on the meta device."""
    first = next(root.parameters(), None)
    return first is not None and first.is_meta and all(each.is_meta for each in root.parameters())


def _to_meta(values: Any) -> Any:
    return torch.utils._pytree.tree_map(_leaf_to_meta, values)


def _leaf_to_meta(value: Any) -> Any:
    """Return a tensor on the meta device, and a copy of a dataclass with its tensors there."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if not is_dataclass(value) or isinstance(value, type):
        return value
    moved = copy.copy(value)
    for field in fields(value):
        if hasattr(value, field.name):
            object.__setattr__(moved, field.name, _to_meta(getattr(value, field.name)))
    return moved


def _bind(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, Any]]:
    """Return the inputs under the names the function gives them; a wrong call is left for the call itself."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return [*((f"input{index}", value) for index, value in enumerate(args)), *kwargs.items()]
    named = []
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named += list(value.items())
        else:
            named.append((name, value))
    return named
