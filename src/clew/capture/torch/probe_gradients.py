"""Follows gradients between backward, clearing and step: fresh, consumed, polluted, erased.

What counts is the state of ``.grad`` itself, whoever cleared it and how: it is None, it holds zeros, or it is what the
last step has used. Only the optimizer that consumes a gradient is asked; what other losses leave there is legal.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from clew.capture.torch.glance import Stamp, add_up, stamp
from clew.capture.torch.leaves import list_leaves
from clew.capture.torch.probe_events import find_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

_SAMPLE: Final = 12
"""Parameters of an optimizer that are followed: a loop treats all of them alike."""

_FIRST_STEPS: Final = 20
_SOON: Final = (64, 4)
_LATER: Final = (512, 6)
"""After the first steps of an optimizer, so many of so many steps are followed: more often in the first 512."""

_SETTLED: Final = 3
"""Steps without anything wrong after which one like the others need not be followed."""

_IDLE_PASSES: Final = 256
"""An optimizer that has not stepped for so many backward passes is not waited for."""

_NOTHING_SCALED: Final = "No inf checks were recorded for this optimizer"
_MOST_ELEMENTS: Final = 4096
_ROUNDED: Final = 1e-5
_MOST_NOTES: Final = 4
_MOST_IN_ALL: Final = 64


class _Held:
    """A parameter of an optimizer and where its gradient stands."""

    __slots__ = ("before", "consumed", "is_stale", "parameter", "produced", "was_nonzero")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.before: Stamp | None = None
        self.consumed: Stamp | None = None
        self.produced: Stamp | None = None
        self.is_stale = False
        self.was_nonzero = True


class _State:
    """One optimizer: the gradients that are followed, and how often each thing went wrong."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, passes: int, forget: Callable[[object], object]
    ) -> None:
        self.ref = weakref.ref(optimizer, forget)
        self.held: list[_Held] = []
        self.parameters: list[torch.Tensor] = []
        self.smallest: torch.Tensor | None = None
        self.size = -1
        self.steps = 0
        self.looks_from = 0
        self.judged = 0
        """Steps of the present look that were judged; what went wrong is counted among these."""
        self.passes = passes
        self.counts: dict[str, int] = {}
        self.was_early = False
        self.early_line = ""
        """Where the only step without gradients was taken, before any forward."""
        self.is_testing = False
        self.sums: list[float] = []
        self.derived: torch.Tensor | None = None
        """What ``autograd.grad`` has given for the smallest parameter since the last step, added up."""
        self.used: torch.Tensor | None = None
        """The gradient of the smallest parameter that the last step has used, where derivatives are asked for."""

    def end_look(self) -> None:
        """Forget the gradients that were followed, and count anew in the next look."""
        self.held, self.parameters, self.smallest, self.size = [], [], None, -1
        self.counts.clear()
        self.judged, self.is_testing = 0, False
        self.derived, self.used = None, None


class _Clip(NamedTuple):
    """The newest clipping: the parameters it was given, whether it found gradients, and the line."""

    parameters: frozenset[int]
    found: bool
    source: str


