"""What happens in a training loop besides calls and passes: optimizers made and stepped, gradients cleared and clipped,
losses scaled, loaders started, learning rates scheduled. Told to the probes, which keep the rest of torch out of it.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.utils import clip_grad

from clew.capture.clock import CLEW
from clew.capture.frame_variables import variables_of
from clew.capture.torch.gates import Gates
from clew.capture.torch.naming import user_frames
from clew.capture.torch.probe_signature import CLEARED, CLIPPED, SCALED, SCALER_STEP

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder

_OWN: Final = tuple(
    f"{path.parent}{os.sep}" for path in (Path(torch.__file__), Path(__file__).resolve().parents[1])
)
_PACKAGES: Final = ("site-packages", "dist-packages", str(Path(sys.base_prefix) / "lib" / "python"))


class Known:
    """What is known of an optimizer: the user's name for it, its class, the line that made it."""

    __slots__ = ("name", "ref", "source", "type")

    def __init__(self, ref: weakref.ref[torch.optim.Optimizer]) -> None:
        self.ref = ref
        self.name = ""
        self.type = ""
        self.source = ""

    def tell(self) -> dict[str, str]:
        """Return it as the fields that every note about an optimizer has."""
        return {"optimizer": self.name or self.type, "type": self.type, "made": self.source}


