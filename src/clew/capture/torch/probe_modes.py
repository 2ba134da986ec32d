"""Notes in which mode models are called: trained in eval mode, validated in train mode, evaluated with a graph."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.leaves import list_leaves
from clew.capture.torch.probe_events import find_line
from clew.capture.torch.probe_sensitive import find_sensitive
from clew.capture.torch.probe_validation import Fed, Validation

if TYPE_CHECKING:
    from types import FrameType

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

_EVAL_CALLS: Final = 10
_EVAL_STEPS: Final = (1, 2, 3)
_CHAIN_STEPS: Final = 100
_MOST_ROOTS: Final = 64
_CHECKPOINT_FILE: Final = str(Path(torch.__file__).parent / "utils" / "checkpoint.py")
_CHECKPOINT_FRAMES: Final = 16


class Root:
    """A model that is called by the loop: how, since its own optimizer stepped."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.ref = weakref.ref(module)
        self.name = ""
        self.is_trained = False
        self.is_inner = False
        self.steps_in_training = 0
        self.steps_in_eval = 0
        self.training_calls = 0
        self.eval_calls = 0
        self.eval_run = 0
        self.eval_total = 0
        self.eval_line = ""
        self.is_told = False
        self.validation = Validation()
        self.owners: dict[int, bool] = {}


