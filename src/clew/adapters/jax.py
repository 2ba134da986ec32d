"""Record models of JAX, written with Flax NNX or Equinox, step by step; and give them the weights of another model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clew.adapters.recording import Recording
from clew.adapters.weights import import_into
from clew.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from clew.compare.weight_import import ImportReport

__all__ = ["Recording", "import_weights", "watch"]


def watch(model: Any, *, name: str = "jax", out: str | None = None) -> Recording:
    """Record what the modules of a model give, inside ``with``; ``step`` ends a step.

    ::

        with clew.adapters.jax.watch(model, name="port") as run:
            loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
            run.step(model, loss=loss, grads=grads)

    Outputs and the gradients at them are taken where the model is called, gradients and jit included. A function that
    was compiled before stays as it is and shows nothing.
    """
    return Recording(_adapter().JaxCapture(model), name=name, out=out)


def import_weights(
    model: Any, weights: Mapping[str, Any] | str | Path, *, names: Mapping[str, str] | None = None
) -> tuple[Any, ImportReport]:
    """Return the model with weights of a state dict, a mapping of arrays or a checkpoint, and what was matched.

    Flax modules are changed in place, Equinox modules are not: use what is returned. Matrices and kernels are turned
    where the frameworks store them otherwise. ``names``: weights of the file by parameters of the model.
    """
    capture = _adapter()
    targets = capture.read_parameters(model)
    values, report = import_into(targets, weights, names)
    return capture.write_parameters(model, values), report


def _adapter() -> Any:
    try:
        from clew.capture import jax
    except ImportError as error:
        raise MissingExtra(
            "jax is not installed", where="clew.adapters.jax", next_step="pip install 'clew[jax]'"
        ) from error
    return jax
