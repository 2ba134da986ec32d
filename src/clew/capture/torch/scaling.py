"""Sees gradient clipping and GradScaler: norms before clipping, the scale, and steps that were left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder


class ScalingLens:
    """Turns clipping and loss scaling into numbers of the step."""

    def __init__(self, recorder: Recorder, optimizers: OptimizerLens) -> None:
        self.recorder = recorder
        self.optimizers = optimizers

    def install(self, patches: Patches) -> None:
        """Begin to see clipping and scaling."""
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            patches.replace(owner, "clip_grad_norm_", self._make_clip_norm)
            patches.replace(owner, "clip_grad_value_", self._make_clip_value)
        patches.replace(torch.amp.GradScaler, "step", self._make_scaler_step)

    def _make_clip_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            norm = original(parameters, max_norm, *args, **kwargs)
            if not torch.compiler.is_compiling():
                self._note("clip.norm_before", norm)
                self._note("clip.limit", max_norm)
            return norm

        return clip_grad_norm_

    def _make_clip_value(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_value_(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> Any:
            result = original(parameters, clip_value, *args, **kwargs)
            if not torch.compiler.is_compiling():
                self._note("clip.value", clip_value)
            return result

        return clip_grad_value_

    def _make_scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self.recorder.is_off():
                return original(scaler, optimizer, *args, **kwargs)
            before = self._steps_of(optimizer)
            result = original(scaler, optimizer, *args, **kwargs)
            self._after_scaler(scaler, optimizer, was_skipped=self._steps_of(optimizer) == before)
            return result

        return step

    def _steps_of(self, optimizer: torch.optim.Optimizer) -> int:
        return self.optimizers.add(optimizer).steps

    def _after_scaler(self, scaler: Any, optimizer: torch.optim.Optimizer, *, was_skipped: bool) -> None:
        recorder = self.recorder
        try:
            if not scaler.is_enabled():
                return
            if was_skipped:
                self.optimizers.step_was_skipped(optimizer)
            recorder.add_scalar("scaler.scale", scaler.get_scale())
            recorder.add_scalar("scaler.skipped", float(was_skipped))
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, "GradScaler", step=recorder.step)

    def _note(self, name: str, value: Any) -> None:
        recorder = self.recorder
        if recorder.is_off():
            return
        try:
            recorder.add_scalar(name, value)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, name, step=recorder.step)
