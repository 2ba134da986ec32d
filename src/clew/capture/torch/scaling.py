"""Sees gradient clipping and GradScaler: norms before clipping, the scale, and steps that were left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from clew.stats.readable import undisturbed

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
        clip_grad = torch.nn.utils.clip_grad
        if hasattr(clip_grad, "_clip_grads_with_norm_"):
            # The part of clipping that torch looks up itself: the script may have imported the whole long before.
            patches.replace(clip_grad, "_clip_grads_with_norm_", self._make_clip)
            patches.replace(torch.nn.utils, "clip_grads_with_norm_", self._make_clip)
        for owner in (torch.nn.utils, clip_grad):
            if not hasattr(clip_grad, "_clip_grads_with_norm_"):
                patches.replace(owner, "clip_grad_norm_", self._make_clip_norm)
            patches.replace(owner, "clip_grad_value_", self._make_clip_value)
        patches.replace(torch.amp.GradScaler, "step", self._make_scaler_step)

    def _make_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # The names are torch's own: a caller may give them by keyword.
        def clip_grads_with_norm_(
            parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any
        ) -> Any:
            result = original(parameters, max_norm, total_norm, *args, **kwargs)
            if not torch.compiler.is_compiling():
                self._note("clip.norm_before", total_norm)
                self._note("clip.limit", max_norm)
            return result

        return clip_grads_with_norm_

    def _make_clip_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_norm_(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            norm = original(parameters, max_norm, *args, **kwargs)
            if not torch.compiler.is_compiling():
                self._note("clip.norm_before", norm)
                self._note("clip.limit", max_norm)
            return norm

        return clip_grad_norm_

    def _make_clip_value(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_value_(parameters: Any, clip_value: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(parameters, clip_value, *args, **kwargs)
            if not torch.compiler.is_compiling():
                self._note("clip.value", clip_value)
            return result

        return clip_grad_value_

    def _make_scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self.recorder.is_off():
                return original(scaler, optimizer, *args, **kwargs)
            before = self._count_steps()
            result = original(scaler, optimizer, *args, **kwargs)
            self._after_scaler(scaler, optimizer, has_stepped=self._count_steps() != before)
            return result

        return step

    def _count_steps(self) -> int:
        return sum(entry.steps for entry in self.optimizers.entries.values())

    def _after_scaler(self, scaler: Any, optimizer: torch.optim.Optimizer, *, has_stepped: bool) -> None:
        recorder = self.recorder
        try:
            if not scaler.is_enabled():
                return
            with undisturbed():
                skipped = _read_skipped(scaler, optimizer)
                if skipped is None:
                    skipped = not has_stepped
                if not has_stepped and skipped and (own := self._find_own(optimizer)) is not None:
                    self.optimizers.step_was_skipped(own)
                recorder.add_scalar("scaler.scale", scaler.get_scale())
                recorder.add_scalar("scaler.skipped", float(skipped))
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, "GradScaler", step=recorder.step)

    def _find_own(self, optimizer: Any) -> torch.optim.Optimizer | None:
        """Return the optimizer, or the known one inside a wrapper that only looks like one."""
        if isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        groups = getattr(optimizer, "param_groups", None)
        living = [entry.ref() for entry in self.optimizers.entries.values()]
        return next((one for one in living if one is not None and one.param_groups is groups), None)

    def _note(self, name: str, value: Any) -> None:
        recorder = self.recorder
        if recorder.is_off():
            return
        try:
            with undisturbed():
                recorder.add_scalar(name, value)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, name, step=recorder.step)


def _read_skipped(scaler: Any, optimizer: Any) -> bool | None:
    """Return whether the scaler found a gradient that is not finite; None where it does not tell.

    A fused optimizer steps all the same and leaves its weights alone, so that its hooks say nothing about it.
    """
    states = getattr(scaler, "_per_optimizer_states", None) or {}
    found = states[id(optimizer)].get("found_inf_per_device") if id(optimizer) in states else None
    return any(bool(value) for value in found.values()) if found else None