class GradientProbe:
    """Tells of steps on gradients that were used before, were erased, or were never there."""

    def __init__(self, recorder: Recorder, events: LoopEvents) -> None:
        self.recorder = recorder
        self.events = events
        self._states: dict[int, _State] = {}
        self._passes = 0
        self._passes_before = 0
        self._is_fresh = False
        """A forward with gradients has not been differentiated yet."""
        self._clip: _Clip | None = None
        self._cleared_at = ""
        self._pass_line = ""
        self._told: dict[str, int] = {}
        self._is_active = True

    def install(self, patches: Patches) -> None:
        """Begin to follow gradients."""
        patches.listen(self.recorder.on_root, self._see_root)
        patches.listen(self.recorder.on_pass, self._see_pass)
        patches.listen(self.recorder.on_grad, self._see_grad)
        patches.listen(self.recorder.on_derived, self._see_derived)
        patches.listen(self.events.on_made, self._add)
        patches.listen(self.events.on_cleared, self._see_cleared)
        patches.listen(self.events.on_clipped, self._see_clip)
        patches.listen(self.events.on_stepping, self._see_stepping)
        patches.listen(self.events.on_stepped, self._see_stepped)
        patches.listen(self.recorder.on_error, self._see_error)
        self.recorder.note("probe", {"probe": "gradients"})

    def look_again(self) -> None:
        """Follow the next steps of every optimizer."""
        for state in self._states.values():
            state.looks_from = state.steps
            state.end_look()
        self._clip, self._is_fresh, self._is_active = None, False, True

    def is_settled(self) -> bool:
        """Return whether some steps of every optimizer were judged and nothing was wrong."""
        return all(
            state.judged >= _SETTLED and not (state.counts or state.is_testing or state.was_early)
            for state in self._states.values()
        )

    def wake(self) -> None:
        """Follow the gradients from here on: what happened to them while this rested is not known."""
        for state in self._states.values():
            state.end_look()
            state.passes = self._passes
        self._clip, self._is_fresh, self._is_active = None, False, True

    # ---------------------------------------------------------------- what happens

    def _see_root(self, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        if not self._is_fresh and self._is_active and torch.is_grad_enabled():
            first = next(iter(list_leaves(output)), None)
            self._is_fresh = first is not None and first.requires_grad

    def _see_pass(self, begins: bool) -> None:
        if begins:
            self._passes += 1
            self._is_fresh = False
            if any(state.early_line for state in self._states.values()):
                self._pass_line = find_line()
        if not self._is_active:
            return
        for state in self._looking():
            for held, now in zip(state.held, stamp(state.parameters), strict=True):
                if begins and now is not None:
                    _before_pass(held, now)
                elif begins:
                    held.before, held.consumed, held.is_stale = None, None, False
                elif now is not None and now != held.before:
                    held.produced = now
                    if state.is_testing:
                        held.was_nonzero = not _is_zero(held.parameter.grad)

    def _see_grad(self) -> None:
        """A forward was for ``autograd.grad``, which leaves no gradient for the step."""
        self._is_fresh = False

    def _see_derived(self, inputs: Any, derivatives: Any) -> None:
        """Keep what may be put into ``.grad`` by hand."""
        if not self._is_active or isinstance(inputs, torch.Tensor):
            return
        places = {id(each): place for place, each in enumerate(inputs)}
        for state in self._looking():
            small = state.smallest
            if small is None or id(small) not in places or small.numel() > _MOST_ELEMENTS:
                continue
            found = derivatives[places[id(small)]]
            if isinstance(found, torch.Tensor) and found.layout == torch.strided:
                with torch.no_grad():
                    before = 0 if state.derived is None else state.derived
                    state.derived = found.detach() + before

    def _see_cleared(self, _owner: Any) -> None:
        if self._is_active and any(held.produced for state in self._looking() for held in state.held):
            self._cleared_at = find_line()

    def _see_clip(self, parameters: list[torch.Tensor], norm: Any) -> None:
        if not self._is_active:
            return
        found = any(each.grad is not None for each in parameters) and float(norm) != 0.0
        self._clip = _Clip(frozenset(map(id, parameters)), found, "" if found else find_line())

    def _see_stepping(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        state = self._add(optimizer)
        if not self._is_looking(state):
            return
        _choose(state)
        state.judged += 1
        if not has_closure:
            self._judge(state, optimizer)
        self._passes_before = self._passes

    def _see_stepped(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        state = self._add(optimizer)
        if self._is_looking(state):
            if has_closure and self._passes > self._passes_before:
                self._judge_stale(state, optimizer)
            elif has_closure:
                self._judge(
                    state, optimizer
                )  # the closure has nothing to do: the gradients are those from before
            for held, now in zip(state.held, stamp(state.parameters), strict=True):
                held.consumed = now
                held.produced = None
                held.is_stale = False
            state.sums = _add_up_some(state)
            state.used = _copy_used(state)
            state.derived = None
        else:
            state.end_look()
        state.steps += 1
        state.passes = self._passes
        self._is_active = any(self._is_looking(each) for each in self._states.values())

    def _see_error(self, error: BaseException) -> None:
        """A scaler that finds no gradients raises before the step: tell whether they were there."""
        if _NOTHING_SCALED not in str(error):
            return
        for state in self._looking():
            optimizer = state.ref()
            produced = [held for held in state.held if held.produced is not None]
            if optimizer is None or not produced or any(held.parameter.grad is not None for held in produced):
                continue
            told = {"wrong": len(produced), "cleared": self._cleared_at, "raised": True}
            self._note(state, optimizer, "erased", **told)

    # ---------------------------------------------------------------- what is wrong

    def _judge(self, state: _State, optimizer: torch.optim.Optimizer) -> None:
        present = [held for held in state.held if held.parameter.grad is not None]
        if not self._passes and not present:
            state.early_line = "" if state.was_early or self._is_fresh else find_line()
            state.was_early = True
            self._note(state, optimizer, "early", wrong=len(state.held))
        elif state.was_early and (self._is_fresh or self._is_turned(state)):
            self._note(state, optimizer, "delayed", wrong=len(state.held))
        elif not self._is_fresh:
            self._judge_erased(state, optimizer, present)
        self._judge_stale(state, optimizer)
        self._judge_added(state, optimizer)
        if state.steps and state.passes == self._passes:
            self._judge_repeated(state, optimizer, present)
        self._judge_clip(state, optimizer, present)
        self._cleared_at = ""

    def _is_turned(self, state: _State) -> bool:
        """Return whether the step without gradients stands in the loop, and before the backward in the same file.

        Behind it, the first turn had nothing to learn from yet.
        """
        (step_file, _, step), (pass_file, _, backward) = (
            line.rpartition(":") for line in (state.early_line, self._pass_line)
        )
        is_before = bool(step_file) and step_file == pass_file and int(step) < int(backward)
        return is_before and state.early_line == find_line()

    def _judge_stale(self, state: _State, optimizer: torch.optim.Optimizer) -> None:
        """Gradients that a step has used were added to and are used again."""
        mixed = [held for held in state.held if held.is_stale and held.produced is not None]
        fresh = [held for held in state.held if not held.is_stale and held.produced is not None]
        if mixed and len(mixed) >= len(fresh):
            self._note(state, optimizer, "stale", wrong=len(mixed))

    def _judge_added(self, state: _State, optimizer: torch.optim.Optimizer) -> None:
        """Derivatives were added by hand to the gradient that the last step has used; a decayed one is meant."""
        small = state.smallest
        if state.used is None or state.derived is None or small is None or small.grad is None:
            return
        with torch.no_grad():
            more = (small.grad - state.derived).double()
            size = float(torch.maximum(state.used.abs(), state.derived.abs()).max())
            is_sum = float((more - state.used).abs().max()) <= _ROUNDED * size
        if is_sum and float(state.used.abs().max()) > 100 * _ROUNDED * size:
            self._note(state, optimizer, "stale", wrong=len(state.held))

    def _judge_erased(self, state: _State, optimizer: torch.optim.Optimizer, present: list[_Held]) -> None:
        """Backward gave gradients, and none of them is left."""
        produced = [held for held in state.held if held.produced is not None]
        stamps = zip(stamp([held.parameter for held in present]), present, strict=True)
        if not produced or any(now == held.produced for now, held in stamps):
            return
        if present:
            if not all(_is_zero(held.parameter.grad) for held in present):
                return
            if not state.is_testing:
                # Zeros may have been zeros before: look at what the next backward gives.
                state.is_testing = True
                return
        if any(held.was_nonzero for held in produced):
            self._note(state, optimizer, "erased", wrong=len(produced), cleared=self._cleared_at)

    def _judge_repeated(self, state: _State, optimizer: torch.optim.Optimizer, present: list[_Held]) -> None:
        """The very gradients of the last step, in the same place; sums tell other numbers there apart.

        How often they were written to says nothing: clipping does so even where it changes nothing.
        """
        if not present or any(not _is_same_tensor(held) for held in present):
            return
        if any(state.sums) and _add_up_some(state) == state.sums:
            self._note(state, optimizer, "repeated", wrong=len(present))

    def _judge_clip(self, state: _State, optimizer: torch.optim.Optimizer, present: list[_Held]) -> None:
        clip = self._clip
        if clip is None:
            return
        concerned = [held for held in state.held if id(held.parameter) in clip.parameters]
        if clip.parameters and not concerned and (clip.found or self._is_held(clip)):
            return
        self._clip = None
        there = [held for held in (concerned or present) if held.produced is not None]
        if not clip.found and any(not _is_zero(held.parameter.grad) for held in there):
            told = {"given": len(clip.parameters), "held": bool(concerned), "clipped": clip.source}
            self._note(state, optimizer, "unclipped", **told)

    def _is_held(self, clip: _Clip) -> bool:
        """Return whether what was clipped is trained at all: an average of the weights is not."""
        living = [optimizer for state in self._states.values() if (optimizer := state.ref()) is not None]
        groups = [group for optimizer in living for group in optimizer.param_groups]
        return any(id(parameter) in clip.parameters for group in groups for parameter in group["params"])

    def _note(self, state: _State, optimizer: torch.optim.Optimizer, problem: str, **more: Any) -> None:
        count = state.counts[problem] = state.counts.get(problem, 0) + 1
        told = self._told[problem] = self._told.get(problem, 0) + 1
        if count > _MOST_NOTES or told > _MOST_IN_ALL:
            return
        known = self.events.know(optimizer)
        self.recorder.note(
            "gradients",
            {
                "problem": problem,
                **known.tell(),
                "count": count,
                "steps": state.judged,
                "followed": len(state.held),
                "source": find_line(),
                **more,
            },
        )

    # ---------------------------------------------------------------- which optimizers

    def _add(self, optimizer: torch.optim.Optimizer) -> _State:
        """Return the state of an optimizer, made now if it is new."""
        key = id(optimizer)
        state = self._states.get(key)
        if state is None:
            states = self._states
            state = states[key] = _State(optimizer, self._passes, lambda _: states.pop(key, None))
            self._is_active = True
        return state

    def _looking(self) -> list[_State]:
        chosen = [state for state in self._states.values() if self._is_looking(state)]
        for state in chosen:
            if state.size < 0:
                _choose(state)
        return chosen

    def _is_looking(self, state: _State) -> bool:
        if self._passes - state.passes >= _IDLE_PASSES:
            return False
        every, length = _SOON if state.steps < _LATER[0] else _LATER
        return state.steps - state.looks_from < _FIRST_STEPS or state.steps % every < length


def _choose(state: _State) -> None:
    """Choose the parameters to follow, again when a group was added."""
    optimizer = state.ref()
    if optimizer is None:
        return
    size = sum(len(group["params"]) for group in optimizer.param_groups)
    if size == state.size:
        return
    state.size = size
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    known = {id(held.parameter): held for held in state.held}
    chosen = parameters[:: max(1, -(-len(parameters) // _SAMPLE))]
    state.held = [known.get(id(parameter)) or _Held(parameter) for parameter in chosen]
    state.parameters = chosen
    state.smallest = min(chosen, key=lambda parameter: parameter.numel(), default=None)


def _before_pass(held: _Held, now: Stamp) -> None:
    held.before = now
    if held.consumed is None and not held.is_stale:
        return
    if _is_zero(held.parameter.grad):
        held.is_stale = False
    elif held.consumed is not None:
        # What the user has written into since the step is meant to be there, such as a decayed gradient.
        held.is_stale = held.before == held.consumed
    held.consumed = None


def _stamp(held: _Held) -> Stamp | None:
    return stamp([held.parameter])[0]


def _is_same_tensor(held: _Held) -> bool:
    now = _stamp(held)
    return now is not None and held.consumed is not None and now[0] == held.consumed[0]


def _add_up_some(state: _State) -> list[float]:
    """Return the sums of two gradients: of the smallest parameter and of the first."""
    if state.smallest is None:
        return []
    return [_sum(each.grad) for each in {id(p): p for p in (state.smallest, state.parameters[0])}.values()]


def _copy_used(state: _State) -> torch.Tensor | None:
    """Return the smallest gradient, to know it again where derivatives are added to it by hand."""
    small = state.smallest
    if state.derived is None or small is None or small.grad is None or small.grad.layout != torch.strided:
        return None
    return small.grad.detach().clone()


def _is_zero(gradient: torch.Tensor | None) -> bool:
    return _sum(gradient) == 0.0


def _sum(gradient: torch.Tensor | None) -> float:
    """Return the sum of the magnitudes of some elements."""
    if gradient is None:
        return 0.0
    return add_up(gradient.detach()._values() if gradient.is_sparse else gradient, _MOST_ELEMENTS)
