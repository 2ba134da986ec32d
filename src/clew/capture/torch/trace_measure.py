"""Numbers of the values and gradients of a traced pass, taken while they exist."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from clew.capture.torch.trace_build import Measures
from clew.errors import UnsupportedTensor
from clew.model.schema import STAT_NAMES
from clew.stats.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from clew.capture.torch.trace_recorder import RawOperation


def measure(tensor: torch.Tensor, *, with_median: bool = True) -> dict[str, float] | None:
    """Return the statistics of one tensor and its median; None for one without readable values."""
    rows = Rows(capacity=1)
    try:
        rows.measure(tensor, 0)
    except UnsupportedTensor:
        return None
    rows.settle()
    stats = dict(zip(STAT_NAMES, rows.values[0].tolist(), strict=True))
    has_bad = bool(stats["nan"] or stats["pos_inf"] or stats["neg_inf"])
    stats["median"] = median(tensor, has_bad=has_bad) if with_median else math.nan
    return stats


def median(tensor: torch.Tensor, *, has_bad: bool = True) -> float:
    """Return the median of the finite elements, the mean of the middle two; NaN when there are none."""
    if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return math.nan
    values = tensor.detach().flatten()
    values = values.float() if values.dtype.itemsize < 4 else values
    if has_bad and values.is_floating_point():
        values = values[values.isfinite()]
    count = values.numel()
    if not count:
        return math.nan
    lower = values.median()
    if count % 2 or int((values <= lower).sum()) > count // 2:
        return float(lower)
    # torch gives the lower of the middle two; the upper one is the next larger value.
    return (float(lower) + float(values[values > lower].min())) / 2


class Measurer:
    """Watches a traced pass: measures every tensor as it comes, and its gradient as it passes."""

    def __init__(self, *, values: bool, grads: bool) -> None:
        self.measures = Measures()
        self._wants_values = values
        self._wants_grads = grads
        self._handles: list[Any] = []

    def on_tensor(self, index: int, tensor: torch.Tensor) -> None:
        """Measure a tensor that came into the graph, and listen for its gradient."""
        if self._wants_values:
            self._keep(self.measures.values, index, tensor)
        if self._wants_grads and tensor.requires_grad and not tensor.is_leaf:
            hook = functools.partial(self._keep_grad, index)
            self._handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]

    def on_module(self, site: str, call: int, output: Any) -> None:
        """Modules add nothing to what their operations told."""

    def on_operation(self, operation: RawOperation, outputs: Sequence[torch.Tensor]) -> None:
        """Operations add nothing to what their tensors told."""

    def add_leaf_grads(self, grads: Iterable[tuple[int, torch.Tensor | None]]) -> None:
        """Measure the gradients of parameters and inputs, by their numbers."""
        for index, grad in grads:
            if grad is not None:
                self._keep(self.measures.grads, index, grad)

    def close(self) -> None:
        """Take the hooks away: an input may outlive the pass."""
        for handle in self._handles:
            handle.remove()

    def _keep_grad(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is not None:
            self._keep(self.measures.grads, index, grad)

    def _keep(self, table: dict[int, dict[str, float]], index: int, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            stats = measure(tensor, with_median=self._wants_values)
        if stats is not None:
            table[index] = stats
