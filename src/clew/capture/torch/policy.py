"""What is done about a bad step or a watchpoint that fired, on request only: stop the script, or leave the step out.

Everything else in this room leaves training as it is. This does not, and is installed only when it was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder


class Policy:
    """Ends the script, in the training's own thread, or takes bad gradients away before an optimizer uses them."""

    def __init__(
        self, recorder: Recorder, optimizers: OptimizerLens, *, on_nonfinite: str, tell: Callable[[str], None]
    ) -> None:
        self.recorder = recorder
        self.optimizers = optimizers
        self._stops = on_nonfinite == "stop"
        self._allowed = int(on_nonfinite.partition(":")[2]) if on_nonfinite.startswith("skip:") else 0
        self._tell = tell
        self._reason = ""
        self._skipped = 0

    def install(self, patches: Patches) -> None:
        """Begin to act."""
        patches.listen(self.recorder.on_trouble, self._see_trouble)
        patches.listen(self.recorder.on_root, self._see_root)
        patches.on_undo(register_optimizer_step_pre_hook(self._before_step).remove)

    def stop(self, reason: str) -> None:
        """End the script at its next step or model call, from whatever thread this is asked."""
        self._reason = self._reason or reason

    def _see_trouble(self, kind: str, name: str) -> None:
        if self._stops:
            what = f"the {kind}" if kind == name else f"the {kind} of {name}"
            self.stop(f"{what} is NaN or infinite")

    def _see_root(self, *_: Any) -> None:
        # A loop without an optimizer, or a weight that the last step spoiled: there is no earlier place.
        if self._reason and not self.recorder.losses:
            self._end()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.recorder.asleep:
            return
        if self._reason:
            self._end()
        if self._allowed and len(args) < 2 and not kwargs.get("closure"):
            self._leave_out(optimizer)

    def _leave_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Take bad gradients away: an optimizer leaves parameters without a gradient as they are."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if _are_finite([p.grad for p in parameters if p.grad is not None]):
            self._skipped = 0
            return
        self._skipped += 1
        if self._skipped > self._allowed:
            self.stop(
                f"{self._skipped} steps in a row had NaN or infinite gradients, {self._allowed} are allowed"
            )
            self._end()
        for parameter in parameters:
            parameter.grad = None
        self.recorder.add_scalar("nonfinite.skipped", 1.0)
        left = self._allowed - self._skipped
        self._tell(
            f"clew: step {self.recorder.step} is left out: NaN or infinite gradients; {left} more are allowed"
        )

    def _end(self) -> None:
        reason, self._reason = self._reason, ""
        self._stops, self._allowed = False, 0
        self.optimizers.depth = 0
        self._tell(f"clew: stopped at step {self.recorder.step}: {reason}")
        raise SystemExit(1)


def _are_finite(gradients: list[torch.Tensor]) -> bool:
    dense = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    return all(bool(gradient.isfinite().all()) for gradient in dense)
