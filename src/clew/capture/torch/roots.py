"""Root calls: which model is this, does a step begin or end with it, what batch goes in."""

from __future__ import annotations

import weakref
from collections import Counter
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.utils.parametrize import ParametrizationList

from clew.capture.torch.by_hand import ByHand
from clew.capture.torch.leaves import walk
from clew.capture.torch.naming import find_holders, find_owner
from clew.capture.torch.registry import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.batches import BatchLens
    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.registry import ModuleEntry, Tree

_MOST_NODES: Final = 1000
_EVAL_CALLS: Final = 1
"""Root calls in evaluation that are recorded between two steps; a validation pass is not worth more."""


class Roots:
    """Knows the models of a training; with explicit models, nothing else is looked at."""

    def __init__(self, recorder: Recorder, optimizers: OptimizerLens, batches: BatchLens) -> None:
        self.recorder = recorder
        self.optimizers = optimizers
        self.batches = batches
        self.by_hand = ByHand(recorder, optimizers)
        self.explicit = False
        self._differentiated: Callable[[], torch.Tensor | None] = lambda: None
        self._differentiated_at = -1
        self._bare: tuple[Callable[[], torch.Tensor | None], int] = (lambda: None, 0)
        self._called: dict[int, int] = {}
        self._eval_calls = 0
        self._serial = -1
        self._foreign: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._callers: dict[int, int] = {}
        recorder.owner.on_claimed = self._keep_own

    def watch(self, models: list[tuple[str, torch.nn.Module]]) -> None:
        """Look at these models and no others."""
        self.explicit = True
        for name, model in models:
            self.recorder.registry.add_tree(model, f"{name}." if len(models) > 1 else "", title=name)

    def may_call(self, module: torch.nn.Module) -> bool:
        """Return whether a root call of this thread is looked at, in whatever thread the training goes on."""
        recorder, owner = self.recorder, self.recorder.owner
        if owner.is_here():
            if not owner.thread:
                self._callers[id(module)] = get_ident()
            return True
        if not (getattr(module, "training", False) and torch.is_grad_enabled()):
            return False  # a look at the model from outside the loop
        # A pool gives the steps of one loop to any of its threads: no step has begun, and the model is the same.
        has_begun = recorder.in_backward or (not recorder.closing and (recorder.losses or recorder.calls))
        if owner.has_rivals or has_begun or id(module) not in recorder.registry.modules:
            owner.has_rivals = True
            return False
        owner.hand_to_me()
        return True

    def _keep_own(self) -> None:
        """This thread has begun to train: forget the models that only other threads have called so far."""
        me, callers = get_ident(), self._callers
        self._callers = {}
        own = {key for key, thread in callers.items() if thread == me}
        if len(own) == len(callers):
            return
        registry = self.recorder.registry
        try:
            for tree in list(registry.living_trees()):
                top = tree.ref()
                inside = {id(module) for module in top.modules()} if top is not None else set()
                if inside & callers.keys() and not inside & own:
                    registry.forget_tree(tree)
            self.recorder.calls = [
                call for call in self.recorder.calls if id(call.module) in registry.modules
            ]
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self.recorder.guard.fault(error, "models of other threads", step=self.recorder.step)

    def begin(self, module: torch.nn.Module, args: Any, kwargs: Any, *, tag: int) -> bool:
        """Take note of a root call that starts now; return whether what happens inside is recorded."""
        recorder = self.recorder
        if recorder.in_backward:
            return recorder.due
        if recorder.closing:
            recorder.before_event()
        elif not recorder.has_begun:
            recorder.begin()
        key = id(module)
        if key in self._foreign:
            return False
        if not self.explicit:
            # Before this model is known: its optimizer has nothing to do with the step.
            self._end_by_call(module, tag)
        entry = recorder.registry.modules.get(key) or self._discover(module)
        if entry is None:
            return False
        if recorder.backward_at == recorder.serial or not self.optimizers.entries:
            self._end_implicit_step(module, tag)
        if self._serial != recorder.serial:
            # The calls so far have come by the short way, or there were none.
            self._serial, self._eval_calls = recorder.serial, 0
            self._called = dict(Counter(id(call.module) for call in recorder.calls))
        self._called[key] = self._called.get(key, 0) + 1
        has_gradients = torch.is_grad_enabled()
        if not tag and has_gradients:
            recorder.flight.add_call(module, args, kwargs)
        if not recorder.due or ((tag or not has_gradients) and self._is_enough_evaluation()):
            return False
        if recorder.wants["batch"]:
            with torch._C.DisableTorchFunction():  # a batch may be of a class that hears what it is asked
                self.batches.record(entry, args, kwargs, tag=tag)
        return True

    def adopt(self, module: torch.nn.Module) -> ModuleEntry:
        """Name a module that ran inside a root but is in no tree: made later, or kept in a plain list."""
        registry = self.recorder.registry
        for tree in list(registry.trees):
            registry.refresh(tree)
        entry = registry.modules.get(id(module))
        return entry or registry.add_module(module, f"<{type(module).__name__}>", None)

    def end_manual_step(self, *, by_proof: bool = False) -> None:
        """End the step of a loop that updates its weights by hand, with no optimizer to tell."""
        if self.recorder.backward_at == self.recorder.serial and self.by_hand.has_ended(by_proof=by_proof):
            self.by_hand.end_step()
            self.recorder.mark_end()
            self.recorder.before_event()

    def end_bare_step(self, losses: Any) -> None:
        """End the step of a loop that trains bare tensors, with neither a module nor an optimizer to tell.

        Its next step begins with a backward to tensors that have been written or cleared since the last one.
        """
        if self.optimizers.seen or self.recorder.registry.trees:
            return
        leaf = next((found for _, loss in walk(losses) if (found := _find_leaf(loss)) is not None), None)
        known, version = self._bare
        is_same = leaf is not None and known() is leaf and version == leaf._version and leaf.grad is not None
        if leaf is not None:
            self._bare = weakref.ref(leaf), leaf._version
        if not is_same:
            self.end_manual_step()

    def end_last_step(self) -> None:
        """The recording ends, and with it the last step of a loop in which nothing else tells."""
        self.end_manual_step(by_proof=self.recorder.was_cut_off)
        was_called = self._serial == self.recorder.serial and bool(self._called)
        if was_called and (not self._is_trained or self._differentiated_at == self._serial):
            self.recorder.end_step()

    # ---------------------------------------------------------------- steps without an optimizer

    def _end_by_call(self, module: torch.nn.Module, tag: int) -> None:
        """End a step by hand where a call tells that it is over."""
        if self.recorder.backward_at != self.recorder.serial:
            return
        # Else it may be a search along a line, which writes the weights again.
        if tag or torch.is_grad_enabled():
            self.end_manual_step(by_proof=not _may_train(module, tag))

    def _end_implicit_step(self, module: torch.nn.Module, tag: int) -> None:
        self._end_by_call(module, tag)
        if self.recorder.backward_at == self.recorder.serial or self.optimizers.seen:
            return
        is_inside = is_transformed()
        if is_inside and (parameter := _find_differentiated(module)) is not None:
            self._end_functional_step(parameter)
            return
        again = self._serial == self.recorder.serial and id(module) in self._called
        if not again or self._is_trained:
            return
        if tag or not torch.is_grad_enabled() or is_inside:
            self.recorder.end_step()

    def _end_functional_step(self, parameter: torch.Tensor) -> None:
        """A transform differentiates by the weights: that is a step, however often it calls the model."""
        if self._differentiated() is parameter:
            return
        if self._differentiated_at == self.recorder.serial:
            self.recorder.end_step()
        self._differentiated, self._differentiated_at = weakref.ref(parameter), self.recorder.serial

    @property
    def _is_trained(self) -> bool:
        """Whether anything was trained until now."""
        return self.optimizers.seen or max(self.recorder.backward_at, self._differentiated_at) >= 0

    def _is_enough_evaluation(self) -> bool:
        if not self._is_trained:
            return False
        self._eval_calls += 1
        return self._eval_calls > _EVAL_CALLS * max(1, len(self._called))

    # ---------------------------------------------------------------- discovery

    def _discover(self, module: torch.nn.Module) -> ModuleEntry | None:
        registry = self.recorder.registry
        inner = unwrap(module)
        known = registry.modules.get(id(inner))
        if known is not None:
            self._note_compiled(module, known.name)
            registry.modules[id(module)] = known
            return known
        if self.explicit:
            key = id(module)
            self._foreign[key] = weakref.ref(module, lambda _: self._foreign.pop(key, None))
            return None
        found = find_owner(module)
        self._add_model(found.top, found.name or type(inner).__name__)
        return registry.modules.get(id(module))

    def discover_holders(self, parameters: list[torch.Tensor]) -> None:
        """Name the models that hold these parameters: a closure calls them only inside the optimizer's step."""
        registry = self.recorder.registry
        if all(registry.owns(parameter) for parameter in parameters):
            return
        for tree in list(registry.living_trees()):
            registry.refresh(tree)
        if self.explicit or all(registry.owns(parameter) for parameter in parameters):
            return
        for found in find_holders(parameters):
            if id(found.top) not in registry.modules:
                self._add_model(found.top, found.name or type(found.top).__name__)

    def _add_model(self, top: torch.nn.Module, name: str) -> None:
        self._forget_parts_of(top)
        tree = self.recorder.registry.add_tree(top, self._choose_prefix(top, name), title=name)
        self._tell_compiled(top, tree)

    def _forget_parts_of(self, top: torch.nn.Module) -> None:
        """Before the training begins, a part may be called alone, to see what it gives: it is named with its model."""
        if self.recorder.serial or self.recorder.backward_at >= 0:
            return
        registry = self.recorder.registry
        inside = {id(module) for module in top.modules()} - {id(top)}
        for tree in list(registry.living_trees()):
            if id(tree.ref()) in inside:
                registry.forget_tree(tree)

    def _choose_prefix(self, top: torch.nn.Module, name: str) -> str:
        """The only model with parameters needs no prefix; several are told apart by their names."""
        trained = any(True for _ in top.parameters())
        alone = all(tree.prefix for tree in self.recorder.registry.living_trees())
        if trained and alone and not self.optimizers.holds_foreign(top):
            return ""
        taken = {tree.prefix for tree in self.recorder.registry.living_trees()}
        number, free = 1, name
        while f"{free}." in taken:  # of a list of models each may be called the same where it is trained
            number += 1
            free = f"{name}#{number}"
        return f"{free}."

    def _tell_compiled(self, top: torch.nn.Module, tree: Tree) -> None:
        for _, module in top.named_modules():
            self._note_compiled(module, tree.root)

    def _note_compiled(self, module: torch.nn.Module, name: str) -> None:
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            self.recorder.unseen.setdefault(
                name, "compiled by torch.compile: only what enters and leaves it is seen"
            )


def _may_train(module: torch.nn.Module, tag: int) -> bool:
    """Return whether a call may be one of training, not of an evaluation, a metric, or the reading of a weight."""
    if tag or not torch.is_grad_enabled() or isinstance(module, ParametrizationList):
        return False
    return any(parameter.requires_grad for parameter in module.parameters())


def is_transformed() -> bool:
    """Return whether a torch.func transform is running: there the weights change without a backward."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _find_leaf(loss: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor that gathers gradients, of those that a loss was computed from."""
    waiting: list[Any] = [loss.grad_fn]
    for _ in range(_MOST_NODES):
        node = waiting.pop() if waiting else None
        if node is None:
            if not waiting:
                return None
            continue
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            return variable
        waiting += [part for part, _ in node.next_functions if part is not None]
    return None


def _find_differentiated(module: torch.nn.Module) -> torch.Tensor | None:
    """Return a parameter that the running transform differentiates by, or None."""
    functorch = torch._C._functorch
    for parameter in module.parameters():
        inner: torch.Tensor = parameter
        while functorch.is_functorch_wrapped_tensor(inner):
            if functorch.is_gradtrackingtensor(inner):
                return parameter
            inner = functorch.get_unwrapped(inner)
    return None
