"""Notes how a loss is put together: its terms and their operands, what stands before them, and the sign they are given.

The nodes at the head of the graph hold their operands whatever the loss was called or where it was imported from.
"""

from __future__ import annotations

import weakref
from math import inf, nan
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from clew.capture.torch.glance import copy_numbers
from clew.capture.torch.leaves import list_leaves
from clew.capture.torch.probe_agreement import list_agreements
from clew.capture.torch.probe_events import find_line
from clew.capture.torch.probe_graph import MOST_NODES, feeder, has_logarithm, name_of, walk_head
from clew.capture.torch.probe_learns import has_parameters
from clew.capture.torch.probe_likelihood import DirectionHook, find_picked, list_parts
from clew.capture.torch.probe_terms import READERS, Operands, read_term
from clew.model.record import new_tuple
from clew.model.schema import STAT_INDEX
from clew.stats.rows import KERNEL, Rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.saved import SavedRegions

_LOOKS: Final = 3
"""Losses of one form that are looked at in the first steps; later, one in each probed step."""

_MOST_FORMS: Final = 16
_FIRST_STEPS: Final = 20
_FIRST_LOSSES: Final = 4
_MOST_ELEMENTS: Final = 1 << 16
_MOST_LEAF_NOTES: Final = 3
_MOST_TERMS: Final = 12
_MOST_OUTPUTS: Final = 32
_QUIET_OUTPUTS: Final = 3
_ROWS: Final = 64
_ABOVE_ONE: Final = 1e-3
_MAX: Final = STAT_INDEX["max"]
_NAN: Final = STAT_INDEX["nan"]
_INFINITE: Final = STAT_INDEX["pos_inf"]
_BOUNDED: Final = frozenset(("Softmax", "Sigmoid", "Tanh", "Hardtanh"))


_Head = tuple[type, "type | None"]


class _Output(NamedTuple):
    """One tensor that a model gave in this step."""

    number: int
    highest: float
    shape: tuple[int, ...]
    is_share: bool
    is_score: bool


