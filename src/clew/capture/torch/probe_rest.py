"""Lets the probes of the loop rest while every step is like the ones before, and wakes them when one is not."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

_LOOP_STEPS: Final = 300
"""Steps after which the structure of a loop has been seen."""

_CALM_STEPS: Final = 3
"""Steps in a row without anything new after which the probes rest (again)."""


class Rest:
    """Tells a step that is like the others from one that is not, at the price of one question a step.

    Like the others is a call of a model that has been trained before, in training mode and with gradients, on data of
    a set that was seen before. Anything else (an evaluation, a model that stays in eval mode, a new model or
    optimizer) wakes the probes until some steps are calm again. Those of the structure alone are not needed again.
    While the others rest, they are told of the root calls in steps that are probed.
    """

    def __init__(
        self,
        recorder: Recorder,
        events: LoopEvents,
        optimizers: OptimizerLens,
        *,
        structure: tuple[object, ...],
        others: tuple[object, ...],
    ) -> None:
        self.recorder = recorder
        self.events = events
        self.optimizers = optimizers
        self._structure = structure
        self._others = others
        self._patches: Patches | None = None
        self._resting: list[tuple[list[Any], Any]] = []
        self._roots: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._data: set[int] = set()
        self._iterator: weakref.ref[Any] | None = None
        self._known = (-1, -1)
        self._calm = 0
        self._is_past_structure = False

    def install(self, patches: Patches) -> None:
        """Begin to follow the loop."""
        self._patches = patches
        self._resting, self._calm, self._is_past_structure = [], 0, False
        self.recorder.sentinel = self._see_root
        patches.on_undo(self._leave)
        patches.listen(self.recorder.on_batch, self._see_batch)
        patches.listen(self.events.on_stepped, self._see_stepped)

    def _leave(self) -> None:
        self.recorder.sentinel = None

    def _see_root(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        try:
            is_like_others = self._is_like_others(module)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self.recorder.sentinel = None
            self._wake()
            self.recorder.guard.fault(error, "rest of the probes", step=self.recorder.step)
            return
        if not is_like_others:
            self._calm = 0
            if self._resting:
                # Those that wake now are told of this call as all others are; first of the batch they have missed.
                woken = self._wake()
                batch = self.recorder.flight.last_batch
                iterator = self._iterator() if self._iterator is not None else None
                if iterator is not None and batch is not None:
                    self._tell(woken, self.recorder.on_batch, iterator, batch)
        elif self._resting and self.recorder.probing:
            self._tell(self._resting, self.recorder.on_root, module, args, kwargs, output)

    def _is_like_others(self, module: torch.nn.Module) -> bool:
        known = (len(self.optimizers.entries), len(self.recorder.registry.tensors))
        if known != self._known:
            self._known = known
            return False
        if not module.training or not torch.is_grad_enabled():
            return False
        root = self._roots.get(id(module))
        if root is not None and root() is module:
            return True
        if next(module.parameters(), None) is None:
            return True  # a criterion: many loops make a new one in every step
        self._roots[id(module)] = weakref.ref(module)
        return False

    def _see_batch(self, iterator: Any, batch: Any) -> None:
        key = id(getattr(iterator, "_dataset", None))
        self._iterator = weakref.ref(iterator)
        if key not in self._data:
            self._data.add(key)
            self._calm = 0
            if self._resting:
                self._tell(self._wake(), self.recorder.on_batch, iterator, batch)

    def _see_stepped(self, _optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        self._calm += 1
        if self.recorder.step < _LOOP_STEPS or self._patches is None:
            return
        if not self._is_past_structure:
            self._is_past_structure = True
            self._patches.hush(self._structure)
        if self._calm >= _CALM_STEPS:
            lists = (
                self.recorder.on_root, self.recorder.on_pass, self.recorder.on_grad, self.recorder.on_batch,
                self.events.on_stepping, self.events.on_stepped, self.events.on_cleared,
            )  # fmt: skip
            self._resting = self._patches.hush(self._others, lists)
            self._resting += self._patches.hush((self,), (self.events.on_stepped,))

    def _wake(self) -> list[tuple[list[Any], Any]]:
        woken, self._resting = self._resting, []
        for listeners, listener in woken:
            listeners.append(listener)
        return woken

    def _tell(self, resting: list[tuple[list[Any], Any]], listeners: list[Any], *what: Any) -> None:
        told = [listener for each, listener in resting if each is listeners]
        everybody = told.copy()
        self.recorder.ask(told, *what)
        for listener in everybody:
            if listener not in told:  # it has failed, and is not asked again
                resting.remove((listeners, listener))
                if listener in listeners:
                    listeners.remove(listener)
