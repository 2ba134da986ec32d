"""Sees the layers of Keras 3, with any back end: what they give wherever they are called with numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


def load_keras() -> Any:
    """Return Keras, imported now: it loads its back end at once, and the user may still want to choose that."""
    import keras

    return keras


class KerasCapture:
    """``Layer.__call__``, replaced from ``start`` to ``stop``; only the layers of the model are recorded."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.types = {path: _class_name(layer) for path, layer in find_layers(model)}
        self._original: Callable[..., Any] | None = None
        self._names: dict[int, str] = {}
        self._rows: dict[tuple[str, str], NDArray[Any]] = {}
        self._depth = 0

    def start(self) -> None:
        """Begin to see the calls of layers."""
        self._names = {id(layer): path for path, layer in find_layers(self._model)}
        self._original = original = load_keras().layers.Layer.__call__
        capture = self

        def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it stands for one
            name = capture._names.get(id(layer))
            if name == "(model)" and capture._depth == 0:
                capture._see_batch(args)
            capture._depth += 1
            try:
                result = original(layer, *args, **kwargs)
            finally:
                capture._depth -= 1
            if name is not None:
                capture._see(name, result)
            return result

        load_keras().layers.Layer.__call__ = __call__

    def stop(self) -> None:
        """Leave Keras as it was found."""
        if self._original is not None:
            load_keras().layers.Layer.__call__ = self._original
            self._original = None

    def take(self) -> dict[tuple[str, str], NDArray[Any]]:
        """Return what was seen since the last call, by site and kind, in order of execution."""
        rows, self._rows = self._rows, {}
        return rows

    def parameters(self, model: Any) -> dict[str, NDArray[Any]]:
        """Return the variables of a model by site."""
        return read_parameters(model)

    def gradients(self, gradients: Any) -> dict[str, NDArray[Any]]:
        """Return gradients by site: a mapping, or a list in the order of ``model.trainable_variables``."""
        if isinstance(gradients, dict):
            return {name: _as_numpy(value) for name, value in gradients.items()}
        names = {id(variable): name for name, variable in _find_variables(self._model)}
        trainable = self._model.trainable_variables
        return {
            names[id(variable)]: _as_numpy(value)
            for variable, value in zip(trainable, gradients, strict=True)
        }

    def _see_batch(self, args: tuple[Any, ...]) -> None:
        for index, leaf in enumerate(load_keras().tree.flatten(list(args))):
            if _has_numbers(leaf):
                self._rows[f"batch.{index}", "batch"] = _as_numpy(leaf)

    def _see(self, name: str, result: Any) -> None:
        leaves = [leaf for leaf in load_keras().tree.flatten(result) if _has_numbers(leaf)]
        for index, leaf in enumerate(leaves):
            self._rows[name if len(leaves) == 1 else f"{name}[{index}]", "output"] = _as_numpy(leaf)


def find_layers(model: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and layer of a model, itself first, by the layers' own names."""
    yield path or "(model)", model
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if not isinstance(layer, load_keras().layers.InputLayer):
            yield from find_layers(layer, f"{path}.{layer.name}" if path else layer.name)


def _find_variables(model: Any) -> Iterator[tuple[str, Any]]:
    for path, layer in find_layers(model):
        prefix = "" if path == "(model)" else f"{path}."
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
            yield f"{prefix}{variable.name}", variable


def read_parameters(model: Any) -> dict[str, NDArray[Any]]:
    """Return the variables of a model by path."""
    return {
        path: _as_numpy(variable.value)
        for path, variable in _find_variables(model)
        if "seed_generator" not in variable.path
    }


def write_parameters(model: Any, values: dict[str, NDArray[Any]]) -> Any:
    """Give the variables of a model other values, and return it."""
    variables = dict(_find_variables(model))
    for path, value in values.items():
        variables[path].assign(value)
    return model


def _has_numbers(leaf: Any) -> bool:
    """Whether a leaf is an array with numbers, and no stand-in of a compiler."""
    if isinstance(leaf, load_keras().KerasTensor) or not hasattr(leaf, "shape"):
        return False
    return "Tracer" not in type(leaf).__name__


def _as_numpy(value: Any) -> NDArray[Any]:
    array = np.asarray(load_keras().ops.convert_to_numpy(value))
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)


def _class_name(layer: Any) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"
