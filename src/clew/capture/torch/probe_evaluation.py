"""Notes how evaluation goes: the mean of the losses between two training steps, and when code is compiled again."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.gates import Gates
from clew.capture.torch.leaves import walk
from clew.capture.torch.probe_functions import replace_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder


_LOSSES: Final = (
    (torch._C._nn, ("cross_entropy_loss", "nll_loss_nd", "mse_loss", "l1_loss", "binary_cross_entropy")),
    (torch, ("binary_cross_entropy_with_logits",)),
)
"""What the losses of ``torch.nn.functional`` end in."""


class EvaluationProbe:
    """Sees losses that are computed without gradients, and the number of graphs that torch.compile has made."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._sum: torch.Tensor | None = None
        self._losses = 0
        self._step = -1
        self._graphs = 0
        self._has_outputs = False
        self._was_function = False

    def install(self, patches: Patches) -> None:
        """Begin to see root calls."""
        patches.listen(self.recorder.on_root, self._see)
        patches.listen(self.recorder.on_pass, self._see_pass)
        gates = Gates(self.recorder)
        for owner, names in _LOSSES:
            for name in names:
                replace_function(patches, owner, name, self._make_loss, gates.evaluate)
        patches.on_undo(self._finish)
        self.recorder.note("probe", {"probe": "evaluation"})

    def is_settled(self) -> bool:
        """Return whether nothing is compiled; a call without gradients wakes this."""
        return not self._graphs

    def _see(self, module: torch.nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._finish()
            return
        loss = None if self._was_function else _find_loss(module, output)
        self._was_function = False
        self._has_outputs = next(module.parameters(), None) is not None
        if loss is not None:
            self._add(loss)

    def _add(self, loss: torch.Tensor) -> None:
        value = loss.detach().double()
        self._sum = value if self._sum is None else self._sum + value
        self._losses += 1
        self._step = self.recorder.step

    def _make_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_dynamo_compiling, is_compiling = torch.compiler.is_dynamo_compiling, torch.compiler.is_compiling
        is_grad_enabled, recorder = torch.is_grad_enabled, self.recorder
        told = [self._see_function]

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if is_dynamo_compiling() or is_grad_enabled() or recorder.asleep or is_compiling():
                return result
            recorder.ask(told, result)
            return result

        return function

    def _see_function(self, result: Any) -> None:
        """Take the loss that a function gave after a model was called without gradients."""
        if type(result) is torch.Tensor and result.numel() == 1 and self._has_outputs:
            self._add(result)
            self._was_function = True

    def _finish(self) -> None:
        """Training goes on: the losses since the last step are one evaluation."""
        if self._sum is None:
            return
        value, self._sum = float(self._sum) / self._losses, None
        self.recorder.note("evaluation", {"loss": value, "batches": self._losses, "at": self._step})
        self._losses = 0

    def _see_pass(self, begins: bool) -> None:
        # Not at a root call: a compiled function has none.
        if begins:
            self._see_compiler()

    def _see_compiler(self) -> None:
        """Note that torch.compile has made more graphs since the last look."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return
        if not dynamo.counters:
            return  # nothing was compiled
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
