"""Which parts of a model act differently in train and eval mode."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

_EXTREME: Final = 0.9


def find_sensitive(module: torch.nn.Module, *, training: bool) -> list[str]:
    """Return the parts of a model that its mode matters to and that are in the given mode, as ``Type (name)``.

    Batch normalisation whose weights are frozen is meant to stand still and does not count.
    """
    found = []
    for path, part in module.named_modules():
        if part.training == training and _is_sensitive(part):
            found.append(f"{type(part).__name__} ({path or 'model'})")
    return found


def _is_sensitive(part: torch.nn.Module) -> bool:
    if isinstance(part, _BatchNorm):
        return bool(part.track_running_stats and (part.weight is None or part.weight.requires_grad))
    if isinstance(part, _DropoutNd):
        return part.p > 0
    if isinstance(part, (torch.nn.RNNBase, torch.nn.MultiheadAttention)):
        return bool(part.dropout > 0)
    return _asks_for_mode(type(part))


def _asks_for_mode(kind: type[Any]) -> bool:
    """Return whether the forward of a user's class reads ``self.training``, as functional dropout needs it."""
    if kind.__module__.startswith("torch."):
        return False
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    return code is not None and "training" in code.co_names


def find_extreme_dropout(module: torch.nn.Module) -> list[tuple[str, float]]:
    """Return the dropouts of a model that keep almost nothing, with their probability."""
    found = []
    for path, part in module.named_modules():
        # Not getattr(): a module's own __getattr__ may do anything for a name that it does not have.
        probability = part.p if isinstance(part, _DropoutNd) else vars(part).get("dropout", 0.0)
        if isinstance(probability, (int, float)) and probability >= _EXTREME and part.training:
            found.append((path or type(part).__name__, float(probability)))
    return found


def list_spectral_vectors(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module, torch.Tensor]]:
    """Return the layers with the older spectral norm, whose estimate starts at random: name, layer, vector."""
    found = []
    for path, part in module.named_modules():
        for hook in part._forward_pre_hooks.values():
            if (
                type(hook).__name__ == "SpectralNorm"
                and type(hook).__module__ == "torch.nn.utils.spectral_norm"
            ):
                vector = getattr(part, f"{getattr(hook, 'name', 'weight')}_u", None)
                if isinstance(vector, torch.Tensor):
                    found.append((path or type(part).__name__, part, vector))
    return found
