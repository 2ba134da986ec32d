"""Notes gradients that are thrown away: cleared before the next backward although no optimizer has used them.

That happens for good reasons too: an attack on the inputs, a look at the slope from another point, gradients that are
kept aside and put together by hand. Those backward passes stand in another place of the program than the one whose
gradients are used, work on inputs that are followed themselves, at other weights, or are followed by a gradient that
was written by hand. What is left is accumulation that does not accumulate: one place, new data each time, the same
weights, and of the gradients only the last are used.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from clew.capture.torch.glance import add_up, glance
from clew.capture.torch.leaves import list_leaves, local_part
from clew.capture.torch.probe_events import find_line
from clew.capture.torch.probe_learns import has_parameters
from clew.capture.torch.probe_signature import Places

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

_LOOK_STEPS: Final = 8
_SETTLED: Final = 3
"""Steps that are followed, and after how many right ones others like them need not be."""

_MOST_PASSES: Final = 128
"""Passes after which optimizers that have not stepped so often are not waited for."""

_MOST_INPUTS: Final = 32
_SIGHTINGS: Final = 3
_FRAMES: Final = 4
_GLANCE: Final = 8
_NUMBERS: Final = 1024


class _Pass(NamedTuple):
    """A backward pass: its place in the program, what the models were given, and what it left in the gradient."""

    place: tuple[int, ...]
    inputs: tuple[Any, ...]
    weights: tuple[float, ...]
    stamp: tuple[int, int]


class _State:
    """An optimizer: one parameter that it trains, and the passes since any optimizer has stepped."""

    def __init__(self, optimizer: torch.optim.Optimizer, forget: Callable[[object], object]) -> None:
        self.ref = weakref.ref(optimizer, forget)
        self.parameter: torch.Tensor | None = None
        self.waiting: list[_Pass] = []
        self.discarded: list[_Pass] = []
        self.before: tuple[int, int] | None = None
        self.steps = 0
        self.wrong = 0


class DiscardProbe:
    """Follows one gradient of every optimizer from pass to pass, in its first steps and after a change."""

    def __init__(self, recorder: Recorder, events: LoopEvents) -> None:
        self.recorder = recorder
        self.events = events
        self._states: dict[int, _State] = {}
        self._find_place = Places().find
        self._inputs: list[Any] = []
        self._is_followed = False
        self._clips = 0
        self._passes = 0
        self._cleared_at = ""
        self._is_told = False
        self._is_active = True

    def install(self, patches: Patches) -> None:
        """Begin to follow."""
        patches.listen(self.recorder.on_root, self._see_root)
        patches.listen(self.recorder.on_pass, self._see_pass)
        patches.listen(self.events.on_cleared, self._see_cleared)
        patches.listen(self.events.on_clipped, self._see_clip)
        patches.listen(self.events.on_stepping, self._see_stepping)
        patches.listen(self.events.on_stepped, self._see_stepped)

    def look_again(self) -> None:
        """Follow the next steps of every optimizer."""
        for state in self._states.values():
            state.steps = state.wrong = 0
        self._passes = 0
        self._is_active = not self._is_told

    def is_settled(self) -> bool:
        """Return whether some steps of every optimizer were followed and nothing was thrown away in the last."""
        is_known = all(state.steps >= _SETTLED and not state.wrong for state in self._states.values())
        return is_known or not self._is_active

    def wake(self) -> None:
        """Follow the passes from here on."""
        for state in self._states.values():
            state.waiting, state.discarded, state.before = [], [], None
        self._inputs.clear()
        self._is_followed, self._clips, self._cleared_at = False, 0, ""

    # ---------------------------------------------------------------- what happens

    def _see_root(self, module: torch.nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
        if not self._is_active or not torch.is_grad_enabled() or self.recorder.in_backward:
            return
        if len(self._inputs) >= _MOST_INPUTS:
            return
        if not has_parameters(module) or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        given = next(iter(list_leaves((args, kwargs))), None)
        if given is not None:
            self._is_followed = self._is_followed or given.requires_grad
            held = local_part(given)
            # The sum is a number that two batches hardly share.
            self._inputs.append((held.shape, add_up(held, _NUMBERS), *glance(held, _GLANCE)))

    def _see_pass(self, begins: bool) -> None:
        if not self._is_active:
            return
        for state in self._looking():
            if state.parameter is None:
                continue
            if begins:
                self._see_begin(state, state.parameter)
            else:
                self._see_end(state, state.parameter)
        if not begins:
            self._passes += 1
            self._inputs.clear()
            self._is_followed, self._clips = False, 0

    def _see_begin(self, state: _State, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        state.before = _stamp(gradient)
        if state.waiting and (gradient is None or not bool(gradient.detach().any())):
            state.discarded += state.waiting
            state.waiting = []

    def _see_end(self, state: _State, parameter: torch.Tensor) -> None:
        stamp = _stamp(parameter.grad)
        if stamp is None or stamp == state.before:
            return
        # Inputs that are followed belong to an attack, or to one model after another: nothing is said of those.
        inputs = () if self._is_followed else tuple(self._inputs)
        place = self._find_place(sys._getframe(), _FRAMES)
        state.waiting.append(_Pass(place, inputs, glance(parameter, _GLANCE), stamp))

    def _see_cleared(self, _owner: Any) -> None:
        if self._is_active and not self._cleared_at and any(s.waiting for s in self._states.values()):
            self._cleared_at = find_line()

    def _see_clip(self, _parameters: list[torch.Tensor], _norm: Any) -> None:
        self._clips += 1

    def _see_stepping(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        state = self._find(optimizer)
        if not self._is_active or state.steps >= _LOOK_STEPS:
            return
        state.steps += 1
        if not has_closure and self._is_wrong(state):
            state.wrong += 1
            if state.wrong == _SIGHTINGS and 4 * state.wrong >= 3 * (state.steps - 1):
                self._tell(state, optimizer)
        else:
            state.wrong = 0

    def _see_stepped(self, _optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        if not self._is_active:
            return
        for state in self._states.values():
            state.waiting, state.discarded = [], []
        self._cleared_at = ""
        is_waiting = self._passes < _MOST_PASSES and any(s.steps < _LOOK_STEPS for s in self._states.values())
        self._is_active = is_waiting and not self._is_told

    # ---------------------------------------------------------------- what is wrong

    def _is_wrong(self, state: _State) -> bool:
        """Return whether the gradients of other data, taken at the same place and weights, were thrown away."""
        if len(state.waiting) != 1 or not state.discarded or state.parameter is None:
            return False
        used = state.waiting[0]
        stamp = _stamp(state.parameter.grad)
        if stamp is None or stamp[0] != used.stamp[0] or stamp[1] - used.stamp[1] > self._clips:
            return False  # written by hand; clipping writes once
        if any(each.place != used.place or each.weights != used.weights for each in state.discarded):
            return False
        inputs = [each.inputs for each in (*state.discarded, used)]
        return all(inputs) and len(set(inputs)) == len(inputs)

    def _tell(self, state: _State, optimizer: torch.optim.Optimizer) -> None:
        self._is_told = True
        self.recorder.note(
            "gradients",
            {
                "problem": "discarded",
                **self.events.know(optimizer).tell(),
                "count": state.wrong,
                "steps": state.steps,
                "followed": 1,
                "passes": len(state.discarded) + 1,
                "cleared": self._cleared_at,
                "source": find_line(),
            },
        )

    # ---------------------------------------------------------------- which optimizers

    def _find(self, optimizer: torch.optim.Optimizer) -> _State:
        key = id(optimizer)
        state = self._states.get(key)
        if state is None:
            states = self._states
            state = states[key] = _State(optimizer, lambda _: states.pop(key, None))
        if state.parameter is None or state.parameter.grad is None:
            held = (p for group in optimizer.param_groups for p in group["params"])
            state.parameter = next((p for p in held if _is_plain(p.grad)), None)
        return state

    def _looking(self) -> list[_State]:
        return [state for state in self._states.values() if state.steps < _LOOK_STEPS]


def _stamp(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), gradient._version)


def _is_plain(gradient: torch.Tensor | None) -> bool:
    return type(gradient) is torch.Tensor and gradient.layout == torch.strided and gradient.numel() > 0
