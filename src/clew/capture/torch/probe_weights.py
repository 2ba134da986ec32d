"""Notes weights whose units are all alike and stay so: they learn one and the same thing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from clew.capture.torch.glance import copy_numbers, glance, glance_row

if TYPE_CHECKING:
    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

_FIRST_STEPS: Final = 6
_SIGHTINGS: Final = 2
_SETTLED: Final = 2
"""Steps without rows that are alike: they would have been from the start."""

_FEWEST_ROWS: Final = 4
_ALIKE: Final = 1e-5
_CLEARLY: Final = 1e-2
_MOST_NAMES: Final = 8
_GLANCE: Final = 8
_BLOCKS: Final = (1, 3, 4)
"""Matrices that lie under each other in one weight: projections of attention, gates of recurrent layers."""


class WeightProbe:
    """Compares the rows of every weight matrix, and those of its gradient, in the first steps."""

    def __init__(self, recorder: Recorder, events: LoopEvents, optimizers: OptimizerLens) -> None:
        self.recorder = recorder
        self.events = events
        self.optimizers = optimizers
        self._steps: dict[int, int] = {}
        self._alike: dict[int, int] = {}
        self._apart: set[int] = set()
        """Weights whose rows and columns were seen to differ: they do not become alike."""
        self._told = 0

    def install(self, patches: Patches) -> None:
        """Begin to compare."""
        patches.listen(self.events.on_stepped, self._see_stepped)
        self.recorder.note("probe", {"probe": "weights"})

    def look_again(self) -> None:
        """Compare the rows in the next steps of every optimizer: there may be new layers."""
        self._steps.clear()
        self._apart.clear()

    def is_settled(self) -> bool:
        """Return whether no weight of the last steps has rows that are alike."""
        return not self._alike and all(steps >= _SETTLED for steps in self._steps.values())

    def _see_stepped(self, optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if steps > _FIRST_STEPS or self._told >= 2 or (steps > _SETTLED and not self._alike):
            return
        apart = self._apart
        held = [p for group in optimizer.param_groups for p in group["params"]]
        fresh = [p for p in held if id(p) not in apart and _is_matrix(p)]
        with torch.no_grad():
            apart.update(id(p) for p in fresh if _differs_clearly(p))
            matrices = [p for p in fresh if id(p) not in apart]
            alike = [p for p in matrices if _is_symmetric(p)]
            idle = [p for p in matrices if _is_idle(p)]
        # One matrix of zeros may wait for another one to move; several wait for each other.
        found = alike + (idle if len(idle) > 1 else [])
        current = {id(p): self._alike.get(id(p), 0) + 1 for p in found}
        for parameter in matrices:
            self._alike.pop(id(parameter), None)
        self._alike.update(current)
        if any(count == _SIGHTINGS + (not alike) for count in current.values()):
            count = sum(id(p) in apart for p in held) + len(matrices)
            self._tell(optimizer, found, is_idle=not alike, matrices=count)

    def _tell(
        self, optimizer: torch.optim.Optimizer, found: list[torch.Tensor], *, is_idle: bool, matrices: int
    ) -> None:
        self._told += 1
        entries = [self.recorder.registry.tensors.get(id(p)) for p in found]
        note: dict[str, Any] = {
            **self.events.know(optimizer).tell(),
            "weights": [entry.name for entry in entries if entry is not None][:_MOST_NAMES],
            "count": len(found),
            "of": matrices,
            "rows": int(found[0].shape[0]),
            "value": float(found[0].detach().reshape(-1)[0]),
            "is_idle": is_idle,
        }
        self.recorder.note("equal-rows", note)


def _is_matrix(parameter: torch.Tensor) -> bool:
    return (
        parameter.requires_grad
        and parameter.dim() > 1
        and parameter.numel() > parameter.shape[0]
        and type(parameter.grad) is torch.Tensor
        and parameter.grad.layout == torch.strided
        and parameter.layout == torch.strided
    )


def _is_symmetric(parameter: torch.Tensor) -> bool:
    """Return whether all units agree, and so do their gradients.

    A unit is a row; in a matrix of one's own that inputs are multiplied by from the left it is a column.
    """
    gradient = parameter.grad
    assert gradient is not None  # one without is no candidate
    weight, slope = parameter.detach(), gradient.detach()
    if weight.shape[0] >= _FEWEST_ROWS and _has_like_rows(weight):
        return _has_like_rows(slope)
    if weight.dim() != 2 or weight.shape[1] < _FEWEST_ROWS:
        return False
    return _has_like_rows(weight.T) and _has_like_rows(slope.T)


def _differs_clearly(weight: torch.Tensor) -> bool:
    """Return whether a few numbers show that neither rows nor columns agree, as those of nearly all weights do."""
    if len(weight) < 2:
        return False
    first, second = glance_row(weight, 0, _GLANCE), glance_row(weight, 1, _GLANCE)
    enough = _CLEARLY * max(map(abs, first + second))
    has_other_rows = any(abs(a - b) > enough for a, b in zip(first, second, strict=True))
    return has_other_rows and (abs(first[0] - first[1]) > enough or abs(second[0] - second[1]) > enough)


def _has_like_rows(tensor: torch.Tensor) -> bool:
    some = copy_numbers(tensor[:2])
    with np.errstate(all="ignore"):
        size = float(abs(some[0]).max())
        if not size > 0 or float(abs(some[1] - some[0]).max()) > _ALIKE * size:
            return False
    rows = tensor.reshape(tensor.shape[0], -1)
    return any(_has_like_blocks(rows, blocks) for blocks in _BLOCKS)


def _has_like_blocks(rows: torch.Tensor, blocks: int) -> bool:
    """Return whether the rows of each of some blocks agree."""
    length, rest = divmod(len(rows), blocks)
    if rest or length < _FEWEST_ROWS:
        return False
    apart = rows.reshape(blocks, length, -1)
    return float((apart - apart[:, :1]).abs().max()) <= _ALIKE * float(rows.abs().max())


def _is_idle(parameter: torch.Tensor) -> bool:
    """Return whether a weight holds nothing but zeros and gets nothing but zeros."""
    gradient = parameter.grad
    return gradient is not None and _is_nothing(parameter.detach()) and _is_nothing(gradient.detach())


def _is_nothing(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds nothing but zeros; a few numbers tell of nearly all that hold more."""
    return not any(glance(tensor, _GLANCE)) and not bool(tensor.any())
