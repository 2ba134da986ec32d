"""Weights of one model for another: read from wherever they are, matched, turned, and reported."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from clew.compare.weight_import import ImportReport, plan_import

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray


def import_into(
    targets: Mapping[str, NDArray[Any]],
    weights: Mapping[str, Any] | str | Path,
    names: Mapping[str, str] | None,
) -> tuple[dict[str, NDArray[Any]], ImportReport]:
    """Return the value of each parameter for which there is one, in its own shape and type, and the report."""
    sources = _read(weights)
    report = plan_import(
        {name: value.shape for name, value in targets.items()},
        {name: value.shape for name, value in sources.items()},
        names=names,
    )
    values = {
        match.target: np.ascontiguousarray(np.transpose(sources[match.source], match.axes)).astype(
            targets[match.target].dtype
        )
        for match in report.matched
    }
    return values, report


def _read(weights: Mapping[str, Any] | str | Path) -> dict[str, NDArray[Any]]:
    if isinstance(weights, (str, PathLike)):
        from clew.api.checkpoint import open_checkpoint
        from clew.store.checkpoint_dtype import widen

        checkpoint = open_checkpoint(weights)
        return {tensor.name: widen(tensor.load(), tensor.element) for tensor in checkpoint.tensors}
    return {name: _as_array(value) for name, value in weights.items()}


def _as_array(value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) in ("torch.bfloat16", "torch.float16") else value
    return np.asarray(value)
