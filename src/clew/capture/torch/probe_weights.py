"""Notes weights whose units are all alike and stay so: they learn one and the same thing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

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
_MOST_NAMES: Final = 8
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
        self._told = 0

    def install(self, patches: Patches) -> None:
        """Begin to compare."""
        patches.listen(self.events.on_stepped, self._see_stepped)
        self.recorder.note("probe", {"probe": "weights"})

    def look_again(self) -> None:
        """Compare the rows in the next steps of every optimizer: there may be new layers."""
        self._steps.clear()

    def is_settled(self) -> bool:
        """Return whether no weight of the last steps has rows that are alike."""
        return not self._alike and all(steps >= _SETTLED for steps in self._steps.values())

    def _see_stepped(self, optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if steps > _FIRST_STEPS or self._told >= 2 or (steps > _SETTLED and not self._alike):
            return
        matrices = [p for group in optimizer.param_groups for p in group["params"] if _is_matrix(p)]
        with torch.no_grad():
            alike = [p for p in matrices if _is_symmetric(p)]
            idle = [p for p in matrices if _is_idle(p)]
        # One matrix of zeros may wait for another one to move; several wait for each other.
        found = alike + (idle if len(idle) > 1 else [])
        current = {id(p): self._alike.get(id(p), 0) + 1 for p in found}
        for parameter in matrices:
            self._alike.pop(id(parameter), None)
        self._alike.update(current)
        if any(count == _SIGHTINGS + (not alike) for count in current.values()):
            self._tell(optimizer, found, is_idle=not alike, matrices=len(matrices))

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


def _has_like_rows(tensor: torch.Tensor) -> bool:
    rows = tensor.reshape(tensor.shape[0], -1)
    first, second = rows[0], rows[1]
    size = float(torch.linalg.vector_norm(first, torch.inf))
    if not size > 0 or float(torch.dist(first, second, torch.inf)) > _ALIKE * size:
        return False
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
    """Return whether a tensor holds nothing but zeros; the first row alone tells of nearly all that hold more."""
    return not bool(tensor[0].any()) and not bool(tensor.any())
