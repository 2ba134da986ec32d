"""Lets the probes of the loop rest while every step is like the ones before, and wakes them when one is not."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from clew.capture.torch.probe_signature import FORWARD, QUIET, Signature

if TYPE_CHECKING:
    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

    Listening = list[tuple[list[Any], Any]]

_LOOP_STEPS: Final = 100
"""Steps after which the structure of a loop has been seen."""

_FIRST_STEPS: Final = 2
"""Steps at the start, and after a change, at which all probes look; after these, those that are not settled."""

_GLANCES: Final = (25, 50, 75)
_GLANCE_STEPS: Final = 4
"""Steps at which those that have settled look again without a reason, and for how many steps."""

_GLANCING: Final = frozenset(first + more for first in _GLANCES for more in range(_GLANCE_STEPS))

_CALM_STEPS: Final = 3
"""Steps in a row without anything new after which the probes rest (again)."""

_LOOK_STEPS: Final = 24
"""Steps for which all probes look again when the loop has changed; so many of these are recorded and probed:"""
_PROBED_STEPS: Final = 12


@runtime_checkable
class LooksAgain(Protocol):
    """A probe that looks closer at the first steps, and again at those after a change."""

    def look_again(self) -> None:
        """Begin as if the run had just begun; what is known of it stays known."""


@runtime_checkable
class Wakes(Protocol):
    """A probe that counts calls from step to step, and has not heard of every step while it rested."""

    def wake(self) -> None:
        """Begin to count with the present step."""


@runtime_checkable
class Settles(Protocol):
    """A probe that knows when steps like the ones before have nothing new for it."""

    def is_settled(self) -> bool:
        """Return whether it has seen enough, and follows nothing that may yet become a finding."""


class _Root:
    """A model that was called, and the ways in which: with gradients, in training, on something to learn from."""

    __slots__ = ("modes", "ref")

    def __init__(self, module: torch.nn.Module, calm: set[int]) -> None:
        key = id(module)
        self.ref = weakref.ref(module, lambda _: calm.discard(key))
        self.modes = 0


class Rest:
    """Tells a step that is like the others from one that is not, at the price of a few look-ups a step.

    There are two ways to be different. What the signature of the loop has never seen (another order of events, other
    operations in the loss, gradients that fail to come, new layers) makes all probes look again as at the start. A
    call that is no call of a model in training on known data (an evaluation, a new model) wakes those that follow
    models until some steps are calm again. While they rest, they are told of the root calls in steps that are probed.
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
        self.signature = Signature(recorder)
        self._at_change = [self._look_again]
        self._structure = structure
        self._others = others
        self._patches: Patches | None = None
        self._resting: Listening = []
        self._resting_structure: Listening = []
        self._settled: Listening = []
        self._settled_structure: Listening = []
        self._settling = [probe for probe in (*structure, *others) if isinstance(probe, Settles)]
        self._unsettled = self._settling.copy()
        # Asked here: such questions take long.
        self._looking = [probe for probe in (*structure, *others) if isinstance(probe, LooksAgain)]
        self._waking = [probe for probe in (*structure, *others) if isinstance(probe, Wakes)]
        self._roots: dict[int, _Root] = {}
        self._data: set[int] = set()
        self._known = (-1, -1)
        self._calm = 0
        self._is_past_structure = False
        self._has_grown = False

    def install(self, patches: Patches) -> None:
        """Begin to follow the loop."""
        self._patches = patches
        self._resting, self._resting_structure, self._calm = [], [], 0
        self._settled, self._settled_structure = [], []
        self._unsettled = self._settling.copy()
        self._is_past_structure = False
        self.recorder.sentinel = self._see_root
        self.signature.begin()
        self.signature.on_reason, self.signature.on_turn = self._see_reason, self._switch
        self.recorder.turns = self.signature
        patches.on_undo(self._leave)
        patches.on_undo(register_module_module_registration_hook(self._see_part).remove)
        patches.on_undo(register_module_parameter_registration_hook(self._see_part).remove)
        for listeners, listener in self._list_signature():
            patches.listen(listeners, listener)
        self._switch()
        patches.listen(self.recorder.on_first_batch, self._see_first_batch)
        patches.listen(self.events.on_made, self._see_made)
        patches.listen(self.events.on_stepped, self._see_stepped)

    def _leave(self) -> None:
        self.recorder.sentinel = None
        self.recorder.signing.clear()
        self.recorder.turns = None

    # ---------------------------------------------------------------- a loop that changes

    def _see_part(self, module: torch.nn.Module, _name: str, part: Any) -> None:
        """A model that is trained gets another layer or parameter."""
        registry = self.recorder.registry
        if part is None or self.recorder.asleep or id(module) not in registry.modules:
            return
        if id(part) not in registry.modules and id(part) not in registry.tensors:
            self._has_grown = True
            self.recorder.calm.clear()
            self.signature.notice("model")

    def _see_made(self, _optimizer: torch.optim.Optimizer) -> None:
        self.recorder.calm.clear()
        self.signature.notice("optimizer")

    def _see_reason(self) -> None:
        self.events.tell(self._at_change)

    def _switch(self) -> None:
        """Have the signature told of what happens, or not."""
        is_on = self.signature.is_on
        self.recorder.signing[:] = [self.signature] if is_on else []
        self.recorder.calm.clear()
        for listeners, listener in self._list_signature():
            if not is_on and listener in listeners:
                listeners.remove(listener)
            elif is_on and listener not in listeners:
                listeners.append(listener)

    def _list_signature(self) -> Listening:
        """Return where the signature listens while it is taken."""
        recorder, signature = self.recorder, self.signature
        return [(recorder.on_each_loss, signature.see_loss), (recorder.on_batch, signature.see_batch)]

    def _look_again(self) -> None:
        """All probes look as at the start; an optimizer has just stepped, so that none sees half a step."""
        recorder = self.recorder
        reason = self.signature.reason
        self.signature.begin_look()
        recorder.schedule.look_again(recorder.step + 1, steps=_PROBED_STEPS)
        self._calm = 0
        self._wake()
        if self._has_grown:
            self._has_grown = False
            for tree in list(recorder.registry.living_trees()):
                recorder.registry.refresh(tree)
        for probe in self._looking:
            probe.look_again()
        recorder.note("changed-loop", {"reason": reason})

    # ---------------------------------------------------------------- a call unlike the others

    def _see_root(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        try:
            is_like_others = self._is_like_others(module, output)
            if self.signature.reason and not self.optimizers.seen:
                self._look_again()  # weights are written by hand here: no step of an optimizer comes
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self.recorder.sentinel = None
            self._wake()
            self.recorder.guard.fault(error, "rest of the probes", step=self.recorder.step)
            return
        if not is_like_others:
            self._calm = 0
            if self._resting or self._settled:
                # Those that wake now are told of this call as all others are; first of the batch they have missed.
                woken = self._wake(with_structure=False)
                flight = self.recorder.flight
                iterator = flight.last_iterator() if flight.last_iterator is not None else None
                if iterator is not None and flight.last_batch is not None:
                    self._tell(woken, self.recorder.on_batch, iterator, flight.last_batch)
        elif self._resting and self.recorder.probing:
            self._tell(self._resting, self.recorder.on_root, module, args, kwargs, output)
        elif (
            self._resting and self.optimizers.seen and not self.signature.is_on and id(module) in self._roots
        ):
            self.recorder.calm.add(id(module))  # until anything wakes the probes, or the signature is taken

    def _is_like_others(self, module: torch.nn.Module, output: Any) -> bool:
        is_training = module.training and torch.is_grad_enabled()
        root = self._roots.get(id(module))
        if root is None or root.ref() is not module:
            if next(module.parameters(), None) is None:
                return is_training  # a criterion: many loops make a new one in every step
            root = self._roots[id(module)] = _Root(module, self.recorder.calm)
            self._known = (len(self.optimizers.entries), len(self.recorder.registry.tensors))
            return False
        if self.signature.is_on:
            self._see_mode(root, module, output, is_training=is_training)
        known = (len(self.optimizers.entries), len(self.recorder.registry.tensors))
        if known != self._known:
            self._known = known
            return False
        return is_training

    def _see_mode(self, root: _Root, module: torch.nn.Module, output: Any, *, is_training: bool) -> None:
        """Take in which way a model was called."""
        signature = self.signature
        signature.see(FORWARD if is_training else QUIET)
        has_graph = False
        if type(output) is torch.Tensor:
            has_graph = output.requires_grad
            if output.ndim:
                signature.batch = output.size(0)
        mode = 1 << (is_training | has_graph << 1 | module.training << 2)
        if not root.modes & mode and signature.notice("mode"):
            root.modes |= mode

    def _see_first_batch(self, iterator: Any, batch: Any) -> None:
        key = id(getattr(iterator, "_dataset", None))
        if key not in self._data:
            self._data.add(key)
            self._calm = 0
            if self._resting or self._settled:
                self._tell(self._wake(with_structure=False), self.recorder.on_batch, iterator, batch)

    # ---------------------------------------------------------------- resting

    def _see_stepped(self, _optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        self._calm += 1
        step, schedule = self.recorder.step, self.recorder.schedule
        if step >= _LOOP_STEPS and not schedule.is_first(step, steps=_LOOK_STEPS):
            self._rest()
        elif step + 1 in _GLANCING:
            self._wake()
        elif (
            self._unsettled and self._calm >= _CALM_STEPS and not schedule.is_first(step, steps=_FIRST_STEPS)
        ):
            self._settle()

    def _settle(self) -> None:
        """Let those rest that know enough of such steps; whatever is new in the loop wakes them."""
        settled = {probe for probe in self._unsettled if probe.is_settled()}
        if not settled or self._patches is None:
            return
        self._unsettled = [probe for probe in self._unsettled if probe not in settled]
        lists = (*self._list_common(), self.recorder.on_call, self.events.on_clipped)
        others = settled.intersection(self._others)
        self._settled += self._patches.hush(others, lists)
        self._settled_structure += self._patches.hush(settled, lists)

    def _rest(self) -> None:
        """Let all rest: the structure of the loop is known, and it is not changing."""
        patches = self._patches
        if patches is None:
            return
        if not self._is_past_structure:
            self._wake()
            self._is_past_structure = True
            self._resting_structure = patches.hush(self._structure)
        if self._calm >= _CALM_STEPS:
            self._resting = patches.hush(self._others, self._list_common())
            self._resting += patches.hush((self,), (self.events.on_stepped,))

    def _list_common(self) -> tuple[list[Any], ...]:
        recorder, events = self.recorder, self.events
        calls = (recorder.on_root, recorder.on_pass, recorder.on_grad, recorder.on_batch)
        return (*calls, events.on_stepping, events.on_stepped, events.on_cleared)

    def _wake(self, *, with_structure: bool = True) -> Listening:
        self.recorder.calm.clear()
        woken = self._resting + self._settled
        self._resting, self._settled = [], []
        if with_structure:
            woken += self._resting_structure + self._settled_structure
            self._resting_structure, self._settled_structure = [], []
            self._is_past_structure = False
        if not woken:
            return []
        for listeners, listener in woken:
            listeners.append(listener)
        owners = {id(listener.__self__) for _, listener in woken}
        for probe in self._waking:
            if id(probe) in owners:
                probe.wake()
        self._unsettled += [
            each for each in self._settling if id(each) in owners and each not in self._unsettled
        ]
        return woken

    def _tell(self, resting: Listening, listeners: list[Any], *what: Any) -> None:
        told = [listener for each, listener in resting if each is listeners]
        everybody = told.copy()
        self.recorder.ask(told, *what)
        for listener in everybody:
            if listener not in told:  # it has failed, and is not asked again
                resting.remove((listeners, listener))
                if listener in listeners:
                    listeners.remove(listener)
