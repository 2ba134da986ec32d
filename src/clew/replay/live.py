"""A training that stops where it was asked to, in its own thread, and goes on as if it had not.

Nothing is installed before somebody asks for a stop, and nothing that is evaluated at one stays.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from clew.capture.clock import REST
from clew.capture.torch.leaves import walk
from clew.capture.torch.patches import Patches
from clew.replay.breakpoint import AFTER, BACKWARD, BEFORE, FORWARD, UPDATE, Breakpoint, covers
from clew.replay.expression import differs, evaluate, spell
from clew.replay.guarded import undone
from clew.replay.live_lines import LineStop
from clew.replay.live_ops import OpStop
from clew.replay.live_unmet import Unmet
from clew.replay.live_world import LiveWorld, Stop
from clew.replay.stack import live_frames, names_around
from clew.replay.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from clew.capture.torch.recorder import Recorder

_MISSING: Final = object()
_FUSED: Final = (
    "clew: a breakpoint on an operation runs the training under a dispatch mode: fused paths are off, "
    "so numbers may differ in the last bits from a run without it"
)


@dataclass(slots=True)
class Call:
    """A module call that is going on."""

    site: str
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True)
class _Going:
    """How the program goes on after a stop: ``how`` and the depth and call it counts from."""

    how: str = "continue"
    depth: int = 0
    call: Call | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Call] = []
        self.is_busy = False


@dataclass(slots=True)
class _Points:
    """The breakpoints, sorted by what has to be installed for them."""

    everything: list[Breakpoint] = field(default_factory=list)

    def of(self, kind: str, phase: str = "") -> list[Breakpoint]:
        """Return those of a kind, and of a phase where one is given."""
        return [each for each in self.everything if each.kind == kind and phase in ("", each.phase)]


class Breaker:
    """Stops the training. ``talk`` is called with the world at each stop and returns how to go on."""

    def __init__(
        self, recorder: Recorder, *, talk: Callable[[LiveWorld], str], tell: Callable[[str], None]
    ) -> None:
        self.recorder = recorder
        self._talk = talk
        self._tell = tell
        self._points = _Points()
        self._going = _Going()
        self._patches = Patches()
        self._calls = Patches()
        self._thread = _Thread()
        self._pid = os.getpid()
        self._is_calling = False
        self._handles: list[Any] = []
        self._watched: dict[str, Any] = {}
        self._paused = ""
        self._steps_done: set[int] = set()
        self._ops: OpStop | None = None
        self._lines: LineStop | None = None
        self._has_optimizer = False
        self.unmet = Unmet(recorder, tell)
        self.was_quit = False
        """Whether somebody ended the program at the prompt."""
        self.is_detached = False
        """Whether somebody wants no more stops."""
        self.has_steps = True
        """Whether steps are counted; they are not where nothing is recorded."""

    # ---------------------------------------------------------------- where to stop

    @property
    def breakpoints(self) -> list[Breakpoint]:
        """The breakpoints that are set."""
        return self._points.everything

    def add(self, point: Breakpoint) -> None:
        """Set a breakpoint; from now on its kind costs something."""
        self._points.everything.append(point)
        if point.kind == "line":
            self._see_lines().add(point)
            return
        self._see_calls()
        if point.kind == "op" and self._ops is None:
            self._tell(_FUSED)
            self._ops = OpStop(self._see_op, lambda: self._points.of("op"), seen=self.unmet.operations)
            self._ops.start()
        if point.phase == UPDATE and not self._has_optimizer:
            self._has_optimizer = True
            self._patches.on_undo(register_optimizer_step_pre_hook(self._before_update).remove)
            self._patches.on_undo(register_optimizer_step_post_hook(self._after_update).remove)

    def close(self) -> None:
        """The training has ended: tell of places it never came to, and leave everything as it was found."""
        if not self.was_quit:
            self.unmet.close(self._points.everything)
        self.remove()

    def remove(self) -> None:
        """Leave torch and Python as they were found."""
        self._points.everything.clear()
        self._watched.clear()
        self._drop_handles()
        self._calls.undo()
        self._patches.undo()
        self._is_calling = self._has_optimizer = False
        if self._ops is not None:
            self._ops.stop()
        if self._lines is not None:
            self._lines.stop()
        self._ops = self._lines = None
        self._drop_listeners()

    def pause(self, reason: str) -> None:
        """Stop at the next model call or step, from whatever thread this is asked."""
        self._paused = reason
        if self._see_root not in self.recorder.on_root:
            self.recorder.on_root.append(self._see_root)
            self.recorder.on_end.append(self._see_end)

    def unpause(self) -> None:
        """Take back a pause that the training has not come to."""
        self._paused = ""

    def _see_lines(self) -> LineStop:
        if self._lines is None:
            self._lines = LineStop(self._see_line, self._see_next_line, tell=self._tell)
        return self._lines

    # ---------------------------------------------------------------- module calls

    def _see_calls(self) -> None:
        if not self._is_calling:
            self._is_calling = True
            self._calls.replace(torch.nn.Module, "_call_impl", self._make_call)

    def _make_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling = torch.compiler.is_compiling

        def _call_impl(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self._is_blind():
                return original(module, *args, **kwargs)
            return self._call(original, module, args, kwargs)

        return _call_impl

    def _is_blind(self) -> bool:
        """A forward that checkpointing repeats, one that is evaluated at the prompt, a forked copy: no stops there."""
        recorder = self.recorder
        return (
            self._thread.is_busy
            or recorder.is_off()
            or bool(recorder.in_backward)
            or os.getpid() != self._pid
        )

    def _call(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        stack = self._thread.stack
        call = Call(self._name(module), module, args, kwargs)
        if not stack:
            self._begin_root(call)
        stack.append(call)
        try:
            self._see_call(call, BEFORE, _MISSING)
            output = original(module, *args, **kwargs)
            call.site = self._name(module)  # the first call of a model is what gives it its names
            self._see_call(call, AFTER, output)
            self._hook_safely(call, output)
        finally:
            stack.pop()
        return output

    def _name(self, module: torch.nn.Module) -> str:
        entry = self.recorder.registry.modules.get(id(module))
        return entry.name if entry is not None else f"({type(module).__name__})"

    def _begin_root(self, call: Call) -> None:
        self.recorder.before_event()
        step = self.recorder.step
        if step not in self._steps_done:
            self._steps_done = {step}
            self._drop_handles()
            if step:
                self.unmet.check(self._points.everything)
            for point in self._points.of("step"):
                if point.number == step:
                    self.unmet.meet(point)
                if point.number == step and self._holds(point, {"module": call.module, "args": call.args}):
                    self._stop(
                        Stop(f"step {step} begins", call.site, "", extra=_names_of(call, BEFORE, _MISSING))
                    )

    def _see_call(self, call: Call, moment: str, output: Any) -> None:
        going, stack = self._going, self._thread.stack
        depth = len(stack)
        # What 'finish' waits for: a call that has ended is finished by the one around it.
        around = call if moment == BEFORE else stack[-2] if depth > 1 else None
        names = _names_of(call, moment, output)
        stop = Stop(f"{moment} {call.site} (forward)", call.site, FORWARD, extra=names)
        if (
            going.how == "step"
            or (going.how == "next" and depth <= going.depth)
            or (going.how == "finish" and moment == AFTER and call is going.call)
        ):
            self._stop(stop, call=around)
            return
        for point in self._points.of("site", FORWARD):
            if point.moment != moment or not point.matches(call.site):
                continue
            self.unmet.meet(point)
            if self._holds(point, names):
                self._stop(stop, point=point, call=around)
                return
        self._see_watched(stop, names)

    def _see_watched(self, stop: Stop, names: dict[str, Any]) -> None:
        watches = self._points.of("watch")
        around = names_around(live_frames()) if watches else {}
        for point in watches:
            value = self._evaluate(point, {**around, **names}, told=False)
            before = self._watched.get(point.text, _MISSING)
            if value is not _MISSING:
                self._watched[point.text] = value
            if value is not _MISSING and before is not _MISSING and differs(value, before):
                reason = f"{point.text} changed from {spell(before)} to {spell(value)}"
                self._stop(replace(stop, reason=reason))

    # ---------------------------------------------------------------- gradients and updates

    def _hook_safely(self, call: Call, output: Any) -> None:
        try:
            self._hook_gradients(call, output)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self.recorder.guard.fault(error, f"a breakpoint at {call.site}", step=self.recorder.step)

    def _hook_gradients(self, call: Call, output: Any) -> None:
        points = [point for point in self._points.of("site", BACKWARD) if point.matches(call.site)]
        for point in points:
            if point.moment == BEFORE:
                for _, leaf in walk(output):
                    if leaf.grad_fn is not None:
                        hook = self._make_arrival(point, call, leaf.output_nr)
                        self._handles.append(leaf.grad_fn.register_prehook(hook))
            else:
                self._hook_departure(point, call)

    def _make_arrival(self, point: Breakpoint, call: Call, index: int) -> Callable[..., None]:
        def arrive(gradients: tuple[torch.Tensor | None, ...]) -> None:
            gradient = gradients[index]
            if gradient is not None:
                self._see_gradient(point, call, gradient, "arrives at")

        return arrive

    def _hook_departure(self, point: Breakpoint, call: Call) -> None:
        own = [parameter for parameter in call.module.parameters(recurse=False) if parameter.requires_grad]
        given = [leaf for _, leaf in walk((call.args, call.kwargs)) if leaf.requires_grad]
        if not (given or own):
            return

        def leave(gradients: Any) -> None:
            found = [each for each in gradients if each is not None]
            self._see_gradient(point, call, found[0] if len(found) == 1 else tuple(found), "has passed")

        self._handles.append(torch.autograd.graph.register_multi_grad_hook((*given, *own), leave))

    def _see_gradient(self, point: Breakpoint, call: Call, gradient: Any, what: str) -> None:
        if self._thread.is_busy or point not in self._points.everything:
            return
        self.unmet.meet(point)
        names = {
            **_names_of(call, BEFORE, _MISSING),
            "out": gradient,
            "grad": gradient,
            "stats": Statistics(gradient),
        }
        if self._holds(point, names):
            title = f"the gradient {what} {call.site} (backward)"
            self._stop(Stop(title, call.site, BACKWARD, extra=names), point=point)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._see_update(optimizer, BEFORE)

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._see_update(optimizer, AFTER)

    def _see_update(self, optimizer: torch.optim.Optimizer, moment: str) -> None:
        if self._thread.is_busy or self.recorder.asleep:
            return
        points = [point for point in self._points.of("site", UPDATE) if point.moment == moment]
        for group in optimizer.param_groups if points else ():
            for parameter in group["params"]:
                entry = self.recorder.registry.tensors.get(id(parameter))
                name = entry.name if entry is not None else ""
                names = {
                    "out": parameter, "args": (parameter.grad,), "grad": parameter.grad, "site": name,
                    "stats": Statistics(parameter), "optimizer": optimizer, "module": None,
                }  # fmt: skip
                for point in (point for point in points if covers(point, name)):
                    self.unmet.meet(point)
                    if self._holds(point, names):
                        title = f"{moment} the update of {name}"
                        self._stop(Stop(title, name, UPDATE, extra=names), point=point)
                        return

    # ---------------------------------------------------------------- operations, lines, requests

    def _see_op(self, point: Breakpoint, name: str, names: dict[str, Any]) -> None:
        if self._thread.is_busy:
            return
        self.unmet.meet(point)
        site = self._thread.stack[-1].site if self._thread.stack else ""
        names = {**names, "site": site, "op": name}
        if self._holds(point, names):
            where = f" in {site}" if site else ""
            self._stop(Stop(f"{point.moment} {name}{where}", site, FORWARD, extra=names), point=point)

    def _see_line(self, point: Breakpoint, frame: FrameType) -> None:
        if self._thread.is_busy:
            return
        self.unmet.meet(point)
        if self._holds(point, {**frame.f_globals, **frame.f_locals}):
            self._stop(Stop(_place_of(frame), "", "", extra={}, frame=frame), point=point)

    def _see_next_line(self, frame: FrameType) -> None:
        self._stop(Stop(_place_of(frame), "", "", extra={}, frame=frame))

    def _see_root(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # In this order: a pause asked for meanwhile finds its listeners gone, or is found here.
        self._drop_listeners()
        reason, self._paused = self._paused, ""
        if reason:
            call = Call(self._name(module), module, args, kwargs)
            names = _names_of(call, AFTER, output)
            self._stop(Stop(f"after {call.site} (forward)", call.site, FORWARD, extra=names, reason=reason))

    def _see_end(self) -> None:
        # In this order: a pause asked for meanwhile finds its listeners gone, or is found here.
        self._drop_listeners()
        reason, self._paused = self._paused, ""
        if reason:
            self._stop(Stop(f"step {self.recorder.step} begins", "", "", extra={}, reason=reason))

    def _drop_listeners(self) -> None:
        for listeners, listener in (
            (self.recorder.on_root, self._see_root),
            (self.recorder.on_end, self._see_end),
        ):
            if listener in listeners:
                listeners.remove(listener)  # type: ignore[arg-type]

    # ---------------------------------------------------------------- stopping

    def stop_here(self, stop: Stop) -> None:
        """Stop now, in the thread that calls."""
        self._stop(stop)

    def _stop(self, stop: Stop, *, point: Breakpoint | None = None, call: Call | None = None) -> None:
        thread, clock = self._thread, self.recorder.clock
        if thread.is_busy:
            return
        if self._lines is not None:
            self._lines.wait_no_more()
        thread.is_busy = True
        before = clock.switch(REST)
        reason = stop.reason or (f"stopped by {point.text}" if point is not None else "")
        stack = thread.stack
        world = LiveWorld(self, stop, live_frames(stop.frame), reason, modules=[each.site for each in stack])
        try:
            with self.recorder.lock:
                how = self._talk(world)
        except Exception as error:  # noqa: BLE001 - ours to answer for, and the training must go on
            self.recorder.guard.fault(error, "a stop", step=self.recorder.step)
            how = "detach"
        finally:
            thread.is_busy = False
            clock.switch(before)
        if how == "next" and stop.frame is not None and self._see_lines().go_to_next(stop.frame):
            how = "continue"
        self._go_on(how, call)

    def _go_on(self, how: str, call: Call | None) -> None:
        # A call that was going on before anything was installed is not on the stack.
        depth = max(len(self._thread.stack), 1)
        self._going = _Going(how if how in ("step", "next", "finish") else "continue", depth, call)
        if self._going.how != "continue":
            self._see_calls()
        elif not self._points.everything:
            self._is_calling = False
            self._calls.undo()
        if how == "detach":
            self.is_detached = True
            self.remove()
        if how == "quit":
            self.was_quit = True
            self.remove()
            raise SystemExit(1)

    def _holds(self, point: Breakpoint, names: dict[str, Any]) -> bool:
        return point.condition is None or bool(self._evaluate(point, names))

    def _evaluate(self, point: Breakpoint, names: dict[str, Any], *, told: bool = True) -> Any:
        """Return what a condition says; one that fails is told and taken away, and the training stops there."""
        assert point.condition is not None
        self._thread.is_busy = True
        try:
            with undone():
                value = evaluate(point.condition, {"torch": torch, "step": self.recorder.step, **names})
                return bool(value) if told else _settle(value)
        except Exception as error:  # noqa: BLE001 - the user's own expression
            if not told:
                return _MISSING
            self._points.everything.remove(point)
            self._tell(f"clew: the breakpoint '{point.text}' is taken away: {type(error).__name__}: {error}")
            return True
        finally:
            self._thread.is_busy = False

    def _drop_handles(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _place_of(frame: FrameType) -> str:
    return f"at {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _settle(value: Any) -> Any:
    """A tensor is watched by its values, which the training may overwrite."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _names_of(call: Call, moment: str, output: Any) -> dict[str, Any]:
    names = {"args": call.args, "kwargs": call.kwargs, "module": call.module, "site": call.site}
    if moment == AFTER:
        names |= {"out": output, "stats": Statistics(output)}
    else:
        names |= {"stats": Statistics(call.args)}
    return names
