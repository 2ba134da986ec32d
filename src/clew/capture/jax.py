"""Sees the modules of Flax NNX and Equinox: what they give, and the gradients that come back to it.

A module's result passes an identity that hands its value out, in the forward and in the backward pass, also where
JAX traces: gradients and jit work on tracers, and only the run-time knows the numbers.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from clew.capture.jax_tap import hand_out, tap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


class JaxCapture:
    """The classes of a model's modules, called through clew from ``start`` to ``stop``."""

    def __init__(self, model: Any) -> None:
        self._model_type = type(model)
        self._classes = list(dict.fromkeys(type(module) for _, module in find_modules(model)))
        self.types = {path: _class_name(module) for path, module in find_modules(model)}
        self._originals: list[tuple[type, Any]] = []
        self._names: dict[int, str] = {}
        self._depth = 0
        self._order = 0
        self._rows: dict[tuple[int, str, str], NDArray[Any]] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to see the calls of modules."""
        for kind in self._classes:
            if any("__call__" in vars(each) for each in kind.__mro__):
                self._originals.append((kind, vars(kind).get("__call__")))
                type.__setattr__(kind, "__call__", self._wrap(kind.__call__))

    def stop(self) -> None:
        """Leave the classes as they were found."""
        for kind, original in self._originals:
            if original is None:
                type.__delattr__(kind, "__call__")
            else:
                type.__setattr__(kind, "__call__", original)
        self._originals.clear()

    def take(self) -> dict[tuple[str, str], NDArray[Any]]:
        """Return what was seen since the last call, forward in order of execution, backward in the reverse."""
        jax.effects_barrier()  # type: ignore[no-untyped-call]
        with self._lock:
            rows, self._rows = self._rows, {}
        self._order = 0
        forward = sorted((key for key in rows if key[2] != "grad_output"), key=lambda key: key[0])
        backward = sorted((key for key in rows if key[2] == "grad_output"), key=lambda key: -key[0])
        return {(site, kind): rows[order, site, kind] for order, site, kind in [*forward, *backward]}

    def parameters(self, model: Any) -> dict[str, NDArray[Any]]:
        """Return the parameters of a model by site."""
        return read_parameters(model)

    def gradients(self, gradients: Any) -> dict[str, NDArray[Any]]:
        """Return gradients, a tree like the model or its state, by site."""
        return _read_tree(gradients)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it stands for one
            is_root = self._depth == 0 and type(module) is self._model_type
            if is_root:
                # Gradients and jit work on copies of a model: names go by the one that is called.
                self._names = {id(each): path for path, each in find_modules(module)}
                self._see_batch(args)
            self._depth += 1
            try:
                result = original(module, *args, **kwargs)
            finally:
                self._depth -= 1
            name = self._names.get(id(module))
            return result if name is None or not self._originals else self._see(name, result)

        return __call__

    def _see_batch(self, args: tuple[Any, ...]) -> None:
        for index, leaf in enumerate(jax.tree_util.tree_leaves(args)):
            if isinstance(leaf, (jax.Array, np.ndarray)):
                hand_out(leaf, self._keeper(self._next(), f"batch.{index}", "batch"))

    def _see(self, name: str, result: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten(result)
        seen = []
        for index, leaf in enumerate(leaves):
            is_array = isinstance(leaf, jax.Array)
            site = name if len(leaves) == 1 else f"{name}[{index}]"
            seen.append(self._tap(leaf, site) if is_array else leaf)
        return jax.tree_util.tree_unflatten(tree, seen)

    def _next(self) -> int:
        self._order += 1
        return self._order

    def _tap(self, value: jax.Array, site: str) -> jax.Array:
        order = self._next()
        return tap(value, self._keeper(order, site, "output"), self._keeper(order, site, "grad_output"))

    def _keeper(self, order: int, site: str, kind: str) -> Callable[[Any], None]:
        def keep(array: Any) -> None:
            with self._lock:
                self._rows[order, site, kind] = _as_numpy(array)

        return keep


def find_modules(module: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield path and module of a tree of modules, itself first, in the order of its attributes."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    if _is_module(module):
        seen.add(id(module))
        yield path or "(model)", module
    for key, value in _children(module):
        yield from find_modules(value, f"{path}.{key}" if path else key, seen)


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(str(key), each) for key, each in value.items()]
    if isinstance(value, (list, tuple)) or type(value).__name__ == "List":
        return [(str(index), each) for index, each in enumerate(value)]
    if _is_module(value):
        fields = getattr(value, "__dict__", {})
        return [(key, each) for key, each in fields.items() if not key.startswith("_")]
    return []


def _is_module(value: Any) -> bool:
    """Whether a value is a module of Flax NNX or Equinox, found by name: neither must be installed for the other."""
    return any(
        kind.__name__ == "Module" and kind.__module__.partition(".")[0] in ("flax", "equinox")
        for kind in type(value).__mro__
    )


def read_parameters(model: Any) -> dict[str, NDArray[Any]]:
    """Return the parameters of a model by path."""
    return {path: _as_numpy(_value(holder)) for path, holder in _find_parameters(model)}


def _find_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    for path, module in find_modules(model):
        prefix = "" if path == "(model)" else f"{path}."
        for key, value in _spread(module):
            if _is_parameter(value):
                yield f"{prefix}{key}", value


def _spread(module: Any) -> Iterator[tuple[str, Any]]:
    for key, value in _children(module):
        if isinstance(value, (list, tuple, dict)) and not _is_module(value):
            yield from ((f"{key}.{inner}", each) for inner, each in _children(value))
        else:
            yield key, value


def _is_parameter(value: Any) -> bool:
    if isinstance(value, jax.Array):
        return True
    return any(
        kind.__name__ == "Param" and kind.__module__.startswith("flax") for kind in type(value).__mro__
    )


def _value(holder: Any) -> Any:
    return holder if isinstance(holder, jax.Array) else holder[...]


def write_parameters(model: Any, values: dict[str, NDArray[Any]]) -> Any:
    """Return the model with other values of its parameters: Flax holds them in boxes, Equinox makes a new tree."""
    holders = dict(_find_parameters(model))
    arrays = {path: holder for path, holder in holders.items() if isinstance(holder, jax.Array)}
    for path, value in values.items():
        if path not in arrays:
            holders[path][...] = jax.numpy.asarray(value)
    if not arrays:
        return model
    new = {id(array): jax.numpy.asarray(values[path]) for path, array in arrays.items() if path in values}
    return jax.tree_util.tree_map(lambda leaf: new.get(id(leaf), leaf), model)


def _read_tree(tree: Any) -> dict[str, NDArray[Any]]:
    """Return the arrays of a tree by path: of a model's own form, of a Flax state, or of nested dicts."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, jax.Array):
            parts = [
                str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part)))) for part in path
            ]
            name = ".".join(part for part in parts if part not in ("value", "raw_value", ".value"))
            found[name] = _as_numpy(leaf)
    return found


def _as_numpy(value: Any) -> NDArray[Any]:
    array = np.asarray(value)
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)


def _class_name(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