class ModeProbe:
    """Follows the roots of a loop: called with or without gradients, in train or eval mode, before which step."""

    def __init__(self, recorder: Recorder, events: LoopEvents) -> None:
        self.recorder = recorder
        self.events = events
        self._roots: dict[int, Root | None] = {}
        self._keys: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._awaiting: list[Root] = []
        """Roots that were called to be trained since a step of their own."""
        self._fed = Fed()

    def install(self, patches: Patches) -> None:
        """Begin to follow root calls."""
        patches.listen(self.recorder.on_root, self._see_root)
        patches.listen(self.recorder.on_pass, self._see_pass)
        patches.listen(self.recorder.on_grad, self._see_use)
        patches.listen(self.recorder.on_batch, self._see_batch)
        patches.listen(self.events.on_stepping, self._see_stepping)
        patches.listen(self.events.on_stepped, self._see_stepped)
        patches.on_undo(self._finish)
        self.recorder.note("probe", {"probe": "modes"})

    # ---------------------------------------------------------------- what happens

    def _see_root(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        root = self.find(module)
        if root is None or self.recorder.in_backward:
            return
        if not torch.is_grad_enabled():
            if module.training and not root.validation.is_done and not _is_checkpointed():
                root.validation.add_quiet(module, args, kwargs, fed=self._fed)
            return
        if not any(leaf.requires_grad for leaf in list_leaves(output)):
            return
        if module.training:
            root.training_calls += 1
            root.eval_total += root.eval_run
            root.eval_run = 0
            self._close_validation(root, args, kwargs)
            if root.steps_in_training < _CHAIN_STEPS:
                self._see_chain(root, args)
        else:
            self._see_eval(root)

    def _see_eval(self, root: Root) -> None:
        """A forward in eval mode that keeps its graph; legal when a backward follows."""
        root.eval_calls += 1
        root.eval_run += 1
        if root.is_told:
            return
        if root.eval_run == 2:
            root.eval_line = find_line()
        if root.is_trained and root.eval_total + root.eval_run >= _EVAL_CALLS:
            root.is_told = True
            self.recorder.note(
                "graph-in-eval",
                {
                    "root": self.name(root),
                    "calls": root.eval_total + root.eval_run,
                    "source": root.eval_line,
                },
            )

    def _see_chain(self, root: Root, args: Any) -> None:
        """A model that is given what another one made: that one's output is no prediction."""
        if any(leaf.grad_fn is not None for leaf in list_leaves(args)):
            for other in self._awaiting:
                other.is_inner = other.is_inner or other is not root
        if root not in self._awaiting:
            self._awaiting.append(root)

    def _see_pass(self, begins: bool) -> None:
        if begins:
            self._see_use()

    def _see_use(self) -> None:
        """The graphs of the newest calls are used."""
        for root in self._living():
            root.eval_run = 0

    def _see_batch(self, iterator: Any, batch: Any) -> None:
        self._fed.dataset, self._fed.batch = id(getattr(iterator, "_dataset", None)), batch

    # ---------------------------------------------------------------- steps

    def wake(self) -> None:
        """Count the calls of the present step only: those before it were told of here and there."""
        for root in self._living():
            root.training_calls = root.eval_calls = 0

    def is_settled(self) -> bool:
        """Return True: a call in another mode wakes this."""
        return True

    def _see_stepping(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if not has_closure:
            self._judge_step(optimizer)

    def _see_stepped(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if has_closure:
            self._judge_step(optimizer)

    def _judge_step(self, optimizer: torch.optim.Optimizer) -> None:
        for root in self._living():
            if not self._trains(optimizer, root):
                continue
            root.is_trained = True
            if root.training_calls:
                root.steps_in_training += 1
            elif root.eval_calls:
                root.steps_in_eval += 1
                if root.steps_in_eval in _EVAL_STEPS:
                    self._tell_eval_step(root)
            root.training_calls = root.eval_calls = 0
            if root in self._awaiting:
                self._awaiting.remove(root)

    def _tell_eval_step(self, root: Root) -> None:
        module = root.ref()
        if module is None or module.training:
            return
        parameters = list(module.parameters())
        self.recorder.note(
            "step-in-eval",
            {
                "root": self.name(root),
                "count": root.steps_in_eval,
                "steps_in_training": root.steps_in_training,
                "sensitive": find_sensitive(module, training=False)[:6],
                "trainable_share": sum(p.requires_grad for p in parameters) / max(len(parameters), 1),
                "source": find_line(),
            },
        )

    def _close_validation(self, root: Root, args: Any, kwargs: Any) -> None:
        may_judge = root.is_trained and not root.is_inner
        found = root.validation.close(
            args, kwargs, fed=self._fed, step=self.recorder.step, may_judge=may_judge
        )
        if found is not None:
            self._tell_validation(root, found)

    def _tell_validation(self, root: Root, found: dict[str, Any]) -> None:
        module = root.ref()
        sensitive = find_sensitive(module, training=True) if module is not None else []
        if sensitive:
            self.recorder.note(
                "validation-in-train", {"root": self.name(root), "sensitive": sensitive[:6], **found}
            )

    def _finish(self) -> None:
        self._fed = Fed()
        for root in self._living():
            self._close_validation(root, (), {})

    # ---------------------------------------------------------------- roots

    def find(self, module: torch.nn.Module) -> Root | None:
        """Return what is known of a root; nothing for one without parameters, such as a criterion."""
        key = id(module)
        known = self._keys.get(key)
        if known is None or known() is not module:
            self._forget_dead()
            self._keys[key] = weakref.ref(module)
            self._roots[key] = Root(module) if next(module.parameters(), None) is not None else None
        return self._roots[key]

    def _forget_dead(self) -> None:
        if len(self._keys) > _MOST_ROOTS:
            for key in [key for key, ref in self._keys.items() if ref() is None]:
                del self._keys[key], self._roots[key]

    def _living(self) -> list[Root]:
        return [root for root in self._roots.values() if root is not None and root.ref() is not None]

    def _trains(self, optimizer: torch.optim.Optimizer, root: Root) -> bool:
        """Return whether an optimizer holds a parameter of a root; looked up once for each pair."""
        found = root.owners.get(id(optimizer))
        if found is None or (not found and root.training_calls + root.eval_calls):
            module = root.ref()
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            found = module is not None and any(id(p) in held for p in module.parameters())
            root.owners[id(optimizer)] = found
        return found

    def name(self, root: Root) -> str:
        """Return what the record calls a root."""
        module = root.ref()
        entry = self.recorder.registry.modules.get(id(module))
        return entry.name if entry is not None else type(module).__name__


def _is_checkpointed() -> bool:
    """Return whether activation checkpointing has called the module: it does so without gradients, to train it."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_CHECKPOINT_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False
