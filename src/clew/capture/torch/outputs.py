"""Outputs of modules as rows, and the gradients that will come back to them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

from clew.capture.assemble import SITE_SHIFT
from clew.capture.torch.recorder import KIND_GRAD_OUTPUT, KIND_OUTPUT
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from clew.capture.torch.gradients import GradientHooks
    from clew.capture.torch.recorder import Recorder
    from clew.stats._kernel import Leaf

_UNWANTED: Final = -1


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


class SlowLeaf:
    """The twin of the kernel's ``Leaf``, for where there is none."""

    def __init__(self, recorder: Recorder, hooks: GradientHooks) -> None:
        self.recorder = recorder
        self.hooks = hooks
        self._wants_output = recorder.wants["output"]
        self._wants_gradient = recorder.wants["grad_output"]
        self._last: Callable[[], torch.Tensor | None] = _nothing
        self._version = -1
        self._serial = -1
        self._row = -1
        self._targets: list[int] | None = None

    def see(self, site: int, tensor: torch.Tensor, tag: int) -> None:
        """Put an output down as a row and have its gradient put down when it comes."""
        recorder = self.recorder
        has_gradient = tensor.requires_grad
        version = tensor._version if has_gradient or not tensor.is_inference() else 0
        if self._last() is tensor and self._version == version and self._serial == recorder.serial:
            self._see_again(site, tensor, tag)
            return
        self._row, self._targets = _UNWANTED, None
        if self._wants_output and not recorder.in_backward:
            self._row = recorder.measure(tensor, site, tag | KIND_OUTPUT)
        if has_gradient and self._wants_gradient:
            self._targets = self.hooks.watch(tensor, site << SITE_SHIFT | tag | KIND_GRAD_OUTPUT)
        self._last = weakref.ref(tensor)
        self._version = version
        self._serial = recorder.serial

    @staticmethod
    def observe(*_: object) -> bool:
        """Leave the output of a module to the general way."""
        return False

    def _see_again(self, site: int, tensor: torch.Tensor, tag: int) -> None:
        """Give a module the numbers of the one inside it whose output it returned as it was."""
        recorder = self.recorder
        if self._wants_output and not recorder.in_backward:
            if self._row >= 0:
                recorder.repeat(self._row, tensor, site, tag=tag | KIND_OUTPUT)
            else:
                self._row = recorder.measure(tensor, site, tag | KIND_OUTPUT)
        if self._wants_gradient and tensor.requires_grad:
            key = site << SITE_SHIFT | tag | KIND_GRAD_OUTPUT
            if self._targets is None:
                self._targets = self.hooks.watch(tensor, key)
            else:
                self._targets.append(key)

    def forget(self) -> None:
        """Take the next tensor for a new one."""
        self._last, self._row, self._targets = _nothing, _UNWANTED, None


def _nothing() -> None:
    return None
