"""Notes which way steps of one's own go: along the gradient or against it, or nowhere.

Torch's own optimizers say so themselves (``maximize``). One written by the user, or an update by hand, says nothing:
there the way that a few weights went is compared with the gradient they had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from clew.capture.torch.leaves import list_leaves

if TYPE_CHECKING:
    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

_STEPS: Final = 3
"""Steps that have to go the same way."""

_IDLE_PASSES: Final = 12
"""Backward passes, each with gradients of its own, after which weights that never moved are told of."""

_MOST_PASSES: Final = 60
_MOST_PARAMETERS: Final = 3
_MOST_ELEMENTS: Final = 1 << 16
_ALONG: Final = 0.1
"""Cosine between step and gradient from which on it counts: weight decay and momentum turn a step a little."""


class _Kept(NamedTuple):
    """A weight before a step, and the gradient it has."""

    parameter: torch.Tensor
    weight: torch.Tensor
    gradient: torch.Tensor


class _Ways:
    """How the steps of one optimizer, or of a loop without one, went so far."""

    def __init__(self) -> None:
        self.kept: list[_Kept] = []
        self.ups = 0
        self.downs = 0

    def keep(self, parameters: list[torch.Tensor]) -> None:
        """Keep some weights and their gradients before a step."""
        fitting = [p for p in parameters if _is_plain(p)][: 2 * _MOST_PARAMETERS]
        self.kept = [
            _Kept(p, p.detach().clone(), p.grad.detach().clone())
            for p in fitting[-_MOST_PARAMETERS:]
            if p.grad is not None
        ]

    def compare(self) -> bool:
        """Compare the step with the gradients; return whether anything has moved."""
        kept, self.kept = self.kept, []
        moved = [way for way in map(_find_way, kept) if way is not None]
        if not moved:
            return False
        self.ups += all(way > _ALONG for way in moved)
        self.downs += all(way < -_ALONG for way in moved)
        return True

    @property
    def is_up(self) -> bool | None:
        """Whether the steps so far went up; None while that is not known."""
        if self.ups >= _STEPS and not self.downs:
            return True
        return False if self.downs >= _STEPS and not self.ups else None


class AscentProbe:
    """Follows the first steps of optimizers that are not torch's own, and of loops that have none."""

    def __init__(self, recorder: Recorder, events: LoopEvents, optimizers: OptimizerLens) -> None:
        self.recorder = recorder
        self.events = events
        self.optimizers = optimizers
        self._patches: Patches | None = None
        self._own: dict[int, _Ways] = {}
        self._hand = _Ways()
        self._passes = 0
        self._idle = 0
        self._is_told = False
        self._is_batch = False

    def install(self, patches: Patches) -> None:
        """Begin to follow steps."""
        self._patches = patches
        patches.listen(self.events.on_stepping, self._see_stepping)
        patches.listen(self.events.on_stepped, self._see_stepped)
        patches.listen(self.recorder.on_pass, self._see_pass)
        patches.listen(self.recorder.on_root, self._see_root)
        self.recorder.note("probe", {"probe": "ascent"})

    # ---------------------------------------------------------------- optimizers of one's own

    def _see_stepping(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if _is_torchs(optimizer) or has_closure:
            self._rest_if_done()
            return
        ways = self._own.setdefault(id(optimizer), _Ways())
        if ways.ups + ways.downs < _STEPS:
            with torch.no_grad():
                ways.keep([p for group in optimizer.param_groups for p in group["params"]])

    def _see_stepped(self, optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        ways = self._own.get(id(optimizer))
        if ways is None or not ways.kept:
            return
        with torch.no_grad():
            ways.compare()
        if ways.ups + ways.downs == _STEPS:
            others = [each for each in self._list_living() if each is not optimizer]
            self._tell(ways, {**self.events.know(optimizer).tell(), "others": len(others)})
            self._rest_if_done()

    def _rest_if_done(self) -> None:
        """Hear nothing any more once the ways of all optimizers are known; loops without one are heard by the pass."""
        waiting = [each for each in self._list_living() if not _is_torchs(each)]
        ways = [self._own.get(id(optimizer)) for optimizer in waiting]
        if self._patches is not None and all(each and each.ups + each.downs >= _STEPS for each in ways):
            self._patches.hush((self,), (self.events.on_stepping, self.events.on_stepped))

    def _list_living(self) -> list[torch.optim.Optimizer]:
        living = [entry.ref() for entry in self.optimizers.entries.values()]
        return [optimizer for optimizer in living if optimizer is not None]

    # ---------------------------------------------------------------- by hand

    def _see_pass(self, begins: bool) -> None:
        self._passes += begins
        if self._patches is not None and (
            self.optimizers.seen or self._passes > _MOST_PASSES or self._is_told
        ):
            self._patches.hush((self,), (self.recorder.on_pass, self.recorder.on_root))
        elif begins:
            self._see_moved()
        else:
            with torch.no_grad():
                self._hand.keep(self._list_parameters())

    def _see_root(self, _module: torch.nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
        """Take in whether a model is given several samples; gradients of single ones are measured, mostly."""
        if not self.optimizers.seen:
            self._is_batch = any(leaf.dim() and leaf.shape[0] > 1 for leaf in list_leaves((args, kwargs)))

    def _see_moved(self) -> None:
        """A new pass begins: have the weights moved since the last one, and which way?"""
        kept = self._hand.kept
        if not kept:
            return
        is_cleared = all(each.parameter.grad is None or not each.parameter.grad.any() for each in kept)
        with torch.no_grad():
            has_moved = self._hand.compare()
        self._idle = -_MOST_PASSES if has_moved else self._idle + (is_cleared and self._is_batch)
        if self._hand.is_up is not None:
            self._tell(self._hand, {"optimizer": "", "type": "", "made": "", "others": 0})
        elif self._idle >= _IDLE_PASSES:
            self._is_told = True
            self.recorder.note("never-moved", {"passes": self._idle, "parameters": len(kept)})

    def _list_parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the models; none where some are frozen, as those of a model under attack are."""
        trees = [tree.ref() for tree in self.recorder.registry.living_trees()]
        called = [module for module in trees if module is not None and module.training]
        found: list[torch.Tensor] = [parameter for module in called for parameter in module.parameters()]
        return found if all(p.requires_grad for p in found) else []

    def _tell(self, ways: _Ways, known: dict[str, object]) -> None:
        if ways.is_up is None:
            return
        self._is_told = self._is_told or ways is self._hand
        self.recorder.note("step-direction", {**known, "is_up": ways.is_up, "steps": _STEPS})


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _is_plain(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    return (
        gradient is not None
        and type(gradient) is torch.Tensor
        and gradient.layout == parameter.layout == torch.strided
        and parameter.is_floating_point()
        and 0 < parameter.numel() <= _MOST_ELEMENTS
    )


def _find_way(kept: _Kept) -> float | None:
    """Return the cosine between a step and the gradient, or None where either is zero."""
    step = (kept.parameter.detach() - kept.weight).double().reshape(-1)
    gradient = kept.gradient.double().reshape(-1)
    size = float(torch.linalg.vector_norm(step) * torch.linalg.vector_norm(gradient))
    return float(torch.dot(step, gradient)) / size if 0 < size < float("inf") else None
