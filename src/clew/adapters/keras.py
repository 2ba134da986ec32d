"""Record models of Keras 3, with any of its back ends, step by step; and give them the weights of another model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clew.adapters.recording import Recording
from clew.adapters.weights import import_into
from clew.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from clew.compare.weight_import import ImportReport

__all__ = ["Recording", "callback", "import_weights", "watch"]


def watch(model: Any, *, name: str = "keras", out: str | None = None) -> Recording:
    """Record what the layers of a model give when it is called, inside ``with``; ``step`` ends a step.

    ::

        with clew.adapters.keras.watch(model, name="port") as run:
            y = model(x)
            run.step(model, loss=loss)

    ``model.fit(x, y, callbacks=[clew.adapters.keras.callback(run)])`` records each batch of a training. With JAX and
    torch gradients at the layers' outputs are seen too; with other back ends layers are seen only where they are called
    with numbers, which ``fit`` does with ``run_eagerly=True``.
    """
    return Recording(_adapter().KerasCapture(model), name=name, out=out)


def callback(run: Recording) -> Any:
    """Return a callback for ``fit`` that ends a step of a recording with each batch."""
    callbacks = _adapter().load_keras().callbacks

    class EndSteps(callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            del batch, logs
            run.begin(self.model)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del batch, logs
            run.step(self.model)

    return EndSteps()


def import_weights(
    model: Any, weights: Mapping[str, Any] | str | Path, *, names: Mapping[str, str] | None = None
) -> tuple[Any, ImportReport]:
    """Give a model the weights of a state dict, a mapping or a checkpoint; return it with what was matched."""
    capture = _adapter()
    values, report = import_into(capture.read_parameters(model), weights, names)
    return capture.write_parameters(model, values), report


def _adapter() -> Any:
    from clew.capture import keras

    try:
        keras.load_keras()
    except ImportError as error:
        raise MissingExtra(
            f"keras cannot be imported: {error}",
            where="clew.adapters.keras",
            next_step="pip install 'clew[keras]', and name an installed back end in KERAS_BACKEND",
        ) from error
    return keras
