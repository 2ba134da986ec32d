"""Sees every optimizer step: parameters and gradients before it, updates and buffers after it, and its numbers."""

from __future__ import annotations

import gc
import sys
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from clew.capture.assemble import SITE_SHIFT
from clew.capture.beat import Updates
from clew.capture.clock import CLEW, OPTIMIZER, REST
from clew.capture.torch.gates import Gates
from clew.capture.torch.outsiders import Outsiders
from clew.capture.torch.recorder import KIND_BUFFER, KIND_GRAD, KIND_PARAM, KIND_STATE, KIND_UPDATE
from clew.capture.torch.shadow import Shadows
from clew.capture.torch.uncompiled import uncompiled
from clew.capture.torch.unheard import has_dispatch_mode, is_heard
from clew.stats.readable import undisturbed, unheard
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.registry import TensorEntry

    Pair = tuple[TensorEntry, torch.Tensor]

_TELLING: Final = ("lr", "params")
"""While these are the very same things, a group has nothing to say in a step that is not recorded."""
_HOOKED_STEP_FILE: Final = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
"""Where torch wraps every optimizer's ``step`` to call its hooks; the wrapping function is named ``wrapper``."""


class OptimizerEntry(Updates):
    """One optimizer: its place among the others, and its parameters as sites."""

    __slots__ = ("groups", "is_placed", "made_at", "numbers", "pairs", "ref", "sites", "was_found")

    def __init__(
        self, optimizer: torch.optim.Optimizer, groups: list[int], forget: Callable[[object], object]
    ) -> None:
        self.ref = weakref.ref(optimizer, forget)
        self.groups = groups
        """The numbers of its groups among those of all optimizers."""
        self.stepped = -1
        self.steps = 0
        self.may_scale = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        """Whether it may take GradScaler's scale off by itself, inside its step."""
        self.was_found = False
        self.is_placed = False
        """Whether it was looked at whose numbers this one goes on with."""
        self.made_at = -1
        """The serial of the first step that it may be there for."""
        self.turn = object()
        """Stands for this optimizer where nothing may hold its parameters."""
        self.sites: tuple[int, ...] = ()
        self.parameters: list[torch.Tensor] = []
        self.pairs: list[Pair] = []
        self.tensors: list[torch.Tensor] = []
        self.shadows = Shadows([], [])
        self.param_keys: list[int] = []
        self.grad_keys: list[int] = []
        self.numbers: dict[tuple[str, int], float] = {}
        self.known_groups, self.rates = [], []
        """What the groups were like when their numbers were last taken, and the learning rates among these."""


