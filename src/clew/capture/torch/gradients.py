"""The gradients at module outputs: hooks on the nodes that made them, kept and used again step after step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from clew.capture.assemble import SITE_SHIFT
from clew.capture.clock import CLEW
from clew.stats.readable import undisturbed
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from clew.capture.torch.recorder import Recorder
    from clew.stats._kernel import Hook

_HOOK_SECONDS: Final = 2e-6
"""What torch spends on calling one gradient hook, where our clock cannot see it."""

_TAG_MASK: Final = (1 << SITE_SHIFT) - 1


class GradientHook:
    """Measures the gradient at one module output when backward reaches the node that made it."""

    __slots__ = ("index", "recorder", "targets")

    def __init__(self, recorder: Recorder, index: int, targets: list[int]) -> None:
        self.recorder = recorder
        self.index = index
        self.targets = targets

    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Measure the gradient that arrives, for every module whose output this is."""
        recorder = self.recorder
        gradient = gradients[self.index]
        if gradient is None or recorder.asleep or not recorder.due:
            return
        before = recorder.clock.switch(CLEW)
        try:
            row = -1
            for key in self.targets:
                site, tag = key >> SITE_SHIFT, key & _TAG_MASK
                if row < 0:
                    row = recorder.measure(gradient, site, tag)
                else:
                    recorder.repeat(row, gradient, site, tag=tag)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.fault_at_gradient(error, self.targets[0])
        finally:
            recorder.clock.charge(_HOOK_SECONDS)
            recorder.clock.switch(before)


class _Anchor(NamedTuple):
    """A tensor of ours that owns a hook: any node takes the hooks of a tensor in one call, with nothing new made."""

    tensor: torch.Tensor
    hooks: dict[int, Hook]
    targets: list[int]


class GradientHooks:
    """Puts hooks on nodes of the user's graph; ``forget`` leaves none that does anything."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.anchors: dict[int, _Anchor] = {}
        """The hooks that are there, by their first key."""

    def watch(self, tensor: torch.Tensor, key: int) -> list[int] | None:
        """Have the gradient of a tensor measured under a key; return the list that takes further keys."""
        node = tensor.grad_fn
        if node is None:
            return None
        if self.recorder.tray is None or tensor.output_nr:
            targets = [key]
            hook = GradientHook(self.recorder, tensor.output_nr, targets)
            self.recorder.handles.append(node.register_prehook(hook))
            return targets
        anchor = self.anchors.get(key) or self._make_anchor(key)
        del anchor.targets[1:]
        node._register_hook_dict(anchor.tensor)
        return anchor.targets

    def forget(self) -> None:
        """Empty the hooks, those in graphs that still live included."""
        for anchor in self.anchors.values():
            anchor.hooks.clear()
        self.anchors.clear()

    def _make_anchor(self, key: int) -> _Anchor:
        targets = [key]
        assert KERNEL is not None  # there is no tray without it
        hooks = {0: KERNEL.Hook(self.recorder.tray, targets, _HOOK_SECONDS)}
        with undisturbed(), torch.inference_mode(mode=False):
            tensor = torch.empty(0, device="cpu")
            tensor._backward_hooks = hooks
        anchor = self.anchors[key] = _Anchor(tensor, hooks, targets)
        return anchor
