"""Sees the layers of Keras 3: what they give, with JAX and torch also the gradients that come back, inside fit too."""

from __future__ import annotations

import threading
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
    """``Layer.__call__`` and two methods of the model, replaced from ``start`` to ``stop``; only its layers are seen.

    With JAX values pass a tap, so that they are seen where it traces too: under its gradients, and inside ``fit``. With
    torch the gradients of the tensors are hooked. With other back ends only numbers are seen, no gradients.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.types = {path: _class_name(layer) for path, layer in find_layers(model)}
        self._original: Callable[..., Any] | None = None
        self._names: dict[int, str] = {}
        self._rows: dict[tuple[str, str], tuple[int, NDArray[Any]]] = {}
        self._lock = threading.Lock()
        self._depth = 0
        self._order = 0

    def start(self) -> None:
        """Begin to see the calls of layers; what ``fit`` had compiled is compiled again."""
        self._names = {id(layer): path for path, layer in find_layers(self._model)}
        self._original = original = load_keras().layers.Layer.__call__
        capture = self

        def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it stands for one
            name = capture._names.get(id(layer))
            if name == "(model)" and capture._depth == 0:
                capture._order = 0
                capture._see_batch(args)
            capture._depth += 1
            try:
                result = original(layer, *args, **kwargs)
            finally:
                capture._depth -= 1
            return result if name is None else capture._see(name, result)

        load_keras().layers.Layer.__call__ = __call__
        self._replace(self._model, "compute_loss", self._see_loss)
        self._replace(getattr(self._model, "optimizer", None), "apply", self._see_gradients)
        self._forget_compiled()

    def _replace(self, owner: Any, name: str, see: Callable[..., Any]) -> None:
        """Put a method that looks at its own into the instance: what is compiled from there on goes through it."""
        method = getattr(owner, name, None)
        if method is not None:
            # Past the attributes that Keras keeps count of.
            vars(owner)[name] = lambda *args, **kwargs: see(method, *args, **kwargs)

    def stop(self) -> None:
        """Leave Keras as it was found."""
        if self._original is None:
            return
        load_keras().layers.Layer.__call__ = self._original
        self._original = None
        vars(self._model).pop("compute_loss", None)
        optimizer = getattr(self._model, "optimizer", None)
        if optimizer is not None:
            vars(optimizer).pop("apply", None)
        self._forget_compiled()

    def _forget_compiled(self) -> None:
        if getattr(self._model, "train_function", None) is not None:
            self._model.train_function = None

    def take(self) -> dict[tuple[str, str], NDArray[Any]]:
        """Return what was seen since the last call, forward in order of execution, backward in the reverse."""
        if _backend() == "jax":
            import jax

            jax.effects_barrier()  # type: ignore[no-untyped-call]
        with self._lock:
            rows, self._rows = self._rows, {}
        forward = sorted((key for key in rows if key[1] != "grad_output"), key=lambda key: rows[key][0])
        backward = sorted((key for key in rows if key[1] == "grad_output"), key=lambda key: -rows[key][0])
        return {key: rows[key][1] for key in [*forward, *backward]}

    def parameters(self, model: Any) -> dict[str, NDArray[Any]]:
        """Return the variables of a model by site."""
        return read_parameters(model)

    def gradients(self, gradients: Any) -> dict[str, NDArray[Any]]:
        """Return gradients by site: a mapping, or a list in the order of ``model.trainable_variables``."""
        if isinstance(gradients, dict):
            return {name: _as_numpy(value) for name, value in gradients.items()}
        return {name: _as_numpy(value) for name, value in self._named(gradients)}

    def _named(self, gradients: Any) -> Iterator[tuple[str, Any]]:
        names = {id(variable): name for name, variable in _find_variables(self._model)}
        for variable, value in zip(self._model.trainable_variables, gradients, strict=True):
            yield names[id(variable)], value

    def _see_batch(self, args: tuple[Any, ...]) -> None:
        for index, leaf in enumerate(load_keras().tree.flatten(list(args))):
            self._hand_out(leaf, f"batch.{index}", "batch")

    def _see(self, name: str, result: Any) -> Any:
        tree = load_keras().tree
        leaves = tree.flatten(result)
        seen = [
            self._tap(leaf, name if len(leaves) == 1 else f"{name}[{index}]")
            for index, leaf in enumerate(leaves)
        ]
        return tree.pack_sequence_as(result, seen)

    def _see_loss(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = method(*args, **kwargs)
        self._hand_out(loss, "loss", "loss")
        return loss

    def _see_gradients(self, method: Callable[..., Any], grads: Any, *args: Any, **kwargs: Any) -> Any:
        for name, value in self._named(grads):
            if value is not None:
                self._hand_out(value, name, "grad")
        return method(grads, *args, **kwargs)

    def _tap(self, leaf: Any, site: str) -> Any:
        if not _is_array(leaf):
            return leaf
        order = self._next()
        keep, keep_gradient = (self._keeper(order, site, kind) for kind in ("output", "grad_output"))
        if _backend() == "jax":
            from clew.capture.jax_tap import tap

            return tap(leaf, keep, keep_gradient)
        if _has_numbers(leaf):
            keep(leaf)
        if _backend() == "torch" and leaf.requires_grad:
            leaf.register_hook(keep_gradient)
        return leaf

    def _hand_out(self, leaf: Any, site: str, kind: str) -> None:
        if not _is_array(leaf):
            return
        keep = self._keeper(self._next(), site, kind)
        if _backend() == "jax":
            from clew.capture.jax_tap import hand_out

            hand_out(leaf, keep)
        elif _has_numbers(leaf):
            keep(leaf)

    def _next(self) -> int:
        self._order += 1
        return self._order

    def _keeper(self, order: int, site: str, kind: str) -> Callable[[Any], None]:
        def keep(array: Any) -> None:
            if self._original is not None:
                with self._lock:
                    # The last one counts: before its first step Keras calls a model only to build it.
                    self._rows[site, kind] = (order, _as_numpy(array))

        return keep


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


def _backend() -> str:
    name: str = load_keras().backend.backend()
    return name


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, or stands for one while a compiler traces; Keras' own stand-ins never get numbers."""
    is_meta = str(getattr(leaf, "device", "")) == "meta"
    return hasattr(leaf, "shape") and not is_meta and not isinstance(leaf, load_keras().KerasTensor)


def _has_numbers(leaf: Any) -> bool:
    """Whether an array has numbers, and is no stand-in of TensorFlow's compiler."""
    return _backend() == "torch" or hasattr(leaf, "numpy") or isinstance(leaf, np.ndarray)


def _as_numpy(value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # A copy: the tensor itself is changed in place by the update.
        return np.array((value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy())
    array = np.asarray(load_keras().ops.convert_to_numpy(value))
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)


def _class_name(layer: Any) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"
