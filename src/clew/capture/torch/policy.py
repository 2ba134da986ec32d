"""What is done about a bad step or a watchpoint that fired, on request only: act, stop the script, leave the step out.

Everything else in this room leaves training as it is. This does not, and is installed only when it was asked for.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from clew.capture.torch.uncompiled import uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.settings import Settings
    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder
    from clew.model.finding import Finding

_MOST_NAMED: Final = 8


class Policy:
    """Acts in the training's own thread: on hits between two steps, on bad gradients before they are used.

    ``act`` is called with each hit when the settings say so; with ``stop`` the script ends instead.
    """

    def __init__(
        self,
        recorder: Recorder,
        optimizers: OptimizerLens,
        *,
        settings: Settings,
        tell: Callable[[str], None],
        act: Callable[[Finding], None] | None = None,
    ) -> None:
        self.recorder = recorder
        self.optimizers = optimizers
        wanted = settings.on_nonfinite
        self._stops = wanted == "stop"
        self._allowed = int(wanted.partition(":")[2]) if wanted.startswith("skip:") else 0
        self._on_hit = settings.on_hit if settings.watch else "log"
        self._act = act
        self._tell = tell
        self._hits: deque[Finding] = deque()
        self._reason = ""
        self._in_a_row = 0
        self.left_out: list[int] = []
        """Steps that were left out."""
        self.stopped = ""
        """Why the script was stopped, once it was."""

    @property
    def is_wanted(self) -> bool:
        """Whether anything was asked for."""
        return self._stops or bool(self._allowed) or self._on_hit != "log"

    def install(self, patches: Patches) -> None:
        """Begin to act."""
        # What is to be done about a hit is done before the next step, so no step waits to be handed over.
        self.recorder.prompt = self._on_hit != "log"
        patches.listen(self.recorder.on_trouble, self._see_trouble)
        patches.listen(self.recorder.on_end, self._between_steps)
        patches.listen(self.recorder.on_root, self._see_root)
        patches.on_undo(register_optimizer_step_pre_hook(self._before_step).remove)
        if self._allowed:
            patches.replace(torch.amp.GradScaler, "step", self._make_scaler_step)

    def take_hit(self, finding: Finding) -> None:
        """Keep a hit until the training's own thread comes by; records may arrive from another one."""
        self._hits.append(finding)

    def act_last(self) -> None:
        """The training is over: do for the last hits what can still be done."""
        if self._on_hit in ("call", "snapshot"):
            self._between_steps()

    def tell_all(self) -> list[str]:
        """Return what was done, as sentences for the summary."""
        count = len(self.left_out)
        steps = ", ".join(map(str, self.left_out[:_MOST_NAMED])) + (", …" if count > _MOST_NAMED else "")
        what = "1 step was" if count == 1 else f"{count} steps were"
        told = [f"{what} left out, with NaN or infinite gradients: {steps}"] if count else []
        return told + ([f"stopped {self.stopped}"] if self.stopped else [])

    # ---------------------------------------------------------------- hits

    def _between_steps(self, *_: Any) -> None:
        while self._hits:
            finding = self._hits.popleft()
            if self._on_hit == "stop":
                self._stop(f"{finding.rule} hit at step {finding.step}")
                self._end()
            if self._on_hit == "snapshot":
                self.recorder.flight.ask_snapshot(f"{finding.rule} at step {finding.step}")
            if self._act is not None:
                self._try(self._act, finding)

    def _try(self, act: Callable[[Finding], None], finding: Finding) -> None:
        try:
            act(finding)
        except Exception as error:  # noqa: BLE001 - a fault of the action must not end the training
            self._act = None
            self._tell(
                f"clew: {self._on_hit} on a hit failed and is not tried again: {type(error).__name__}: {error}"
            )
        # Time spent in a shell or a function is neither the training's nor clew's.
        self.recorder.clock.restart()

    # ---------------------------------------------------------------- stopping

    def _see_trouble(self, kind: str, name: str) -> None:
        if self._stops:
            what = f"the {kind}" if kind == name else f"the {kind} of {name}"
            self._stop(f"{what} is NaN or infinite")

    def _stop(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _see_root(self, *_: Any) -> None:
        # A loop without an optimizer, or a weight that the last step spoiled: there is no earlier place.
        if not self.recorder.losses:
            self._between_steps()
            if self._reason:
                self._end()

    def _end(self) -> None:
        reason, self._reason = self._reason, ""
        self._stops, self._allowed, self._on_hit = False, 0, "log"
        self._hits.clear()
        self.recorder.updating = 0
        self.stopped = f"at step {self.recorder.step}: {reason}"
        self._tell(f"clew: stopped {self.stopped}")
        raise SystemExit(1)

    # ---------------------------------------------------------------- leaving steps out

    @uncompiled
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self.recorder.is_off():
            return None
        self._between_steps()
        if self._reason:
            self._end()
        if not self._allowed or getattr(optimizer, "found_inf", None) is not None:
            return None  # a fused optimizer under GradScaler leaves bad steps out by itself
        closure = kwargs.get("closure") or next((each for each in args[1:] if callable(each)), None)
        if closure is None:
            self._leave_out(optimizer)
            return None
        judged = self._judge_closure(optimizer, closure)
        return tuple(judged if each is closure else each for each in args), {
            key: judged if each is closure else each for key, each in kwargs.items()
        }

    def _judge_closure(self, optimizer: torch.optim.Optimizer, closure: Any) -> Any:
        """Return a closure after which bad gradients are gone; it counts as one step however often it runs."""
        was_bad = False

        def judged(*args: Any, **kwargs: Any) -> Any:
            nonlocal was_bad
            result = closure(*args, **kwargs)
            was_bad = self._leave_out(optimizer, counts=not was_bad) or was_bad
            return result

        return judged

    def _leave_out(self, optimizer: torch.optim.Optimizer, *, counts: bool = True) -> bool:
        """Take bad gradients away: an optimizer leaves parameters without a gradient as they are."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if _are_finite([p.grad for p in parameters if p.grad is not None]):
            self._in_a_row = 0 if counts else self._in_a_row
            return False
        if counts:
            self._count_bad()
        for parameter in parameters:
            parameter.grad = None
        return True

    def _count_bad(self) -> None:
        self._in_a_row += 1
        if self._in_a_row > self._allowed:
            self._stop(
                f"{self._in_a_row} steps in a row had NaN or infinite gradients, {self._allowed} are allowed"
            )
            self._end()
        step = self.recorder.step
        self.left_out.append(step)
        self.recorder.add_scalar("nonfinite.skipped", 1.0)
        left = self._allowed - self._in_a_row
        self._tell(f"clew: step {step} is left out: NaN or infinite gradients; {left} more are allowed")

    def _make_scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Count what GradScaler leaves out, once it is not the scale's fault.

        With a large scale infinite gradients are its way to find the right one. At a scale of 1 or less they are
        as bad as without it.
        """

        def step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self.recorder.is_off():
                return original(scaler, optimizer, *args, **kwargs)
            before = self.optimizers.add(optimizer).steps
            result = original(scaler, optimizer, *args, **kwargs)
            was_left_out = self.optimizers.add(optimizer).steps == before
            is_judged = was_left_out and self._allowed
            if is_judged and scaler.is_enabled() and scaler.get_scale() <= 1:
                self._count_bad()
            return result

        return step


def _are_finite(gradients: list[torch.Tensor]) -> bool:
    dense = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    filled = [gradient for gradient in dense if gradient.numel()]
    # The largest magnitude: unlike a sum of squares it is infinite only where an element is.
    norms = torch._foreach_norm(filled, float("inf")) if filled else ()
    return all(bool(norm.isfinite()) for norm in norms)
