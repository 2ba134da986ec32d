"""Sees every backward: the loss at its root, and whether gradients belong to a loop without an optimizer."""

from __future__ import annotations

import functools
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from clew.capture.clock import BACKWARD, CLEW
from clew.capture.torch.gates import Gates
from clew.capture.torch.leaves import list_leaves, walk
from clew.capture.torch.patches import step_aside
from clew.capture.torch.recorder import KIND_LOSS
from clew.capture.torch.roots import is_transformed
from clew.capture.torch.unheard import ask_unheard, is_heard, let_hear
from clew.stats.readable import unheard
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.roots import Roots


class BackwardLens:
    """Turns calls of backward and autograd.grad into losses and phases."""

    def __init__(self, recorder: Recorder, roots: Roots, optimizers: OptimizerLens) -> None:
        self.recorder = recorder
        self.roots = roots
        self.optimizers = optimizers
        self._scaled: Callable[[], torch.Tensor | None] = lambda: None
        self._unscaled: torch.Tensor | None = None
        self.is_scaled = False
        """A GradScaler is in use: infinite gradients are its way to find the scale."""

    def install(self, patches: Patches) -> None:
        """Begin to see backward passes; ``Tensor.backward`` comes through the same function."""
        gate = functools.partial(
            Gates(self.recorder).differentiate,
            entries=self.optimizers.entries,
            fail=self._fail,
            finish=self._finish_quietly,
        )
        patches.replace(torch.autograd, "backward", self._make_backward, gate)
        patches.replace(torch.autograd, "grad", self._make_grad)
        patches.replace(torch.amp.GradScaler, "scale", self._make_scale)

    def _make_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder, owner = self.recorder, self.recorder.owner
        entries, known, flight = self.optimizers.entries, recorder.registry.tensors, recorder.flight
        begin_quietly, wants_loss = recorder.begin_pass, recorder.wants["loss"]

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.asleep or torch.compiler.is_compiling():
                return original(tensors, *args, **kwargs)
            if owner.thread != get_ident() and not owner.claim():
                return original(tensors, *args, **kwargs)
            if is_heard():
                return ask_unheard(self._differentiate, let_hear(original), tensors, args, kwargs)
            before, is_usual = -1, len(entries) == recorder.quiet_with and len(known) == flight.looked_at
            if is_usual and flight.usual_passes <= 1 and not owner.is_shared and tensors is not None:
                try:
                    before = begin_quietly(tensors if wants_loss else None, BACKWARD)
                except Exception as error:  # noqa: BLE001 - ours to answer for
                    self._fail(error)
            if before < 0:
                return self._differentiate(original, tensors, args, kwargs)
            try:
                result = original(tensors, *args, **kwargs)
            except BaseException:
                self._finish_quietly(tensors, before)
                raise
            is_ended = False
            try:
                is_ended = flight.end_pass(recorder, before)
            except Exception as error:  # noqa: BLE001 - ours to answer for
                self._fail(error)
            if not is_ended:
                self._finish_quietly(None, before)
            return result

        return backward

    def _fail(self, error: Exception) -> None:
        self.recorder.guard.fault(error, "backward", step=self.recorder.step)

    def _finish_quietly(self, failed: Any, before: int) -> None:
        """End a pass that began quietly and has more to tell; ``failed`` is the root of one that has raised."""
        if failed is not None:
            try:
                self._note_failure(failed)
            finally:
                self._end(before, is_root=True, is_whole=False)
            return
        try:
            self._end_root()
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._fail(error)
        finally:
            self.recorder.clock.switch(before)

    def _make_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.recorder.asleep or torch.compiler.is_compiling():
                return original(outputs, *args, **kwargs)
            # A gradient penalty asks for gradients inside a step; only a loop without an optimizer lives on it.
            is_alone = not self.optimizers.seen
            if not (self.recorder.owner.claim() if is_alone else self.recorder.owner.is_here()):
                return original(outputs, *args, **kwargs)
            # Inside a transform of torch.func it is the calls of the model that tell of steps.
            is_root = is_alone and not is_transformed() and not self._is_part(args, kwargs)
            if is_heard():
                heard = let_hear(original)
                return ask_unheard(self._differentiate, heard, outputs, args, kwargs, is_root=is_root)
            return self._differentiate(original, outputs, args, kwargs, is_root=is_root)

        return grad

    def _is_part(self, args: Any, kwargs: Any) -> bool:
        """Return whether derivatives are part of a loss, or of the data: those to be derived again, or by a batch."""
        try:
            if kwargs.get("create_graph", args[3] if len(args) > 3 else False):
                return True
            with unheard():
                inputs = {id(leaf) for leaf in list_leaves(kwargs.get("inputs", args[:1]))}
                calls = self.recorder.calls
                given = {id(leaf) for call in calls for leaf in list_leaves((call.args, call.kwargs))}
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._fail(error)
            return False
        return bool(inputs) and inputs <= given

    @step_aside
    def _differentiate(
        self, original: Callable[..., Any], tensors: Any, args: Any, kwargs: Any, *, is_root: bool = True
    ) -> Any:
        before, is_whole = self._begin(tensors, is_root=is_root), False
        try:
            result = original(tensors, *args, **kwargs)
            is_whole = True
            if result is not None and self.recorder.on_derived:
                self._tell_derived(args, kwargs, result)
            return result
        except BaseException:
            if is_root and self.recorder.in_backward == 1:
                self._note_failure(tensors)
            raise
        finally:
            self._end(before, is_root=is_root, is_whole=is_whole)

    def _tell_derived(self, args: Any, kwargs: Any, result: Any) -> None:
        recorder = self.recorder
        try:
            recorder.ask(recorder.on_derived, kwargs["inputs"] if "inputs" in kwargs else args[0], result)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, "derivatives", step=recorder.step)

    def _note_failure(self, tensors: Any) -> None:
        """A pass has raised; if the script bears with that, the loss of its next pass is the one of the step."""
        recorder, serial = self.recorder, self.recorder.serial
        try:
            with unheard():
                failed = sum(leaf.numel() == 1 for leaf in list_leaves(tensors))
        except Exception as error:  # noqa: BLE001 - ours to answer for, while another one is on its way
            recorder.guard.fault(error, "a backward that failed", step=recorder.step)
            return
        kept = max(0, recorder.losses - failed)

        def forget(begins: bool) -> None:
            if not begins:
                return
            recorder.on_pass.remove(forget)
            if recorder.serial == serial:
                recorder.forget_losses(kept)

        recorder.on_pass.append(forget)

    def _make_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            if self.recorder.is_off():
                return result
            if isinstance(outputs, torch.Tensor) and isinstance(result, torch.Tensor):
                self.is_scaled = scaler.is_enabled()
                self.recorder.quiet_with = -1
                self._scaled = weakref.ref(result)
                self.optimizers.outsiders.scaler = weakref.ref(scaler)
                with unheard():
                    self._unscaled = outputs.detach()
            return result

        return scale

    def _begin(self, tensors: Any, *, is_root: bool) -> int:
        """A pass begins; return the phase that it interrupts."""
        recorder = self.recorder
        before = recorder.clock.switch(CLEW)
        try:
            if not recorder.in_backward:
                if recorder.closing:
                    recorder.before_event()
                if is_root:
                    self._begin_root(tensors)
                elif recorder.on_grad:
                    recorder.ask(recorder.on_grad)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, "loss", step=recorder.step)
        except BaseException:  # an interrupt: there will be no pass
            recorder.clock.switch(before)
            raise
        recorder.in_backward += 1
        recorder.clock.switch(BACKWARD)
        return before

    def _begin_root(self, tensors: Any) -> None:
        recorder = self.recorder
        if not self.optimizers.entries:
            self.roots.end_bare_step(tensors)
        recorder.has_output = False
        if recorder.on_pass:
            recorder.ask(recorder.on_pass, True)
        losses = [tensors]
        if type(tensors) is not torch.Tensor:
            with torch._C.DisableTorchFunction():
                losses = [leaf for _, leaf in walk(tensors)]
        for loss in losses:
            if recorder.probing:
                recorder.ask(recorder.on_loss, loss)
            if recorder.on_each_loss:
                recorder.ask(recorder.on_each_loss, loss)
            if self._unscaled is not None and loss is self._scaled():
                loss, self._unscaled = self._unscaled, None  # noqa: PLW2901 - the loss before GradScaler
            if not recorder.wants["loss"]:
                continue
            number = KERNEL.read_number(loss) if KERNEL is not None else None
            if number is not None:
                recorder.take_loss(number)
            elif is_functorch_wrapped_tensor(loss):
                continue
            elif loss.numel() == 1:
                recorder.add_loss(loss)
            elif recorder.due:
                recorder.measure(loss, recorder.sites.add("loss", "loss"), KIND_LOSS)

    def _end(self, before: int, *, is_root: bool, is_whole: bool) -> None:
        recorder = self.recorder
        recorder.in_backward -= 1
        recorder.clock.switch(CLEW)
        try:
            if is_root and not recorder.in_backward:
                if is_whole:  # weights that are written by hand are not, after one that has raised
                    recorder.backward_at = recorder.serial
                self._end_root()
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, "end of backward", step=recorder.step)
        finally:
            recorder.clock.switch(before)

    def _end_root(self) -> None:
        recorder = self.recorder
        if recorder.on_pass:
            recorder.ask(recorder.on_pass, False)
        may_look = not self.is_scaled and not recorder.owner.is_shared
        if may_look and (name := recorder.flight.find_bad(of_gradients=True)):
            recorder.report_bad("gradient", name)
        is_by_hand = self.roots.by_hand.end_pass()
        recorder.flight.mark_backward(is_last=is_by_hand)
        is_loud = is_by_hand or self.roots.by_hand.is_expected
        recorder.quiet_with = len(self.optimizers.entries) if may_look and not is_loud else -1
