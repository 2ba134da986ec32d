"""Notes how evaluation goes: the mean of the losses between two training steps, and when code is compiled again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from clew.capture.torch.leaves import walk

if TYPE_CHECKING:
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder


class EvaluationProbe:
    """Sees losses that are computed without gradients, and the number of graphs that torch.compile has made."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._sum: torch.Tensor | None = None
        self._losses = 0
        self._step = -1
        self._graphs = 0

    def install(self, patches: Patches) -> None:
        """Begin to see root calls."""
        patches.listen(self.recorder.on_root, self._see)
        patches.on_undo(self._finish)
        self.recorder.note("probe", {"probe": "evaluation"})

    def _see(self, module: torch.nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._finish()
            self._see_compiler()
            return
        loss = _find_loss(module, output)
        if loss is not None:
            value = loss.detach().double()
            self._sum = value if self._sum is None else self._sum + value
            self._losses += 1
            self._step = self.recorder.step

    def _finish(self) -> None:
        """Training goes on: the losses since the last step are one evaluation."""
        if self._sum is None:
            return
        value, self._sum = float(self._sum) / self._losses, None
        self.recorder.note("evaluation", {"loss": value, "batches": self._losses, "at": self._step})
        self._losses = 0

    def _see_compiler(self) -> None:
        """Note that torch.compile has made more graphs since the last look."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return
        graphs = int(dynamo.counters["stats"]["unique_graphs"])
        if graphs != self._graphs:
            more, self._graphs = graphs - self._graphs, graphs
            self.recorder.note("compiled", {"graphs": graphs, "more": more})


def _find_loss(module: torch.nn.Module, output: Any) -> torch.Tensor | None:
    """Return the loss that a criterion or a model with a loss of its own gave, or None."""
    if isinstance(output, torch.Tensor):
        is_criterion = isinstance(module, torch.nn.modules.loss._Loss) or type(module).__name__.endswith(
            "Loss"
        )
        return output if is_criterion and output.numel() == 1 else None
    named = ((path, leaf) for path, leaf in walk(output) if path.strip("[].'\"").endswith("loss"))
    return next((leaf for _, leaf in named if leaf.numel() == 1), None)