class LoopEvents:
    """Listens to torch's optimizers, schedulers, scalers and loaders on behalf of the probes.

    A listener that fails is told of and not called again; what it saw goes on undisturbed.
    """

    def __init__(self, recorder: Recorder, optimizers: OptimizerLens) -> None:
        self.recorder = recorder
        self.optimizers = optimizers
        self.on_made: list[Callable[[torch.optim.Optimizer], None]] = []
        """An optimizer was made."""
        self.on_stepping, self.on_stepped = recorder.on_stepping, recorder.on_stepped
        self.on_cleared: list[Callable[[Any], None]] = []
        """``zero_grad`` of an optimizer or a module was called."""
        self.on_clipped: list[Callable[[list[torch.Tensor], Any], None]] = []
        """Gradients are about to be clipped, with their total norm."""
        self.on_scaled: list[Callable[[Any], None]] = []
        """A GradScaler has scaled a loss."""
        self.on_scaler_step: list[Callable[[Any, torch.optim.Optimizer, bool], None]] = []
        """A GradScaler begins (True) or ends (False) the step of an optimizer."""
        self.on_scheduler: list[Callable[[Any], None]] = []
        """A learning-rate scheduler was made, or set to its start again."""
        self.on_restored: list[Callable[[Any], None]] = []
        """The state of a scheduler was loaded."""
        self.on_loader: list[Callable[[Any, Any], None]] = []
        """A data loader begins to give batches, through an iterator."""
        self._known: dict[int, Known] = {}
        self._at_making = [self._note_line]

    def install(self, patches: Patches) -> None:
        """Begin to listen."""
        self.optimizers.events = self
        patches.on_undo(self._leave)
        patches.replace(torch.optim.Optimizer, "__init__", self._make_init)
        listen = Gates(self.recorder).listen

        def gate(original: Any, general: Any) -> Any:
            return listen(original, general, self.recorder.signing, self.on_cleared)

        for owner in (torch.optim.Optimizer, torch.nn.Module):
            patches.replace(owner, "zero_grad", self._make_zero_grad, gate)
        if hasattr(clip_grad, "_clip_grads_with_norm_"):
            # Inside torch's own function: seen under every name it was imported by, and its warnings stay in place.
            patches.replace(clip_grad, "_clip_grads_with_norm_", self._make_clip)
        patches.replace(torch.amp.GradScaler, "scale", self._make_scale)
        patches.replace(torch.amp.GradScaler, "step", self._make_scaler_step)
        schedulers = torch.optim.lr_scheduler
        patches.replace(schedulers.LRScheduler, "_initial_step", self._make_scheduler)
        patches.replace(schedulers.ReduceLROnPlateau, "_reset", self._make_scheduler)
        for kind in (schedulers.LRScheduler, schedulers.SequentialLR, schedulers.ReduceLROnPlateau):
            if "load_state_dict" in vars(kind):
                patches.replace(kind, "load_state_dict", self._make_restored)
        patches.replace(torch.utils.data.DataLoader, "__iter__", self._make_iter)

    def tell(self, listeners: list[Any], *what: Any) -> None:
        """Call the listeners, on clew's own time."""
        recorder = self.recorder
        if not listeners or recorder.is_off():
            return
        before = recorder.clock.switch(CLEW)
        recorder.ask(listeners, *what)
        recorder.clock.switch(before)

    def know(self, optimizer: torch.optim.Optimizer) -> Known:
        """Return what the user calls an optimizer and where it was made, as far as that was seen."""
        key = id(optimizer)
        known = self._known.get(key)
        if known is None:
            table = self._known
            known = table[key] = Known(weakref.ref(optimizer, lambda _: table.pop(key, None)))
            known.type = type(optimizer).__name__
        if not known.name:
            known.name = find_name(optimizer)
        return known

    # ---------------------------------------------------------------- optimizers

    def _leave(self) -> None:
        self.optimizers.events = None

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Tell of an optimizer that is about to step."""
        for signature in self.recorder.signing:
            try:
                signature.see_stepping(optimizer)
            except Exception as error:  # noqa: BLE001 - ours to answer for
                self.fail(error)
        if self.on_stepping:
            self.tell(self.on_stepping, optimizer, _has_closure(args, kwargs))

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Tell of an optimizer that has stepped."""
        self.tell(self.on_stepped, optimizer, _has_closure(args, kwargs))

    def fail(self, error: Exception) -> None:
        """Answer for a fault of whoever is told by the shortest way, and tell it no more."""
        self.recorder.signing.clear()
        self.recorder.turns = None
        self.recorder.guard.fault(error, "signature of the loop", step=self.recorder.step)

    def _note_line(self, optimizer: torch.optim.Optimizer) -> None:
        self.know(optimizer).source = find_line(optimizer)

    def _make_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __init__(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(optimizer, *args, **kwargs)
            self.tell(self._at_making, optimizer)
            self.tell(self.on_made, optimizer)

        return __init__

    def _make_zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_dynamo_compiling = torch.compiler.is_dynamo_compiling

        @functools.wraps(original)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(owner, *args, **kwargs)
            result = original(owner, *args, **kwargs)
            for signature in self.recorder.signing:
                signature.see(CLEARED)
            if self.on_cleared:
                self.tell(self.on_cleared, owner)
            return result

        return zero_grad

    def _make_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _clip_grads_with_norm_(
            parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if not torch.compiler.is_compiling() and isinstance(parameters, list):
                for signature in self.recorder.signing:
                    signature.see(CLIPPED)
                self.tell(self.on_clipped, parameters, total_norm)
            return original(parameters, max_norm, total_norm, *args, **kwargs)

        return _clip_grads_with_norm_

    # ---------------------------------------------------------------- scaling, schedules, data

    def _make_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            for signature in self.recorder.signing:
                signature.see(SCALED)
            self.tell(self.on_scaled, scaler)
            return result

        return scale

    def _make_scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            for signature in self.recorder.signing:
                signature.see(SCALER_STEP)
            self.tell(self.on_scaler_step, scaler, optimizer, True)
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                self.tell(self.on_scaler_step, scaler, optimizer, False)

        return step

    def _make_scheduler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def begin(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scheduler, *args, **kwargs)
            self.tell(self.on_scheduler, scheduler)
            return result

        return begin

    def _make_restored(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_state_dict(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scheduler, *args, **kwargs)
            self.tell(self.on_restored, scheduler)
            return result

        return load_state_dict

    def _make_iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __iter__(loader: Any) -> Any:  # noqa: N807
            iterator = original(loader)
            self.tell(self.on_loader, loader, iterator)
            return iterator

        return __iter__


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether ``step`` was given a closure; the hook gets the optimizer itself as the first argument."""
    if len(args) == 1 and not kwargs:
        return False
    return kwargs.get("closure") is not None or any(callable(value) for value in args[1:])


def find_line(without: object = None) -> str:
    """Return ``file:line`` of the user's innermost line, before that of a library; ``without`` is no user."""
    fallback = ""
    for frame in user_frames():
        if without is not None and variables_of(frame).get("self") is without:
            continue
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if not is_library(frame.f_code.co_filename):
            return line
        fallback = fallback or line
    return fallback


def is_library(file: str) -> bool:
    """Return whether a file belongs to Python, an installed package or clew, and not to the user."""
    return file.startswith(_OWN) or any(package in file for package in _PACKAGES)


def find_name(thing: object) -> str:
    """Return what the user's frames call an object, ``self.name`` included, or nothing."""
    for frame in user_frames():
        names = dict(variables_of(frame))
        owner = names.pop("self", None)
        found = [str(name) for name, value in names.items() if value is thing]
        found += (
            [str(name) for name, value in vars(owner).items() if value is thing] if _has_names(owner) else []
        )
        if found:
            return found[0]
    return ""


def _has_names(owner: object) -> bool:
    return isinstance(getattr(owner, "__dict__", None), dict)