class LossProbe:
    """Looks at the first few losses of every form, and now and then later."""

    def __init__(self, recorder: Recorder, saved: SavedRegions, optimizers: OptimizerLens) -> None:
        self.recorder = recorder
        self.saved = saved
        self.optimizers = optimizers
        self._outputs: list[_Output] = []
        self._tokens: list[Callable[[], torch.Tensor | None]] = []
        self._models: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._looks: dict[str, int] = {}
        self._known: set[_Head] = set()
        """The ends of the graphs of losses that were looked at often enough."""
        self._direction: tuple[tuple[int, int], dict[str, Any]] | None = None
        self._terms: list[dict[str, Any]] = []
        self._handles: list[Any] = []
        self._source = ""
        self._leaves = 0
        self._quiet_at = -1
        self._row = Rows(capacity=1)
        self._bounded: dict[tuple[int, type], bool] = {}

    def install(self, patches: Patches) -> None:
        """Begin to see losses."""
        patches.listen(self.recorder.on_root, self._see_root)
        patches.listen(self.recorder.on_loss, self._see)
        patches.listen(self.recorder.on_pass, self._see_pass)
        self.recorder.note("probe", {"probe": "loss"})

    def look_again(self) -> None:
        """Look at the next losses of every form."""
        self._looks.clear()
        self._known.clear()
        self._quiet_at = -1
        self._bounded.clear()
        self._direction = None

    # ---------------------------------------------------------------- what a loss is made of

    def _see_root(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.recorder.probing or not torch.is_grad_enabled() or len(self._outputs) > _MOST_OUTPUTS:
            return
        if not has_parameters(module):
            return  # a criterion: its output is a loss, not something a loss is made of
        if id(module) in self._models and type(output) is torch.Tensor and not self._is_following():
            # Nothing is looked at now, unless the loss is bad or new: then its graph ends here.
            node = output.grad_fn
            if node is not None:
                outputs = self._outputs
                if len(outputs) > _QUIET_OUTPUTS:
                    del outputs[:-_QUIET_OUTPUTS]
                outputs.append(new_tuple(_Output, (node._sequence_nr(), 0.0, output.shape, False, False)))
            return
        self._models.setdefault(id(module), weakref.ref(module))
        self._await_end([])
        given = list_leaves((args, kwargs))
        is_trained = any(leaf.requires_grad for leaf in given)
        is_first = self.recorder.schedule.is_first(self.recorder.step, steps=_FIRST_LOSSES)
        for leaf in list_leaves(output):
            if leaf.grad_fn is not None:
                highest = self._find_highest(leaf) if is_first else 0.0
                is_share = is_first and 0 < highest <= 1.0 and _are_shares(leaf)
                number = leaf.grad_fn._sequence_nr()
                is_score = (
                    not is_trained and highest > _ABOVE_ONE and not self._is_bounded(module, leaf.grad_fn)
                )
                self._outputs.append(_Output(number, highest, tuple(leaf.shape), is_share, is_score))
        for leaf in given:
            if leaf.dtype in (torch.int64, torch.int32) and leaf.dim() > 1:
                self._tokens.append(weakref.ref(leaf))

    def _find_highest(self, tensor: torch.Tensor) -> float:
        """Return the highest of some values of an output, NaN where one of them is."""
        if not tensor.is_floating_point() or not tensor.numel() or is_functorch_wrapped_tensor(tensor):
            return 0.0
        if tensor.numel() > _MOST_ELEMENTS:
            with torch.no_grad():
                return float(tensor.detach().reshape(-1)[:_MOST_ELEMENTS].max())
        self._row.measure(tensor, 0)
        found = self._row.values[0].tolist()
        return nan if found[_NAN] else inf if found[_INFINITE] else float(found[_MAX])

    def _is_bounded(self, module: torch.nn.Module, node: Any) -> bool:
        """Return whether an output cannot grow without end, asked once for each way a model may end."""
        key = (id(module), type(node))
        known = self._bounded.get(key)
        if known is None:
            known = self._bounded[key] = _is_bounded(node)
        return known

    def _is_following(self) -> bool:
        """Return whether losses are looked at as they come: in the first steps, and in those probed later."""
        recorder = self.recorder
        if self._quiet_at == recorder.serial:
            return False
        is_first, step = recorder.schedule.is_first, recorder.step
        if is_first(step, steps=_FIRST_LOSSES):
            return is_first(step, steps=_LOOKS) or min(self._looks.values(), default=0) < _LOOKS
        is_quiet = is_first(step, steps=_FIRST_STEPS)
        if is_quiet:
            self._quiet_at = recorder.serial  # asked several times a step
        return not is_quiet

    def _await_end(self, outputs: list[_Output]) -> None:
        """Hear of the end of the pass that this call or loss leads to; ``outputs`` are those that belong to it."""
        if self._see_pass not in self.recorder.on_pass:
            self.recorder.on_pass.append(self._see_pass)
            self._outputs = outputs

    def _see_pass(self, begins: bool) -> None:
        if begins:
            return
        if not self._is_following():
            self.recorder.on_pass.remove(self._see_pass)
        self._outputs.clear()
        self._tokens.clear()
        for handle in self._handles:
            handle.remove()
        if self._terms:
            note = {"terms": self._terms, "source": self._source, **self._tell_direction()}
            self.recorder.note("loss-head", note)
        self._terms, self._handles = [], []

    def _see(self, loss: torch.Tensor) -> None:
        if is_functorch_wrapped_tensor(loss):
            return
        node = loss.grad_fn
        if node is None:
            self._see_leaf(loss)
            return
        before = node.next_functions
        head = (type(node), type(before[0][0]) if before else None)
        if head in self._known and self._quiet_at == self.recorder.serial and not _is_bad(loss):
            return  # and had it changed further in, all probes would look again
        if self._should_look(loss, head):
            self._await_end(self._outputs)
            self._look(loss)

    def _should_look(self, loss: torch.Tensor, head: _Head) -> bool:
        form = _name_form(loss.grad_fn)
        looks = self._looks.get(form, 0)
        is_first = self.recorder.schedule.is_first(self.recorder.step, steps=_FIRST_STEPS)
        if looks >= _LOOKS and is_first and not _is_bad(loss):
            self._known.add(head)
            return False
        if form not in self._looks and len(self._looks) >= _MOST_FORMS:
            return False
        self._looks[form] = looks + 1
        return True

    def _see_leaf(self, loss: torch.Tensor, *, has_history: bool = False) -> None:
        """Backward on a leaf reaches nothing; torch raises if it does not even require a gradient."""
        self._leaves += 1
        if self._leaves > _MOST_LEAF_NOTES:
            return
        models = self._living_models()
        models += [module for module in self._list_trees() if not models]
        parameters = [parameter for model in models for parameter in model.parameters()]
        self.recorder.note(
            "loss-leaf",
            {
                "requires_grad": loss.requires_grad,
                "has_history": has_history,
                "grad_enabled": torch.is_grad_enabled(),
                "parameters": len(parameters),
                "trainable": sum(parameter.requires_grad for parameter in parameters),
                "source": find_line(),
            },
        )

    def _living_models(self) -> list[torch.nn.Module]:
        return [model for ref in self._models.values() if (model := ref()) is not None]

    def _living_groups(self) -> list[dict[str, Any]]:
        living = [entry.ref() for entry in self.optimizers.entries.values()]
        return [group for optimizer in living if optimizer is not None for group in optimizer.param_groups]

    def _list_trees(self) -> list[torch.nn.Module]:
        trees = self.recorder.registry.living_trees()
        return [module for tree in trees if (module := tree.ref()) is not None]

    # ---------------------------------------------------------------- looking

    def _look(self, loss: torch.Tensor) -> None:
        numbers = [output.number for output in self._outputs]
        assert loss.grad_fn is not None  # a leaf has gone another way
        own = loss.grad_fn._sequence_nr()
        border = frozenset(number for number in numbers if number != own)
        operands = Operands(
            saved=self.saved,
            border=max(border, default=-1),
            sizes=frozenset(output.shape[0] for output in self._outputs if _is_one_per_sample(output.shape)),
            highest={output.number: output.highest for output in self._outputs},
            tokens=[tensor for ref in self._tokens if (tensor := ref()) is not None],
            shares=frozenset(output.number for output in self._outputs if output.is_share),
            shapes={output.number: output.shape for output in self._outputs if output.number != own},
        )
        self._source = find_line()
        self._look_at_parts(loss.grad_fn, border)
        nodes = list(walk_head(loss.grad_fn, border))
        if border and len(nodes) < MOST_NODES and self._is_adrift(nodes, border):
            self._see_leaf(loss, has_history=True)
        with torch.no_grad():
            for node in [each for each in nodes if type(each).__name__ in READERS]:
                if len(self._terms) >= _MOST_TERMS:
                    return
                term = read_term(node, operands)
                if term is not None:
                    self._terms.append(term)
                    if term.get("is_loss"):
                        self._handles.append(node.register_prehook(DirectionHook(term, is_error=True)))

    def _is_adrift(self, nodes: list[Any], border: frozenset[int]) -> bool:
        """Return whether a loss comes from no model at all but from new tensors, such as ``torch.tensor(losses)``."""
        if any(node._sequence_nr() in border for node in nodes):
            return False
        leaves = [node.variable for node in nodes if hasattr(node, "variable")]
        trained = {id(parameter) for group in self._living_groups() for parameter in group["params"]}
        own = {id(p) for model in self._living_models() for p in model.parameters()}
        return bool(leaves) and bool(trained & own) and not any(id(leaf) in trained | own for leaf in leaves)

    def _look_at_parts(self, node: Any, border: frozenset[int]) -> None:
        """See what a loss that is written out is made of, and hear which way it is pushed."""
        for part in list_parts(node, saved=self.saved, border=border)[:_MOST_TERMS]:
            term = {"form": part.form, "is_loss": True, "is_written_out": True, "is_error": part.is_error}
            term["scale"] = part.scale
            self._terms.append(term)
            self._handles.append(part.node.register_prehook(DirectionHook(term, is_error=part.is_error)))

        for score in list_agreements(node, self.saved)[:_MOST_TERMS]:
            term = {"form": "agreement", "is_loss": True, "is_written_out": True, "is_error": False}
            term |= {"scale": 1.0, "mask": list(score.mask)}
            self._terms.append(term)
            self._handles.append(score.node.register_prehook(DirectionHook(term, is_error=False)))
        picked = find_picked(
            node,
            saved=self.saved,
            shapes={each.number: each.shape for each in self._outputs if each.is_score},
        )
        if picked is not None:
            chosen = {"form": "picked", "sign": 0}
            self._terms.append(chosen)
            self._handles.append(picked[0].register_prehook(DirectionHook(chosen, is_error=False)))

    def _tell_direction(self) -> dict[str, Any]:
        """Return whether the optimizers of the models go up or down, and whether there are any."""
        key = (len(self._models), len(self.optimizers.entries))
        if self._direction is not None and self._direction[0] == key:
            return self._direction[1]
        own = {id(p) for model in self._living_models() for p in model.parameters()}
        ours = [group for group in self._living_groups() if any(id(p) in own for p in group["params"])]
        told = {"trained": bool(ours), "maximize": sorted({bool(group.get("maximize")) for group in ours})}
        self._direction = (key, told)
        return told


def _name_form(node: Any) -> str:
    """Return the names of the last few operations: enough to tell one loss of a loop from another."""
    names: list[str] = []
    for _ in range(4):
        if node is None:
            break
        names.append(name_of(node))
        node = feeder(node)
    return " ".join(names)


def _is_bad(loss: torch.Tensor) -> bool:
    """Return whether a loss on the host is NaN or infinite: reason for another look."""
    value = KERNEL.read_number(loss) if KERNEL is not None else None
    if value is None:
        if loss.numel() != 1 or loss.device.type != "cpu":
            return False
        value = loss.item()
    return bool(value - value != 0.0)


def _are_shares(tensor: torch.Tensor) -> bool:
    """Return whether the rows of an output are probabilities of classes: not negative, 1 in all."""
    if tensor.dim() != 2 or tensor.shape[1] < 2 or is_functorch_wrapped_tensor(tensor):
        return False
    rows = copy_numbers(tensor.detach()[:_ROWS])
    return bool((rows >= 0).all()) and bool((abs(rows.sum(1) - 1) < 1e-3).all())


def _is_bounded(node: Any) -> bool:
    """Return whether an output cannot grow without end: probabilities, and logarithms of them."""
    return name_of(node) in _BOUNDED or has_logarithm(node, most=12, deepest=3)


def _is_one_per_sample(shape: tuple[int, ...]) -> bool:
    return bool(shape) and shape[0] > 1 and all(size == 1 for size in shape[1:])
