"""Notes which parameters are trained: gradients that no optimizer uses, and parameters that never get a gradient."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.glance import glance
from clew.capture.torch.probe_lost import LostGradients
from clew.capture.torch.probe_unreached import CallLog, tell_cut, tell_unreached
from clew.capture.torch.saved import walk_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from clew.capture.torch.listeners import Call
    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.registry import TensorEntry

_STEPS: Final = 15
"""Steps after which a parameter without a gradient is told of."""

_LATER_STEPS: Final = 60
"""The same for one of several like modules of which each step calls a few: experts, heads."""

_FEWEST_STEPS: Final = 5
_SIGHTINGS: Final = 3
_MOST_NAMES: Final = 8
_MOST_NODES: Final = 4096


class _Trained:
    """One optimizer: the parameters of it that have had no gradient yet."""

    def __init__(self, optimizer: torch.optim.Optimizer, forget: Callable[[object], object]) -> None:
        self.ref = weakref.ref(optimizer, forget)
        self.steps = 0
        self.passes = 0
        self.frozen = 0
        self.empty = 0
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.never = [parameter for parameter in parameters if parameter.numel()]
        self.total = len(parameters)
        self.is_told = False


class _Unheld:
    """A parameter with gradients that no optimizer holds: how it was when first seen, and how often since."""

    __slots__ = ("count", "first", "gradient", "made", "ref", "version")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.ref = weakref.ref(parameter)
        self.version = parameter._version
        self.first = _glance(parameter)
        self.gradient: tuple[int, tuple[float, ...]] | None = None
        self.made: Callable[[], torch.Tensor | None] = lambda: None
        self.count = 0

    def is_unchanged(self, parameter: torch.Tensor) -> bool:
        """Return whether nobody has updated the parameter, not even through ``.data``."""
        return parameter._version == self.version and _glance(parameter) == self.first

    def has_fresh_gradient(self, parameter: torch.Tensor) -> bool:
        """Return whether a backward has reached the parameter since this was last asked."""
        gradient = parameter.grad
        if gradient is None:
            return False
        # Behind a ReLU most numbers may be 0, those looked at too: another tensor is a fresh gradient in any case.
        is_another, self.made = self.made() is not gradient, weakref.ref(gradient)
        before, self.gradient = self.gradient, (gradient._version, _glance(gradient))
        return is_another or self.gradient != before


class CoverageProbe:
    """Compares, at every optimizer step of the first ones, who has a gradient with who is in an optimizer."""

    def __init__(self, recorder: Recorder, events: LoopEvents, optimizers: OptimizerLens) -> None:
        self.recorder = recorder
        self.events = events
        self.optimizers = optimizers
        self.calls = CallLog()
        self._lost = LostGradients()
        self._trained: dict[int, _Trained] = {}
        self._passes = 0
        self._made = 0
        self._at = (-1, -1, -1, -1)
        self._tensors = 0
        self._growth_looks = 0
        self._holders: set[int] = set()
        self._unheld: dict[int, _Unheld] = {}
        self._told: set[str] = set()
        self._fresh: dict[str, set[int]] = {}
        self._reached: list[tuple[int, tuple[int, ...]]] = []
        """What the newest loss leads back to: identity and shape of each leaf, where no optimizer has gradients."""

    def install(self, patches: Patches) -> None:
        """Begin to compare."""
        patches.listen(self.recorder.on_call, self._see_call)
        patches.listen(self.recorder.on_root, self._see_root)
        patches.listen(self.recorder.on_pass, self._see_pass)
        patches.listen(self.events.on_made, self._see_made)
        patches.listen(self.events.on_stepping, self._see_stepping)
        patches.listen(self.events.on_stepped, self._see_stepped)
        patches.on_undo(self._finish)
        self.recorder.note("probe", {"probe": "coverage"})

    def look_again(self) -> None:
        """Look who holds what and who is reached in the next steps."""
        self._at, self._growth_looks = (-1, -1, -1, -1), _STEPS
        self._lost.begin()

    def is_settled(self) -> bool:
        """Return whether all parameters have had a gradient or are told of, and no gradient goes unused."""
        if self._lost.is_looking or not all(state.is_told for state in self._trained.values()):
            return False
        # A module that each step makes anew is told of after a few of them.
        serial = self.recorder.serial
        if any(serial in steps and kind not in self._told for kind, steps in self._fresh.items()):
            return False
        return not any(0 < each.count <= _SIGHTINGS for each in self._unheld.values())

    # ---------------------------------------------------------------- what happens

    def _see_call(self, call: Call) -> None:
        known = self.calls.called.get(id(call.module))
        if known is None or known.ref() is not call.module:
            self.calls.add(call.module, call.entry.name)
        self._lost.see_call(call)
        if call.entry.name.startswith("<"):
            self._see_stranger(call.module)

    def _see_root(self, module: torch.nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.calls.add_root(module)
        else:
            self.calls.forget_newest()

    def _see_pass(self, begins: bool) -> None:
        self._passes += begins
        self._lost.see_pass(begins)
        if not begins:
            for state in self._trained.values():
                if not state.is_told:
                    state.never = [parameter for parameter in state.never if parameter.grad is None]

    def _see_made(self, _optimizer: torch.optim.Optimizer) -> None:
        self._made += 1

    def _see_stepping(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if not has_closure:
            self._compare(optimizer)

    def _see_stepped(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if has_closure:
            self._compare(optimizer)

    def _compare(self, optimizer: torch.optim.Optimizer) -> None:
        key = id(optimizer)
        state = self._trained.get(key)
        if state is None:
            table = self._trained
            state = table[key] = _Trained(optimizer, lambda _: table.pop(key, None))
        self._see_growth()
        if state.passes == self._passes:
            return
        state.passes = self._passes
        self._see_lost(state, optimizer)
        if state.is_told and state.steps > _LATER_STEPS:
            return
        state.steps += 1
        if not state.is_told:
            self._see_missing(state, optimizer)
        if state.steps <= _STEPS:
            self._see_unheld()

    def _see_growth(self) -> None:
        """Look again for some steps when a model has got new parameters: were they given to an optimizer?"""
        known = len(self.recorder.registry.tensors)
        if known != self._tensors:
            self._tensors, self._growth_looks = known, _STEPS
        elif self._growth_looks and self._is_past_first():
            self._growth_looks -= 1
            self._see_unheld()

    def _is_past_first(self) -> bool:
        return all(state.steps > _STEPS for state in self._trained.values())

    # ---------------------------------------------------------------- parameters without a gradient

    def _see_missing(self, state: _Trained, optimizer: torch.optim.Optimizer) -> None:
        state.never = [parameter for parameter in state.never if parameter.grad is None]
        if not state.never:
            state.is_told = True
            return
        wanting = [parameter for parameter in state.never if parameter.requires_grad]
        if len(state.never) == state.total:
            self._see_empty(state, optimizer, wanting)
        elif state.steps in (_STEPS, _LATER_STEPS) and wanting:
            self._tell_unreached(state, optimizer, wanting)
        state.is_told = state.is_told or state.steps >= _LATER_STEPS

    def _see_empty(
        self, state: _Trained, optimizer: torch.optim.Optimizer, wanting: list[torch.Tensor]
    ) -> None:
        """No parameter of the optimizer has ever had a gradient."""
        state.empty += 1
        if state.empty == 1 and self._see_loss not in self.recorder.on_each_loss:
            self.recorder.on_each_loss.append(self._see_loss)
        if state.empty != 2:
            return
        known = self.calls.list_parameters()
        called = sum(id(parameter) in known for parameter in state.never)
        is_copied = bool(called) and self._has_copies(state.never)
        roots = [root for root in self.calls.roots() if any(True for _ in root.parameters())]
        self.recorder.note(
            "no-gradients",
            {
                **self.events.know(optimizer).tell(),
                "parameters": state.total,
                "trainable": len(wanting),
                "called": 0 if is_copied else called,
                "copied": is_copied,
                "models": [type(root).__name__ for root in roots[:_MOST_NAMES]],
            },
        )

    def _see_loss(self, loss: torch.Tensor) -> None:
        """Keep which leaves a loss leads back to, once."""
        self.recorder.on_each_loss.remove(self._see_loss)
        if loss.grad_fn is not None:
            nodes = walk_nodes(loss.grad_fn, most=_MOST_NODES)
            leaves = [node.variable for node in nodes if hasattr(node, "variable")]
            self._reached = [(id(leaf), tuple(leaf.shape)) for leaf in leaves]

    def _has_copies(self, parameters: list[torch.Tensor]) -> bool:
        """Return whether the loss leads back to other tensors of the very shapes: the model runs on a copy of them."""
        own = {id(parameter) for parameter in parameters}
        others = Counter(shape for key, shape in self._reached if key not in own)
        return not Counter(tuple(each.shape) for each in parameters) - others

    def _tell_unreached(
        self, state: _Trained, optimizer: torch.optim.Optimizer, wanting: list[torch.Tensor]
    ) -> None:
        report = tell_unreached(
            self.calls, wanting, tops=self._list_tops(), is_late=state.steps >= _LATER_STEPS
        )
        if not report:
            return
        state.is_told = True
        known = self.events.know(optimizer).tell()
        for each in report:
            self.recorder.note("unreached", {**known, "steps": state.steps, **each})

    def _see_lost(self, state: _Trained, optimizer: torch.optim.Optimizer) -> None:
        """Look whether parameters that had gradients get none any more since the loop has changed."""
        cut = self._lost.see_step(optimizer)
        if cut is None:
            return
        never = {id(parameter) for parameter in state.never}
        wanting = [p for p in cut.parameters if p.requires_grad and id(p) not in never]
        told = tell_cut(self.calls, wanting, tops=self._list_tops(), cut=cut)
        if told is not None:
            self.recorder.note("unreached", {**self.events.know(optimizer).tell(), **told})

    def _list_tops(self) -> list[torch.nn.Module]:
        return [top for tree in self.recorder.registry.living_trees() if (top := tree.ref()) is not None]

    def _finish(self) -> None:
        """The run ends: what has had no gradient in a short run is told with its few steps."""
        if self._see_loss in self.recorder.on_each_loss:
            self.recorder.on_each_loss.remove(self._see_loss)
        for state in list(self._trained.values()):
            optimizer = state.ref()
            if state.is_told or optimizer is None or not _FEWEST_STEPS <= state.steps < _STEPS:
                continue
            wanting = [parameter for parameter in state.never if parameter.requires_grad]
            if 0 < len(state.never) < state.total and wanting:
                self._tell_unreached(state, optimizer, wanting)

    # ---------------------------------------------------------------- gradients without an optimizer

    def _see_unheld(self) -> None:
        self._refresh_holders()
        for key in list(self._unheld):
            self._count(key)
        done = [each for each in self._unheld.values() if each.count == _SIGHTINGS]
        if done:
            self._tell_unheld([parameter for each in done if (parameter := each.ref()) is not None])

    def _refresh_holders(self) -> None:
        """Look again who is held when there are other optimizers, groups or parameters than last time."""
        living = [entry.ref() for entry in self.optimizers.entries.values()]
        groups = [group["params"] for o in living if o is not None for group in o.param_groups]
        registry = self.recorder.registry
        known_tensors = len(registry.tensors) + len(self.calls.strangers)
        # A copy with an optimizer of its own, made anew in each step, leaves every other count as it was.
        at = (self._made, len(living), sum(map(len, groups)), known_tensors)
        if at == self._at:
            return
        self._at = at
        self._holders = {id(parameter) for group in groups for parameter in group}
        known = [parameter for _, parameter in registry.living_parameters()]
        for parameter in [*known, *self.calls.list_strange_parameters()]:
            if id(parameter) not in self._holders and parameter.is_leaf:
                self._unheld.setdefault(id(parameter), _Unheld(parameter))
        for key in list(self._unheld):
            if key in self._holders or self._unheld[key].ref() is None:
                del self._unheld[key]

    def _count(self, key: int) -> None:
        each = self._unheld[key]
        parameter = each.ref()
        if parameter is None:
            del self._unheld[key]
        elif parameter.requires_grad and parameter.numel() and each.has_fresh_gradient(parameter):
            if each.count < _SIGHTINGS and each.is_unchanged(parameter):
                each.count += 1
            elif each.count < _SIGHTINGS:
                del self._unheld[key]

    def _tell_unheld(self, parameters: list[torch.Tensor]) -> None:
        for each in self._unheld.values():
            each.count += each.count == _SIGHTINGS  # told: not counted again
        graded = [parameter for parameter in parameters if _has_nonzero_gradient(parameter)]
        strange = self.calls.list_strange_parameters()
        hidden = {id(parameter) for parameter in strange}
        self._tell_hidden([parameter for parameter in graded if id(parameter) in hidden])
        groups: dict[str, list[TensorEntry]] = {}
        for parameter in graded:
            entry = self.recorder.registry.tensors.get(id(parameter))
            if entry is not None and id(parameter) not in hidden:
                groups.setdefault(self.recorder.sites[entry.site].root, []).append(entry)
        for root, entries in groups.items():
            self._tell_group(root, entries)

    def _tell_group(self, root: str, entries: list[TensorEntry]) -> None:
        """Tell of parameters of one model that no optimizer holds."""
        called = self.calls.list_parameters()
        held = [
            (entry, p) for entry, p in self.recorder.registry.living_parameters() if id(p) in self._holders
        ]
        partners = [p for entry, p in held if self.recorder.sites[entry.site].root == root]
        tree = next((each for each in self.recorder.registry.trees if each.root == root), None)
        top = tree.ref() if tree is not None else None
        self.recorder.note(
            "unheld",
            {
                "model": root,
                "parameters": [entry.name for entry in entries[:_MOST_NAMES]],
                "count": len(entries),
                "held": len(partners),
                "held_elsewhere": sum(id(p) in called for _, p in held) - len(partners),
                "held_reached": sum(p.grad is not None and bool(p.grad.any()) for _, p in held),
                "training": bool(top is not None and top.training),
                "optimizers": list(self._tell_optimizers()),
            },
        )

    def _tell_optimizers(self) -> Iterator[dict[str, str]]:
        for state in self._trained.values():
            optimizer = state.ref()
            if optimizer is not None:
                yield self.events.know(optimizer).tell()

    # ---------------------------------------------------------------- modules that no model knows

    def _see_stranger(self, module: torch.nn.Module) -> None:
        """A module ran inside a model that does not contain it: keep it in view if it can learn."""
        if not any(p.requires_grad for p in module.parameters(recurse=False)):
            return
        self.calls.add_stranger(module)
        if torch.is_grad_enabled() and self.calls.is_new_stranger:
            steps = self._fresh.setdefault(type(module).__name__, set())
            steps.add(self.recorder.serial)
            if len(steps) == _SIGHTINGS + 1 and type(module).__name__ not in self._told:
                self._told.add(type(module).__name__)
                self.recorder.note("fresh-module", {"type": type(module).__name__, "steps": len(steps)})

    def _tell_hidden(self, parameters: list[torch.Tensor]) -> None:
        if not parameters:
            return
        modules, place = self.calls.find_container(parameters)
        self.recorder.note(
            "unregistered",
            {"modules": modules[:_MOST_NAMES], "parameters": len(parameters), **place},
        )


def _glance(tensor: torch.Tensor) -> tuple[float, ...]:
    """Return a few values of a parameter or a gradient."""
    values = tensor.detach()
    return glance(values._values() if values.is_sparse else values, 8)


def _has_nonzero_gradient(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None:
        return False
    with torch.no_grad():
        values = gradient.detach()
        return bool((values._values() if values.is_sparse else values).any())
