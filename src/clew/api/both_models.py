"""One forward pass of each of several models on one batch, recorded; the models are left as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from clew.api.record import watch
from clew.capture.torch.randomness import RandomStates
from clew.capture.torch.recorder import KIND_PARAM
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def record_calls(models: Mapping[str, torch.nn.Module], batch: Any, folder: Path) -> list[Path]:
    """Call each model with the batch from one random state, and return the recorded runs."""
    states = RandomStates()
    states.take()
    try:
        return [_record(name, model, batch, folder, states) for name, model in models.items()]
    finally:
        states.restore()


def _record(name: str, model: torch.nn.Module, batch: Any, folder: Path, states: RandomStates) -> Path:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"model {name} is a {type(model).__name__}, not a torch.nn.Module", where="clew.assert_same"
        )
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states.restore()
    try:
        settings = {"budget": "off", "status": False, "doctor": False, "histograms": False}
        with watch({"model": model}, out=str(folder), name=name, **settings) as watching, torch.no_grad():
            _call(model, batch)
            _record_parameters(watching._recording.session.recorder)
        return watching.path
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _call(model: torch.nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _record_parameters(recorder: Any) -> None:
    """Without an optimizer nobody measures the weights: do it here, as at the start of an update."""
    entries = [entry for entry in recorder.registry.tensors.values() if entry.ref() is not None]
    parameters = [entry for entry in entries if recorder.sites[entry.site].role == "parameter"]
    recorder.measure_many(
        [entry.ref() for entry in parameters], [entry.site for entry in parameters], KIND_PARAM
    )
