"""Notes tensors that are trained like parameters and belong to nobody: no model has them, no optimizer holds them."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from clew.capture.frame_variables import variables_of
from clew.capture.torch.glance import glance
from clew.capture.torch.leaves import walk
from clew.capture.torch.naming import user_frames
from clew.capture.torch.probe_graph import VIEWS, shape_of
from clew.capture.torch.saved import walk_nodes

if TYPE_CHECKING:
    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

_SIGHTINGS: Final = 10
"""Steps with a gradient and without a change: somebody who updates by hand does so sooner."""

_EMPTY_LOOKS: Final = 3
_MOST_NODES: Final = 4000
_NODES_OF_INPUTS: Final = 50
_MOST_NAMES: Final = 8
_MOST_OBJECTS: Final = 400
_DEEPEST: Final = 3
_GLANCE: Final = 8
_LEAF: Final = "AccumulateGrad"


class _Raw:
    """A tensor outside all models: how it was when first seen, its newest gradient, and how often it had one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.ref = weakref.ref(tensor)
        self.first = (tensor._version, glance(tensor, _GLANCE))
        self.gradient: tuple[Any, ...] = ()
        self.count = 0

    def see(self, tensor: torch.Tensor) -> bool:
        """Count a fresh gradient; return whether nobody has changed the tensor itself."""
        gradient = tensor.grad
        if gradient is not None and gradient.layout == torch.strided:
            newest = (id(gradient), gradient._version, glance(gradient, _GLANCE))
            self.count += newest != self.gradient and any(newest[2])
            self.gradient = newest
        return (tensor._version, glance(tensor, _GLANCE)) == self.first


