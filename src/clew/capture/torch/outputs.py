"""Outputs of modules as rows, and the gradients that will come back to them."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from clew.capture.assemble import SITE_SHIFT
from clew.capture.torch.recorder import KIND_GRAD_OUTPUT, KIND_OUTPUT
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    import torch

    from clew.capture.torch.gradients import GradientHooks
    from clew.capture.torch.recorder import Recorder
    from clew.stats._kernel import Leaf

_UNWANTED: Final = -1
_RECENT: Final = 8
"""So many outputs are known again: a shortcut around a block of usual size returns what came before it."""
_UNKNOWN: Final = -1
"""The version of a tensor of inference mode: nothing tells whether it was written to."""


def make_leaf(recorder: Recorder, hooks: GradientHooks) -> Leaf | SlowLeaf:
    """Return what sees the outputs of a recording, the compiled one where it is there."""
    if KERNEL is None or recorder.tray is None:
        return SlowLeaf(recorder, hooks)
    leaf: Leaf = KERNEL.Leaf(
        recorder.tray,
        hooks.anchors,
        hooks.watch,
        KIND_OUTPUT if recorder.wants["output"] else _UNWANTED,
        KIND_GRAD_OUTPUT if recorder.wants["grad_output"] else _UNWANTED,
    )
    return leaf


@dataclass(slots=True)
class _Seen:
    """An output that was seen, the keys its gradient goes to, and its row."""

    reference: weakref.ref[torch.Tensor]
    version: int
    serial: int
    row: int = _UNWANTED
    targets: list[int] | None = None


class SlowLeaf:
    """The twin of the kernel's ``Leaf``, for where there is none."""

    def __init__(self, recorder: Recorder, hooks: GradientHooks) -> None:
        self.recorder = recorder
        self.hooks = hooks
        self._wants_output = recorder.wants["output"]
        self._wants_gradient = recorder.wants["grad_output"]
        self._recent: deque[_Seen] = deque(maxlen=_RECENT)

    def see(self, site: int, tensor: torch.Tensor, tag: int) -> None:
        """Put an output down as a row and have its gradient put down when it comes."""
        recorder = self.recorder
        version = _UNKNOWN if tensor.is_inference() else tensor._version
        seen = self._find_seen(tensor, version)
        if seen is not None:
            self._see_again(seen, site, tensor, tag)
            return
        seen = _Seen(weakref.ref(tensor), version, recorder.serial)
        if self._wants_output and not recorder.in_backward:
            seen.row = recorder.measure(tensor, site, tag | KIND_OUTPUT)
        if tensor.requires_grad and self._wants_gradient:
            seen.targets = self.hooks.watch(tensor, site << SITE_SHIFT | tag | KIND_GRAD_OUTPUT)
        self._recent.append(seen)

    @staticmethod
    def observe(*_: object) -> bool:
        """Leave the output of a module to the general way."""
        return False

    def _find_seen(self, tensor: torch.Tensor, version: int) -> _Seen | None:
        """Return the tensor as seen in this step and not written to since."""
        if version == _UNKNOWN:
            return None
        known = (self.recorder.serial, version)
        return next(
            (
                seen
                for seen in self._recent
                if (seen.serial, seen.version) == known and seen.reference() is tensor
            ),
            None,
        )

    def _see_again(self, seen: _Seen, site: int, tensor: torch.Tensor, tag: int) -> None:
        """Give a module the numbers of the one inside or before it whose output it returned as it was."""
        recorder = self.recorder
        if self._wants_output and not recorder.in_backward:
            if seen.row >= 0:
                recorder.repeat(seen.row, tensor, site, tag=tag | KIND_OUTPUT)
            else:
                seen.row = recorder.measure(tensor, site, tag | KIND_OUTPUT)
        if self._wants_gradient and tensor.requires_grad:
            key = site << SITE_SHIFT | tag | KIND_GRAD_OUTPUT
            if seen.targets is None:
                seen.targets = self.hooks.watch(tensor, key)
            else:
                seen.targets.append(key)

    def forget(self) -> None:
        """Take any tensor for a new one."""
        self._recent.clear()