class OptimizerLens:
    """Turns optimizer steps into records and into the end of steps."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.entries: dict[int, OptimizerEntry] = {}
        self.outsiders = Outsiders(recorder, self._held)
        self.discover: Callable[[list[torch.Tensor]], None] = lambda _: None
        """Called with parameters that are about to be named, so that their models can be found first."""
        self.events: LoopEvents | None = None
        """Tells the probes of steps; without hooks of its own, since torch calling an idle one takes time."""
        self._groups = 0
        self._places: dict[Any, dict[tuple[int, ...], Callable[[], torch.optim.Optimizer | None]]] = {}
        """By kind of optimizer and what it holds, the numbers of groups and who last went by them."""
        self._owned_at = (-1, -1)
        self._owned = False

    @property
    def seen(self) -> bool:
        """Whether an optimizer is known at all."""
        return bool(self.entries)

    def install(self, patches: Patches) -> None:
        """Begin to see optimizers, those made from now on included."""
        self._hook(patches)
        patches.replace(torch.optim.Optimizer, "__init__", self._make_init)

    def _hook(self, patches: Patches) -> None:
        general = (self._before_step, self._after_step)
        gates = Gates(self.recorder).step(
            *general,
            entries=self.entries,
            keys=_TELLING,
            fail=self._fail,
            measure=self._measure_update,
            finish=self._finish,
        )
        handles = (
            register_optimizer_step_pre_hook(general[0]),
            register_optimizer_step_post_hook(general[1]),
        )
        for handle in handles:
            patches.on_undo(handle.remove)

        def put(hooks: tuple[Any, Any]) -> None:
            # In their places: hooks are called in the order in which they came.
            for handle, hook in zip(handles, hooks, strict=True):
                table = handle.hooks_dict_ref()
                if table is not None and handle.id in table:
                    table[handle.id] = hook

        patches.add_cover(lambda: put(gates), lambda: put(general))

    def _make_init(self, original: Any) -> Any:
        # The parameter's name is torch's own: a caller may give it by keyword.
        def __init__(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(optimizer, *args, **kwargs)
            recorder = self.recorder
            if recorder.is_off():
                return
            try:
                self.add(optimizer)
                # The best guess of where the first turn of the loop begins: the model is made by now.
                recorder.flight.mark_start()
            except Exception as error:  # noqa: BLE001 - ours to answer for
                recorder.guard.fault(error, "a new optimizer", step=recorder.step)

        return __init__

    def add(self, optimizer: torch.optim.Optimizer, *, was_found: bool = False) -> OptimizerEntry:
        """Return the entry of an optimizer, made now if it is new."""
        key = id(optimizer)
        entry = self.entries.get(key)
        if entry is None:
            # The entry holds the parameters: it goes with its optimizer, or an old model would stay in memory.
            groups = self._number(len(optimizer.param_groups))
            entry = self.entries[key] = OptimizerEntry(optimizer, groups, self._make_forget(key))
            self.outsiders.look_again()
            entry.was_found, entry.made_at = was_found, self.recorder.serial + self.recorder.closing
        return entry

    def _make_forget(self, key: int) -> Callable[[object], object]:
        recorder, entries, outsiders = self.recorder, self.entries, self.outsiders

        def forget(_: object) -> None:
            entry = entries.pop(key, None)
            try:
                if entry is not None:
                    outsiders.let_go(entry.parameters)
            except Exception as error:  # noqa: BLE001 - ours to answer for
                recorder.guard.fault(error, "an optimizer that is gone", step=recorder.step)

        return forget

    def _number(self, count: int) -> list[int]:
        """Return numbers for new groups."""
        self._groups += count
        return list(range(self._groups - count, self._groups))

    def list_used(self) -> list[tuple[torch.optim.Optimizer, int]]:
        """Return the living optimizers that have had a step, also a skipped one, and the serial of their last."""
        living = [(entry.ref(), entry.stepped) for entry in self.entries.values() if entry.stepped >= 0]
        return [(optimizer, serial) for optimizer, serial in living if optimizer is not None]

    def find_existing(self) -> None:
        """Add the optimizers made before the recording; without them a first step looks hand-written."""
        for thing in gc.get_objects():
            # type(), not isinstance: a proxy may answer for its target, and loading that would be our doing.
            if issubclass(type(thing), torch.optim.Optimizer) and hasattr(thing, "param_groups"):
                self.add(thing, was_found=True)

    def owns_parameters(self) -> bool:
        """Return whether some known optimizer holds a parameter of a known model."""
        registry = self.recorder.registry
        at = (len(self.entries), len(registry.tensors))
        if at != self._owned_at:
            self._owned_at = at
            self._owned = any(registry.owns(parameter) for parameter in self._held())
        return self._owned

    def holds_foreign(self, top: torch.nn.Module) -> bool:
        """Return whether optimizers hold parameters outside this model: then there are several models."""
        own = {id(parameter) for parameter in top.parameters()}
        return any(id(parameter) not in own for parameter in self._held(of_this_recording=True))

    def _held(self, *, of_this_recording: bool = False) -> list[torch.Tensor]:
        """Return the parameters of the optimizers; those merely found in memory may belong to the past."""
        entries = [entry for entry in self.entries.values() if not (of_this_recording and entry.was_found)]
        living = [entry.ref() for entry in entries]
        return [p for o in living if o is not None for group in o.param_groups for p in group["params"]]

    # ---------------------------------------------------------------- around a step

    @uncompiled
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        recorder = self.recorder
        if recorder.asleep or (recorder.owner.thread != get_ident() and not recorder.owner.claim()):
            return
        if is_heard() or has_dispatch_mode():
            with unheard():
                self._before_step(optimizer, args, kwargs)
            return
        if not (recorder.updating or recorder.due or recorder.closing):
            recorder.updating = 1
            self._resume_later(recorder.clock.switch(OPTIMIZER))
        else:
            self._prepare(optimizer, args, kwargs)
        events = self.events
        if events is not None and (recorder.signing or recorder.on_stepping):
            events.before_step(optimizer, args, kwargs)

    def _resume_later(self, phase: int) -> None:
        # An exception inside the last step has left the clock there.
        self.recorder.resumes = REST if phase == OPTIMIZER else phase

    def _prepare(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """End the step before where this optimizer begins another, and measure what it is about to use."""
        recorder = self.recorder
        # A closure may step another optimizer inside; an exception ends a step without telling the hooks.
        recorder.updating = _count_running() if recorder.updating else 1
        if recorder.updating > 1:
            return
        self._resume_later(recorder.clock.switch(CLEW))
        try:
            entry = self.entries.get(id(optimizer)) or self.add(optimizer)
            if recorder.closing and entry.stepped == recorder.serial:
                recorder.end_step()
            if recorder.due:
                # With a closure forward and backward are still to come: gradients are measured afterwards.
                self._measure_before(entry, optimizer, with_grads=_closure_of(args, kwargs) is None)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, "before the optimizer step", step=recorder.step)
        finally:
            recorder.clock.switch(OPTIMIZER)

    @uncompiled
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        recorder = self.recorder
        if not recorder.updating or recorder.asleep:
            return
        if recorder.owner.thread != get_ident() and not recorder.owner.is_here():
            return
        if is_heard() or has_dispatch_mode():
            with unheard():
                self._after_step(optimizer, args, kwargs)
            return
        recorder.updating -= 1
        told = 1
        if not recorder.updating:
            told = -1
            if recorder.due:
                self._measure_update(optimizer, _closure_of(args, kwargs))
            entry = self.entries.get(id(optimizer))
            try:
                told = recorder.flight.end_update(
                    recorder, entry, optimizer.param_groups, _TELLING, recorder.resumes
                )
            except Exception as error:  # noqa: BLE001 - ours to answer for
                self._fail(error)
                if recorder.closing:  # the step was counted
                    told = 1
                    recorder.clock.switch(recorder.resumes)
            if told < 0:  # nothing was done
                self._end_update(optimizer)
            elif not told:
                self._tell_snapshots()
        if self.events is not None and recorder.on_stepped:
            self.events.after_step(optimizer, args, kwargs)
        self._end_turn()

    def _fail(self, error: Exception, place: str = "after the optimizer step") -> None:
        self.recorder.guard.fault(error, place, step=self.recorder.step)

    def _finish(self, told: int, counted: int, optimizer: torch.optim.Optimizer) -> None:
        """Do what is left of a step that came by the shortest way: end it, tell the snapshots, and the signature."""
        if told < 0:
            self._end_update(optimizer)
        elif not told:
            self._tell_snapshots()
        if not counted:
            self._end_turn()

    def _tell_snapshots(self) -> None:
        recorder = self.recorder
        try:
            if recorder.flight.snapshots is not None:
                recorder.flight.snapshots.end_step()
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, "state of the step", step=recorder.step)
        recorder.clock.switch(recorder.resumes)

    def _end_turn(self) -> None:
        events, turns = self.events, self.recorder.turns
        if events is None or turns is None:
            return
        try:
            turns.end_step()
        except Exception as error:  # noqa: BLE001 - ours to answer for
            events.fail(error)

    def _measure_update(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> None:
        """Measure what an optimizer has done."""
        recorder = self.recorder
        recorder.clock.switch(CLEW)
        try:
            entry = self.entries.get(id(optimizer)) or self.add(optimizer)
            entry.stepped = recorder.serial
            if closure is not None:
                with torch._C.DisableTorchFunction():
                    self._pairs_of(entry, optimizer)
                    self._measure_grads(entry, optimizer)
                    self.outsiders.measure(with_grads=True)
            self._measure_after(entry, optimizer)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, "after the optimizer step", step=recorder.step)

    def _end_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer's numbers and end the step; the general way of what ``Flight.end_update`` does."""
        recorder = self.recorder
        recorder.clock.switch(CLEW)
        try:
            entry = self.entries.get(id(optimizer)) or self.add(optimizer)
            entry.stepped = recorder.serial
            entry.steps += 1
            self._record_numbers(entry, optimizer)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, "after the optimizer step", step=recorder.step)
        finally:
            recorder.clock.switch(recorder.resumes)
            recorder.mark_end()

    def step_was_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """GradScaler found infinite gradients and left the optimizer out: that is a step, too."""
        recorder = self.recorder
        entry = self.add(optimizer)
        if recorder.closing and entry.stepped == recorder.serial:
            recorder.end_step()
        recorder.force_due()
        self._measure_before(entry, optimizer, with_grads=True)
        self._record_numbers(entry, optimizer)
        entry.stepped = recorder.serial
        recorder.mark_end()

    def _measure_before(
        self, entry: OptimizerEntry, optimizer: torch.optim.Optimizer, *, with_grads: bool
    ) -> None:
        """Measure what the optimizer is about to use."""
        recorder = self.recorder
        # Parameters may be of a class that hears what it is asked; a step that has raised may be tried again.
        with torch._C.DisableTorchFunction(), recorder.lock:
            first = recorder.latest.forget(entry.turn, recorder.keys)
            self._pairs_of(entry, optimizer)
            if recorder.wants["param"]:
                recorder.measure_keyed(entry.tensors, entry.param_keys)
            if with_grads:
                self._measure_grads(entry, optimizer)
            if recorder.wants["update"]:
                entry.shadows.take()
            recorder.latest.rows[entry.turn] = range(first, len(recorder.keys))
            self.outsiders.measure(with_grads=with_grads)

    def _measure_grads(self, entry: OptimizerEntry, optimizer: torch.optim.Optimizer) -> None:
        recorder = self.recorder
        if not recorder.wants["grad"]:
            return
        # A fused optimizer takes GradScaler's scale off by itself, inside its step.
        scale = getattr(optimizer, "grad_scale", None)
        kept = KERNEL.list_gradients(entry.tensors) if KERNEL is not None else None
        keys = entry.grad_keys
        if kept is None:
            grads = [tensor.grad for tensor in entry.tensors]
            kept = [grad for grad in grads if grad is not None]
            keys = [key for grad, key in zip(grads, keys, strict=True) if grad is not None]
        if scale is None:
            recorder.measure_keyed(kept, keys)
            return
        for grad, key in zip(kept, keys, strict=True):  # one at a time, which takes little memory
            with undisturbed():
                unscaled = grad / scale.to(grad.device)
            recorder.measure_keyed([unscaled], [key])

    def _measure_after(self, entry: OptimizerEntry, optimizer: torch.optim.Optimizer) -> None:
        recorder = self.recorder
        if not recorder.owner.is_shared and (name := recorder.flight.find_bad(of_gradients=False)):
            recorder.report_bad("parameter", name)
        wants = recorder.wants
        if not (wants["update"] or wants["buffer"] or wants["state"]):
            return
        with torch._C.DisableTorchFunction():
            pairs = self._pairs_of(entry, optimizer)
            if wants["update"]:
                recorder.measure_updates(*entry.shadows.list_moved())
                entry.shadows.settle()
            if wants["buffer"]:
                with recorder.latest.measuring("buffers", recorder):
                    self.measure_buffers()
            if wants["state"]:
                self._measure_state(pairs, optimizer)

    def measure_buffers(self) -> None:
        """Measure the buffers of all models."""
        recorder = self.recorder
        for tree in recorder.registry.trees:
            if not tree.buffers or tree.ref() is None:
                continue
            living = [(entry, entry.ref()) for entry in tree.buffers if entry.wanted]
            kept = [(entry, tensor) for entry, tensor in living if tensor is not None]
            recorder.measure_many([tensor for _, tensor in kept], [e.site for e, _ in kept], KIND_BUFFER)

    def _measure_state(self, pairs: list[Pair], optimizer: torch.optim.Optimizer) -> None:
        recorder = self.recorder
        for entry, tensor in pairs:
            state = optimizer.state.get(tensor, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    site = recorder.sites.add(f"{entry.name}@{name}", "parameter", parent=entry.site)
                    recorder.measure(value, site, KIND_STATE)

    def _record_numbers(self, entry: OptimizerEntry, optimizer: torch.optim.Optimizer) -> None:
        """Take the learning rate of each group every step, its other numbers when they change.

        Schedules make new numbers. While the learning rates are the very same ones, the other numbers are compared in
        steps that are recorded.
        """
        groups, known = optimizer.param_groups, entry.known_groups
        # Nothing but the same lists of tensors can be compared.
        if has_same(groups, known, _TELLING) and (not self.recorder.due or groups == known):
            self.recorder.scalars += entry.rates
            return
        entry.groups += self._number(max(0, len(groups) - len(entry.groups)))
        if not entry.is_placed:
            self._take_place(entry, optimizer)
        groups = [{**group} for group in optimizer.param_groups]
        taken = len(self.recorder.scalars)
        for ordinal, group in zip(entry.groups, groups, strict=False):  # groups may have been taken away
            for key, value in group.items():
                self._record_number(entry, key, value, ordinal)
        # A number kept in a tensor changes in its place: such groups are read each time.
        is_plain = all(
            _is_plain(value) for group in groups for key, value in group.items() if key != "params"
        )
        entry.known_groups = groups if is_plain else []
        entry.rates = [scalar for scalar in self.recorder.scalars[taken:] if scalar.name == "lr"]

    def _take_place(self, entry: OptimizerEntry, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer that is made anew, say in each epoch, go on with the numbers of the one it stands for.

        That is one of the same kind with the same parameters that has not stepped since this one was made.
        """
        count, entry.is_placed = len(optimizer.param_groups), True
        self._pairs_of(entry, optimizer)
        places = self._places.setdefault((type(optimizer), count, entry.sites), {})
        living = {groups: self.entries.get(id(ref())) for groups, ref in places.items()}
        free = [groups for groups, each in living.items() if each is None or each.stepped < entry.made_at]
        groups = free[0] if free else tuple(entry.groups)
        before = living.get(groups)
        if before is not None:  # should it step again, there are two of them, and it is numbered anew
            before.is_placed, before.groups, before.known_groups = False, self._number(count), []
        entry.groups = list(groups)
        places[groups] = entry.ref

    def _record_number(self, entry: OptimizerEntry, key: str, value: Any, ordinal: int) -> None:
        recorder = self.recorder
        if isinstance(value, torch.Tensor):
            if value.numel() == 1:
                recorder.add_scalar("lr" if key == "lr" else f"group.{key}", value, ordinal)
        elif isinstance(value, tuple):
            for position, part in enumerate(value):
                self._record_number(entry, f"{key}[{position}]", part, ordinal)
        elif isinstance(value, (int, float)):
            if key == "lr":
                recorder.add_scalar("lr", value, ordinal)
            elif entry.numbers.get((key, ordinal)) != value:
                entry.numbers[key, ordinal] = float(value)
                recorder.add_scalar(f"group.{key}", value, ordinal)

    def _pairs_of(self, entry: OptimizerEntry, optimizer: torch.optim.Optimizer) -> list[Pair]:
        """Return the optimizer's parameters with their sites; looked up again when groups were added."""
        if not holds(optimizer.param_groups, entry.parameters):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.outsiders.look_again()
            self.discover(parameters)
            number = entry.groups[0] if entry.groups else 0
            entries = self.recorder.registry.name_parameters(parameters, f"optimizer{number}")
            entry.parameters, entry.sites = parameters, tuple(each.site for each in entries)
            entry.pairs = [(e, p) for e, p in zip(entries, parameters, strict=True) if e.wanted]
            entry.tensors = [parameter for _, parameter in entry.pairs]
            entry.param_keys = [e.site << SITE_SHIFT | KIND_PARAM for e, _ in entry.pairs]
            entry.grad_keys = [e.site << SITE_SHIFT | KIND_GRAD for e, _ in entry.pairs]
            update_keys = [e.site << SITE_SHIFT | KIND_UPDATE for e, _ in entry.pairs]
            entry.shadows = Shadows(entry.pairs, update_keys)
        return entry.pairs


def holds_slowly(groups: list[dict[str, Any]], parameters: list[torch.Tensor]) -> bool:
    """Return whether the parameters of an optimizer's groups, one after another, are these very ones."""
    return [id(each) for group in groups for each in group["params"]] == list(map(id, parameters))


def has_same_slowly(groups: list[dict[str, Any]], known: list[dict[str, Any]], keys: tuple[str, ...]) -> bool:
    """Return whether two lists of groups have, pair by pair, the very same things under some keys."""
    return len(groups) == len(known) and all(
        group.get(key) is before.get(key) for group, before in zip(groups, known, strict=True) for key in keys
    )


has_same = KERNEL.has_same if KERNEL is not None else has_same_slowly
holds = KERNEL.holds if KERNEL is not None else holds_slowly


def _count_running() -> int:
    """Return how many optimizer steps the calling frames are inside of."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        count += frame.f_code.co_filename == _HOOKED_STEP_FILE and frame.f_code.co_name == "wrapper"
        frame = frame.f_back
    return count


def _is_plain(value: Any) -> bool:
    """Return whether a value cannot change in its place."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (int, float, str))


def _closure_of(args: Any, kwargs: Any) -> Any:
    """Return the closure given to ``step``; the hook gets the optimizer itself as the first argument."""
    if not kwargs and len(args) == 1:
        return None
    return kwargs.get("closure") or next((value for value in args[1:] if callable(value)), None)
