"""Loops that write to their weights themselves: when such a step has ended, and what it did to the weights.

Where no optimizer holds a parameter of a known model, every backward pass is one of such a loop. Beside optimizers it
takes a proof: a parameter that none of them holds had a gradient at the end of the pass, and was written since, with no
optimizer stepping. Parameters that an optimizer does hold prove nothing: some methods move them and back between two
passes of one step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from clew.capture.assemble import SITE_SHIFT
from clew.capture.torch.recorder import KIND_UPDATE
from clew.capture.torch.shadow import Shadows, list_versions_slowly
from clew.stats.readable import LAZY, undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.recorder import Recorder

_RECENT: Final = 16
"""Steps after one by hand in which the next may be one as well, in turn with those of optimizers."""
_MOST_COMPARED: Final = 4096
"""Elements of the smallest parameters that are kept to be compared: a write through ``.data`` counts no version."""


class _Graded(NamedTuple):
    """A parameter with a gradient, as it was at the end of a backward pass."""

    ref: Callable[[], torch.Tensor | None]
    version: int
    copy: torch.Tensor | None

    def is_written(self) -> bool:
        tensor = self.ref()
        if tensor is None:
            return False
        if list_versions_slowly([tensor])[0] != self.version:
            return True
        with undisturbed():
            return self.copy is not None and not _are_same(tensor.detach(), self.copy)


def _are_same(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether the values are the same; a NaN is the same as a NaN."""
    if now.shape != before.shape or now.dtype != before.dtype or now.device != before.device:
        return False
    return bool(((now == before) | (now.isnan() & before.isnan())).all())


class ByHand:
    """Follows the parameters of such loops from a backward pass to the end of its step."""

    def __init__(self, recorder: Recorder, optimizers: OptimizerLens) -> None:
        self.recorder = recorder
        self.optimizers = optimizers
        self._graded: list[_Graded] = []
        self._graded_at = -1
        self._written_at = -1 - _RECENT
        self._shadows: Shadows | None = None
        self._shadows_at = -1

    def end_pass(self) -> bool:
        """A backward pass has ended: return whether its step will end without an optimizer, and measure it then."""
        recorder, outsiders = self.recorder, self.optimizers.outsiders
        if self._shadows_at != recorder.serial:
            self._shadows = None
        is_alone = not self.optimizers.owns_parameters()
        if not is_alone:
            if recorder.updating:  # a closure
                return False
            with torch._C.DisableTorchFunction():
                self._note_graded()
            if not self._graded or recorder.serial - self._written_at > _RECENT:
                return False
        if recorder.due:
            with torch._C.DisableTorchFunction():
                outsiders.measure_by_hand(is_alone=is_alone)
                if recorder.wants["update"] and self._shadows_at != recorder.serial:
                    self._keep_values(is_alone=is_alone)
        return True

    def _note_graded(self) -> None:
        """Keep what will tell of a write to the parameters that have gradients and no optimizer."""
        outsiders = self.optimizers.outsiders
        self._graded_at = self.recorder.serial
        outsiders.find()
        graded = [
            (each.entry.ref, tensor)
            for each in outsiders.trainable
            if (tensor := each.entry.ref()) is not None and tensor.is_leaf and tensor.grad is not None
        ]
        graded.sort(key=lambda pair: pair[1].numel())
        self._graded, left = [], _MOST_COMPARED
        for reference, tensor in graded:
            left -= tensor.numel()
            with undisturbed():
                copy = tensor.detach().clone() if left >= 0 and tensor.layout == torch.strided else None
            self._graded.append(_Graded(reference, list_versions_slowly([tensor])[0], copy))

    def _keep_values(self, *, is_alone: bool) -> None:
        """Copy the weights as they are before they are written."""
        pairs = [
            (entry, tensor)
            for entry, tensor in self.optimizers.outsiders.list_pairs()
            if entry.wanted and tensor.requires_grad and not isinstance(tensor, LAZY)
        ]
        if not is_alone:  # a large model may stand by that nobody trains
            pairs = [(entry, tensor) for entry, tensor in pairs if tensor.is_leaf and tensor.grad is not None]
        keys = [entry.site << SITE_SHIFT | KIND_UPDATE for entry, _ in pairs]
        self._shadows, self._shadows_at = Shadows(pairs, keys), self.recorder.serial
        self._shadows.take()

    def has_ended(self) -> bool:
        """Return whether a step with a backward pass is over although no optimizer has stepped."""
        if not self.optimizers.owns_parameters():
            return True
        if self._graded_at != self.recorder.serial:
            self._look_closer()
            return False
        with torch._C.DisableTorchFunction():
            return any(each.is_written() for each in self._graded)

    def _look_closer(self) -> None:
        """Have the next pass tell of its gradients: this one went by the shortest way."""
        outsiders = self.optimizers.outsiders
        outsiders.find()
        if outsiders.trainable:
            self.recorder.quiet_with = -1

    def end_step(self) -> None:
        """The weights have been written: measure by how much, and the buffers beside them."""
        recorder = self.recorder
        self._written_at = recorder.serial
        shadows, self._shadows = self._shadows, None
        if not recorder.due:
            return
        try:
            with torch._C.DisableTorchFunction():
                if shadows is not None and self._shadows_at == recorder.serial:
                    recorder.measure_updates(*shadows.list_moved())
                if recorder.wants["buffer"]:
                    with recorder.latest.measuring("buffers", recorder):
                        self.optimizers.measure_buffers()
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, "after an update by hand", step=recorder.step)