class RawProbe:
    """Looks where the gradients of the first losses go; ends soon where all of it is parameters of models."""

    def __init__(self, recorder: Recorder, events: LoopEvents, optimizers: OptimizerLens) -> None:
        self.recorder = recorder
        self.events = events
        self.optimizers = optimizers
        self._raw: dict[int, _Raw] = {}
        self._inputs: set[int] = set()
        self._seen: set[int] = set()
        self._looks = 0
        self._is_over = False

    def install(self, patches: Patches) -> None:
        """Begin to look."""
        patches.listen(self.recorder.on_root, self._see_root)
        patches.listen(self.recorder.on_grad, self._see_grad)
        patches.listen(self.recorder.on_each_loss, self._see_loss)
        patches.listen(self.events.on_stepping, self._see_stepping)
        self._is_over = False

    def is_settled(self) -> bool:
        """Return whether this has found all there is to find."""
        return self._is_over

    # ---------------------------------------------------------------- what is data

    def _see_root(self, _module: torch.nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
        """What goes into a model, and what that was made of, is data: points of an equation, codes, pictures."""
        if self._is_over:
            return
        for _, leaf in walk((args, kwargs)):
            if leaf.grad_fn is not None:
                made_of = [
                    node.variable
                    for node in walk_nodes(leaf.grad_fn, most=_NODES_OF_INPUTS)
                    if _is_leaf(node)
                ]
                self._inputs.update(map(id, made_of))
            elif leaf.requires_grad:
                self._inputs.add(id(leaf))

    def _see_grad(self) -> None:
        """A derivative is asked for by itself: some leaves of this loop are there to be derived by."""
        self._is_over = True

    # ---------------------------------------------------------------- losses and steps

    def _see_loss(self, loss: torch.Tensor) -> None:
        if self._is_over:
            self.recorder.on_each_loss.remove(self._see_loss)
            return
        if loss.grad_fn is None or is_functorch_wrapped_tensor(loss):
            return
        nodes = list(walk_nodes(loss.grad_fn, most=_MOST_NODES))
        leaves = {id(node.variable): node.variable for node in nodes if type(node).__name__ == _LEAF}
        held = self._list_held()
        if not held & set(leaves):
            return  # trained by hand, or not at all
        owns, inputs = self.recorder.registry.owns, self._inputs
        others = {
            key: leaf
            for key, leaf in leaves.items()
            if key not in held and key not in inputs and not owns(leaf)
        }
        sizes = _find_samples(nodes) if others else set()
        for key, leaf in others.items():
            if not _is_parameter_like(leaf, sizes):
                continue
            self._seen.add(key)
            known = self._raw.get(key)
            if known is None or known.ref() is not leaf:
                self._raw[key] = _Raw(leaf)

    def _list_held(self) -> set[int]:
        living = [entry.ref() for entry in self.optimizers.entries.values()]
        groups = [group for optimizer in living if optimizer is not None for group in optimizer.param_groups]
        return {id(parameter) for group in groups for parameter in group["params"]}

    def _see_stepping(self, optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        if self._is_over:
            return
        self._looks += 1
        for key, each in list(self._raw.items()):
            tensor = each.ref()
            if tensor is None or key not in self._seen or not each.see(tensor):
                del self._raw[key]
        self._seen.clear()
        self._inputs.clear()
        done = [each for each in self._raw.values() if each.count >= _SIGHTINGS]
        if done:
            self._tell(optimizer, [tensor for each in done if (tensor := each.ref()) is not None])
        self._is_over = bool(done) or (self._looks >= _EMPTY_LOOKS and not self._raw)

    def _tell(self, optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> None:
        names = [find_path(tensor) for tensor in tensors[:_MOST_NAMES]]
        note = {
            **self.events.know(optimizer).tell(),
            "names": [name or "a tensor" for name in names],
            "shapes": [list(tensor.shape) for tensor in tensors[:_MOST_NAMES]],
            "count": len(tensors),
            "steps": _SIGHTINGS,
        }
        self.recorder.note("unheld-tensor", note)


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == _LEAF


def _find_samples(nodes: list[Any]) -> set[int]:
    """Return the sizes that may count samples: the first dimensions of what is computed and of what is summed up."""
    sizes: set[int] = set()
    for node in nodes:
        if _is_leaf(node):
            continue
        shape = shape_of(node)
        if shape is not None and len(shape) > 1 and type(node).__name__ not in VIEWS:
            sizes.add(shape[0])
        if shape == ():
            entering = [
                shape_of(before, number)
                for before, number in node.next_functions
                if before is not None and not _is_leaf(before)
            ]
            sizes.update(each[0] for each in entering if each)
    return sizes


def _is_parameter_like(leaf: torch.Tensor, samples: set[int]) -> bool:
    """Return whether a leaf has no room for samples: data that requires a gradient is no parameter."""
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or not leaf.numel() or leaf.is_meta:
        return False
    if leaf.layout != torch.strided or is_functorch_wrapped_tensor(leaf):
        return False
    return not leaf.dim() or leaf.shape[0] == 1 or leaf.shape[0] not in samples


def find_path(thing: object) -> str:
    """Return how the user's frames lead to an object, such as ``model.first.bias``, or nothing."""
    for frame in user_frames():
        queue: list[tuple[str, Any, int]] = [
            (str(name), value, 0) for name, value in dict(variables_of(frame)).items()
        ]
        seen: set[int] = set()
        for name, value, depth in queue:
            if value is thing:
                return name.removeprefix("self.")
            if depth < _DEEPEST and id(value) not in seen and len(queue) < _MOST_OBJECTS:
                seen.add(id(value))
                queue += [(f"{name}{path}", part, depth + 1) for path, part in _list_parts(value)]
    return ""


def _list_parts(value: Any) -> list[tuple[str, Any]]:
    if type(value) is dict:
        return [(f"[{key!r}]", part) for key, part in list(value.items())[:_MOST_OBJECTS]]
    if type(value) in (list, tuple):
        return [(f"[{index}]", part) for index, part in enumerate(value[:_MOST_OBJECTS])]
    variables: Any = getattr(value, "__dict__", None)
    if not isinstance(variables, dict) or isinstance(value, (type, ModuleType)):
        return []
    return [(f".{name}", part) for name, part in variables.items()]
