"""Loops that write to their weights themselves: when such a step has ended, and what it did to the weights.

Where no optimizer holds a parameter of a known model, every backward pass is one of such a loop, and the next call of a
model in training ends its step. A metric, an evaluation, or an optimizer beside it take a proof: a parameter that no
optimizer holds was written since the pass, beside optimizers one that the pass gave a gradient. Parameters that an
optimizer does hold prove nothing: some methods move them and back between two passes of one step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from clew.capture.assemble import SITE_SHIFT
from clew.capture.torch.leaves import local_part
from clew.capture.torch.recorder import KIND_UPDATE
from clew.capture.torch.shadow import Moved, Shadows, are_alike, list_versions_slowly
from clew.stats.readable import LAZY, undisturbed

if TYPE_CHECKING:
    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.outsiders import Outsider
    from clew.capture.torch.recorder import Recorder

_PATIENCE: Final = 64
"""Steps after one by hand in which another is expected; longer where they have come further apart."""
_MOST_COMPARED: Final = 4096
"""Elements of the smallest parameters that are kept to be compared: a write through ``.data`` counts no version."""


class _Noted(NamedTuple):
    """A parameter as it was at the end of a backward pass."""

    outsider: Outsider
    version: int
    copy: torch.Tensor | None

    def is_written(self) -> bool:
        """Return whether it has other values now, or another tensor stands in its place."""
        tensor = self.outsider.entry.ref()
        if tensor is None or not self.outsider.stands(tensor):
            return True
        if list_versions_slowly([tensor])[0] != self.version:
            return True
        with undisturbed():
            return self.copy is not None and not _are_same(tensor.detach(), self.copy)


def _are_same(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether the values are the same; a NaN is the same as a NaN."""
    return are_alike(now, before) and bool(((now == before) | (now.isnan() & before.isnan())).all())


class ByHand:
    """Follows the parameters of such loops from a backward pass to the end of its step."""

    def __init__(self, recorder: Recorder, optimizers: OptimizerLens) -> None:
        self.recorder = recorder
        self.optimizers = optimizers
        self._noted: list[_Noted] = []
        self._noted_at = -1
        self._written_at = -1
        self._patience = _PATIENCE
        self._shadows: Shadows | None = None

    @property
    def is_expected(self) -> bool:
        """Whether a step by hand beside optimizers may come soon."""
        if self._written_at < 0 or not self.optimizers.outsiders.trainable:
            return False
        return self.recorder.serial - self._written_at <= self._patience

    def end_pass(self) -> bool:
        """A backward pass has ended: return whether its step will end without an optimizer, and measure it then."""
        recorder = self.recorder
        if self._noted_at != recorder.serial:
            self._shadows = None
        is_alone = not self.optimizers.owns_parameters()
        if recorder.updating and not is_alone:  # a closure
            return False
        with torch._C.DisableTorchFunction():
            self._note(is_alone=is_alone)
            if not (is_alone or (self._noted and self.is_expected)):
                return False
            if recorder.due:
                self.optimizers.outsiders.measure_by_hand(is_alone=is_alone)
                if recorder.wants["update"] and self._shadows is None:
                    self._keep_values()
        return True

    def _note(self, *, is_alone: bool) -> None:
        """Keep what will tell of a write to a parameter, beside optimizers to one that this pass gave a gradient."""
        self._noted, self._noted_at, left = [], self.recorder.serial, _MOST_COMPARED
        found = [
            (each, tensor) for each, tensor in self.optimizers.outsiders.list_trainable() if tensor.is_leaf
        ]
        if not is_alone:
            found = [(each, tensor) for each, tensor in found if each.given.take(tensor.grad)]
        for each, tensor in sorted(found, key=lambda pair: pair[1].numel()):
            left -= tensor.numel()
            with undisturbed():
                copy = tensor.detach().clone() if left >= 0 and tensor.layout == torch.strided else None
            self._noted.append(_Noted(each, list_versions_slowly([tensor])[0], copy))

    def _keep_values(self) -> None:
        """Copy the weights as they are before they are written; those written inside the pass already are left out."""
        noted = {each.outsider.entry.site for each in self._noted}
        pairs = [
            (entry, tensor)
            for entry, tensor in self.optimizers.outsiders.list_pairs()
            if entry.wanted
            and entry.site in noted
            and not isinstance(tensor, LAZY)
            and not tensor._post_accumulate_grad_hooks
        ]
        shadows = Shadows(pairs, [entry.site << SITE_SHIFT | KIND_UPDATE for entry, _ in pairs])
        shadows.take()
        self._shadows = shadows

    # ---------------------------------------------------------------- the end of a step

    def has_ended(self, *, by_proof: bool) -> bool:
        """Return whether a step with a backward pass is over although no optimizer has stepped.

        ``by_proof``: nothing but a write to the parameters tells; without, in a loop that has no optimizer, the next
        call of the model does.
        """
        is_alone = not self.optimizers.owns_parameters()
        if self._noted_at != self.recorder.serial:
            if not is_alone:
                self._look_closer()
            return is_alone
        return (is_alone and not (by_proof and self._noted)) or self._is_written()

    def _is_written(self) -> bool:
        with torch._C.DisableTorchFunction():
            return self._noted_at == self.recorder.serial and any(each.is_written() for each in self._noted)

    def _look_closer(self) -> None:
        """Have the next pass tell of its gradients: this one went by the shortest way."""
        outsiders = self.optimizers.outsiders
        outsiders.find()
        if outsiders.trainable:
            self.recorder.quiet_with = -1

    def end_step(self) -> None:
        """A step is over: measure by how much it has moved the weights, and the buffers beside them."""
        recorder = self.recorder
        shadows, self._shadows = self._shadows, None
        try:
            if is_written := self._is_written():
                if self._written_at >= 0:
                    self._patience = max(_PATIENCE, 4 * (recorder.serial - self._written_at))
                self._written_at = recorder.serial
            with torch._C.DisableTorchFunction():
                self._let_gradients_rest()
                if is_written and shadows is not None:
                    recorder.measure_updates(*self._list_moved(shadows))
                if recorder.due and recorder.wants["buffer"]:
                    with recorder.latest.measuring("buffers", recorder):
                        self.optimizers.measure_buffers()
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, "after an update by hand", step=recorder.step)

    def _let_gradients_rest(self) -> None:
        """The gradients of this step are none of the next one, also where they were not measured."""
        for each, _, _ in self._noted if self._noted_at == self.recorder.serial else ():
            tensor = each.entry.ref()
            if tensor is not None:
                each.measured.take(tensor.grad)

    def _list_moved(self, shadows: Shadows) -> Moved:
        """Return what is to be measured; the script may have put other tensors in the places of the old ones."""
        now = {entry.site: local_part(tensor) for entry, tensor in self.optimizers.outsiders.list_pairs()}
        moved = shadows.list_moved()
        there = [
            (held, copy, key)
            for copy, key in zip(moved.copies, moved.keys, strict=True)
            if (held := now.get(key >> SITE_SHIFT)) is not None and are_alike(held, copy)
        ]
        return Moved([each[0] for each in there], [each[1] for each in there], [each[2] for each in there])
