"""Notes the exception that ends a training, with the operands of the loss it was raised in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.leaves import list_leaves, walk
from clew.capture.torch.probe_events import is_library
from clew.capture.torch.probe_learns import has_parameters

if TYPE_CHECKING:
    from types import FrameType

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder

_LONGEST: Final = 400
_FIRST_STEPS: Final = 20
_LOSSES: Final = (
    "cross_entropy", "nll_loss", "nll_loss_nd", "binary_cross_entropy", "binary_cross_entropy_with_logits", "one_hot",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
)  # fmt: skip
_TARGETS: Final = ("target", "tensor")


class ErrorProbe:
    """Looks at the frames of an exception before they are gone."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._inputs: list[torch.Size] = []

    def install(self, patches: Patches) -> None:
        """Begin to wait for an exception."""
        patches.listen(self.recorder.on_root, self._see_root)
        patches.listen(self.recorder.on_error, self._see)
        self.recorder.note("probe", {"probe": "error"})

    def _see_root(self, module: torch.nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
        if self.recorder.step >= _FIRST_STEPS:
            self.recorder.on_root.remove(self._see_root)
        elif has_parameters(module):
            is_one = len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor and not args[0].is_nested
            leaves = args if is_one else list_leaves((args, kwargs))
            self._inputs = [leaf.shape for leaf in leaves[:8]]

    def _see(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            return
        frames = _list_frames(error)
        users = [frame for frame in frames if not is_library(frame[0].f_code.co_filename)]
        last, line = users[-1] if users else (None, 0)
        self.recorder.note(
            "error",
            {
                "type": type(error).__name__,
                "message": str(error)[:_LONGEST],
                "source": f"{last.f_code.co_filename}:{line}" if last is not None else "",
                "after_forward": self.recorder.has_output,
                "inputs": [list(shape) for shape in self._find_inputs()] if self.recorder.has_output else [],
                "batch": [list(leaf.shape) for _, leaf in walk(self.recorder.flight.last_batch)][:8],
                **_find_operands([frame for frame, _ in frames]),
            },
        )

    def _find_inputs(self) -> list[torch.Size]:
        """Return the shapes of what the model was given last: in this step, or in the first ones."""
        for call in reversed(self.recorder.calls):
            if has_parameters(call.module):
                return [leaf.shape for leaf in list_leaves((call.args, call.kwargs))[:8]]
        return self._inputs


def _list_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames


def _find_operands(frames: list[FrameType]) -> dict[str, Any]:
    """Return what a loss of torch was given when it raised: shapes, and the range of the targets."""
    for frame in frames:
        name = frame.f_code.co_name
        if name not in _LOSSES or "torch" not in frame.f_code.co_filename:
            continue
        given = frame.f_locals.get("input")
        targets = next((frame.f_locals[key] for key in _TARGETS if key in frame.f_locals), None)
        if isinstance(targets, torch.Tensor):
            return {"function": name, **_tell_operands(given, targets)}
    return {}


def _tell_operands(given: Any, targets: torch.Tensor) -> dict[str, Any]:
    told: dict[str, Any] = {"target_shape": list(targets.shape), "target_dtype": str(targets.dtype)}
    if isinstance(given, torch.Tensor):
        told["input_shape"] = list(given.shape)
        told["classes"] = given.shape[1] if given.dim() > 1 else given.shape[0] if given.dim() else 0
    if targets.numel() and targets.device.type == "cpu" and not targets.is_complex():
        told["target_min"], told["target_max"] = float(targets.min()), float(targets.max())
    return told
