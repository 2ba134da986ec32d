"""Notes what single rows of statistics cannot show: units that never fire, saturation, equal outputs, raw inputs.

Looks in recorded steps of training only, at tensors that autograd tells to come from an activation, so functional
forms are seen as well as modules.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from clew.capture.torch.glance import copy_numbers, count_zeros, glance_row
from clew.capture.torch.leaves import list_leaves, walk
from clew.capture.torch.probe_direction import Direction
from clew.capture.torch.probe_graph import feeder
from clew.model.schema import STAT_INDEX
from clew.stats.rows import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clew.capture.torch.listeners import Call
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.registry import ModuleEntry

_BLOCK: Final = 10
"""Batches that are judged together."""

_INPUT_STEPS: Final = 3
_EMBEDDING: Final = ("EmbeddingBackward0", "EmbeddingBagBackward0")
_AROUND: Final = ("CatBackward0", "NativeDropoutBackward0", "MulBackward0", "DivBackward0")
_FEW: Final = 8
_SMALL: Final = 64
_MOSTLY: Final = 0.9
_FEWEST_SHARES: Final = 3
_FAR_FROM_MOST: Final = 0.5
"""A block of batches is known before its end where it begins with so many batches of which no share is higher."""

_DENSE_STEPS: Final = 20
_FEWEST_TURNS: Final = 3
"""Steps in which every one is looked at, and outputs that differ after which others need not be compared."""

_MOST_TURNS: Final = 3
_FEATURES: Final = 4096
_SAMPLES: Final = 64
"""Of an output at most so many numbers of so many samples are compared."""

_RELU: Final = ("ReluBackward0", "ThresholdBackward0", "ClampMinBackward0", "ClampBackward1")
_BOUNDED: Final = {"SigmoidBackward0": "sigmoid", "TanhBackward0": "tanh"}
_PASSING: Final = (
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0", "PermuteBackward0",
    "UnsqueezeBackward0", "SqueezeBackward1", "TBackward0", "CloneBackward0", "MaxPool2DWithIndicesBackward0",
)  # fmt: skip
"""Operations that hand an activation on: what was zero everywhere stays zero."""

_CONVOLUTIONS: Final = (torch.nn.modules.conv._ConvNd,)
_MIXERS: Final = (torch.nn.Linear, torch.nn.RNNBase, *_CONVOLUTIONS)


class _Activation:
    """What one activation did over a block of batches."""

    def __init__(self, form: str, turn: int = 0) -> None:
        self.form = form
        self.turn = turn
        self.batches = 0
        self.samples = 0
        self.units = 0
        self.is_output = False
        """Whether a model ends in it."""
        self.dead = -1
        """How many units have given nothing but zeros in this block; -1 before its first batch."""
        self.silent: NDArray[np.intp] | None = None
        """Which ones, where those are most of them."""
        self.is_known = False
        """Whether the rest of the block cannot change what it comes to."""
        self.shares: list[float] = []

    def see_units(self, tensor: torch.Tensor, dim: int) -> None:
        """Look which units gave anything but zero, in a few places at first, until more than a few have.

        Those that are left then are not all silent; with a tenth of the units that fire it does not matter.
        """
        self.units = tensor.shape[dim]
        if 0 <= self.dead < _MOSTLY * self.units:
            return
        if self.dead < 0 and dim == tensor.dim() - 1:
            self.dead = count_zeros(tensor, self.units)
            if self.dead < _MOSTLY * self.units:
                return
        if self.silent is None:
            few = tuple([slice(None if each == dim else _FEW) for each in range(tensor.dim())])
            self.silent = np.flatnonzero(~_find_active(copy_numbers(tensor[few]), dim))
        if len(self.silent) >= _MOSTLY * self.units:
            among = tensor.index_select(dim, torch.from_numpy(self.silent).to(tensor.device))
            self.silent = self.silent[~_find_active((among != 0).cpu().numpy(), dim)]
        self.dead = len(self.silent)

    def is_settled(self) -> bool:
        """Return whether the block cannot end with most units silent, or hardly with most values at the ends."""
        if self.dead >= 0:
            return self.dead < _MOSTLY * self.units
        return len(self.shares) >= _FEWEST_SHARES and max(self.shares) < _FAR_FROM_MOST

    def clear(self) -> None:
        """Begin the next block."""
        self.batches, self.samples, self.dead, self.silent = 0, 0, -1, None
        self.shares.clear()


class _Outputs:
    """Lowest and highest outputs of a root in one step, and for how many steps they were all the same."""

    def __init__(self) -> None:
        self.serial = -1
        self.low: torch.Tensor | None = None
        self.high: torch.Tensor | None = None
        self.inputs_differ = False
        self.differ = False
        self.clear_turns = 0
        """Steps in a row whose outputs differ clearly."""
        self.direction = Direction()
        self.equal_steps = 0
        self.since = 0
        self.was_told = False


class StatsProbe:
    """Looks at activations, first inputs and root outputs while a model trains."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._activations: dict[tuple[str, int, int], _Activation] = {}
        self._outputs: dict[str, _Outputs] = {}
        self._seen: dict[int, _Activation] = {}
        self._turns: dict[tuple[str, int], int] = {}
        self._resting: dict[int, ModuleEntry] = {}
        """Modules at which there is nothing more to see in this block of steps."""
        self._looked: dict[int, tuple[ModuleEntry, bool]] = {}
        """Modules that were looked at in this step, and whether all of their calls had nothing left to see."""
        self._block = 0
        self._serial = -1
        self._troubled = -1
        self._row = Rows(capacity=1)

    def install(self, patches: Patches) -> None:
        """Begin to see module calls."""
        patches.listen(self.recorder.on_call, self._see)
        patches.listen(self.recorder.on_loss, self._come_back)
        self.recorder.on_loss.remove(self._come_back)  # listens while the calls are not listened to
        patches.listen(self.recorder.on_trouble, self._see_trouble)
        self.recorder.note("probe", {"probe": "stats"})

    def _see(self, call: Call) -> None:
        if self._serial != self.recorder.serial:
            self._begin_step()
        entry = call.entry
        if id(entry) in self._resting:
            return
        if not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        module, output, is_over = call.module, call.output, True
        if isinstance(module, _MIXERS) and call.args and _is_plain(call.args[0]):
            is_over = self._see_input(module, entry.name, call.args[0]) and is_over
        if _is_plain(output) and output.grad_fn is not None and output.dim() > 1:
            is_over = self._see_output(entry.name, output) and is_over
        if call.is_root and module.training:
            last = self._seen.get(output.data_ptr()) if _is_plain(output) else None
            if last is not None:
                last.is_output = True
            is_over = self._see_root(call) and is_over
        known = self._looked.get(id(entry))
        self._looked[id(entry)] = (entry, is_over and (known is None or known[1]))

    def _begin_step(self) -> None:
        """Where every step is looked at, leave out what the rest of a block of them cannot change."""
        self._serial = self.recorder.serial
        self._seen.clear()
        self._turns.clear()
        block = self._find_block()
        if block < 0 or block != self._block:
            self._block = block
            self._resting.clear()
        elif self._looked:
            over = {key: entry for key, (entry, is_over) in self._looked.items() if is_over}
            self._resting.update(over)
            if len(over) == len(self._looked):
                self.recorder.on_call.remove(self._see)
                self.recorder.on_loss.append(self._come_back)
        self._looked.clear()

    def _find_block(self) -> int:
        """Return the number of the block of steps that goes on, -1 where only some steps are looked at."""
        step = self.recorder.step
        return step // _BLOCK if self.recorder.schedule.is_first(step, steps=_DENSE_STEPS) else -1

    def _come_back(self, _loss: torch.Tensor) -> None:
        """Listen to calls again when the next step begins a block, or not every step is looked at any more."""
        step = self.recorder.step + 1
        if not step % _BLOCK or not self.recorder.schedule.is_first(step, steps=_DENSE_STEPS):
            self.recorder.on_loss.remove(self._come_back)
            self.recorder.on_call.append(self._see)

    def _see_trouble(self, _kind: str, _name: str) -> None:
        """Something is bad: tell which samples of the step's inputs hold a NaN or an infinity, if any do."""
        if self.recorder.step == self._troubled:
            return
        self._troubled = self.recorder.step
        leaves = (leaf for call in self.recorder.calls for _, leaf in walk((call.args, call.kwargs)))
        for leaf in leaves:
            if (
                not _is_plain(leaf)
                or leaf.grad_fn is not None
                or not leaf.is_floating_point()
                or not leaf.dim()
            ):
                continue
            bad = (~leaf.detach().isfinite()).reshape(len(leaf), -1).any(1).nonzero().flatten().tolist()
            if bad and not _is_mask(leaf):
                self.recorder.note(
                    "bad-batch", {"samples": bad[:8], "count": len(bad), "shape": list(leaf.shape)}
                )

    # ---------------------------------------------------------------- what enters a layer

    def _see_input(self, module: torch.nn.Module, name: str, tensor: torch.Tensor) -> bool:
        """Return whether the next steps have nothing new to show here."""
        if not tensor.is_floating_point() or not tensor.numel():
            return True
        node = tensor.grad_fn
        if node is None:
            if self.recorder.step < _INPUT_STEPS:
                self._note_input(module, name, tensor)
            return self.recorder.step >= _INPUT_STEPS - 1
        form = _name_activation(node)
        if not form and _is_table(node):
            if self.recorder.step < _INPUT_STEPS:
                self._note_input(module, name, tensor, is_joined=True)
            return self.recorder.step >= _INPUT_STEPS - 1
        if form == "relu":
            units = 1 if isinstance(module, _CONVOLUTIONS) else tensor.dim() - 1
            return self._see_relu(f"{name} (input)", tensor, units)
        return self._see_bounded(f"{name} (input)", tensor, form) if form else True

    def _note_input(
        self, module: torch.nn.Module, name: str, tensor: torch.Tensor, *, is_joined: bool = False
    ) -> None:
        self._row.measure(tensor, 0)
        row = self._row.values[0]
        stats = {stat: float(row[STAT_INDEX[stat]]) for stat in ("min", "max", "mean", "std")}
        self.recorder.note(
            "first-input",
            {
                "site": name,
                "type": type(module).__name__,
                "shape": list(tensor.shape),
                "zero": float(row[STAT_INDEX["zero"]]) / tensor.numel(),
                "is_whole": stats["max"] > 50 and _is_whole(tensor),
                "is_joined": is_joined,
                **stats,
            },
        )

    # ---------------------------------------------------------------- activations

    def _see_output(self, name: str, tensor: torch.Tensor) -> bool:
        if tensor.grad_fn is None or type(tensor.grad_fn).__name__ not in _RELU:
            return True
        return self._see_relu(name, tensor, 1 if tensor.dim() > 3 else tensor.dim() - 1)

    def _see_relu(self, site: str, tensor: torch.Tensor, units: int) -> bool:
        """Note which units gave anything but zero, once for each tensor however many modules pass it on."""
        address = tensor.data_ptr()
        known = self._seen.get(address)
        if known is not None:
            return known.is_known
        if not tensor.numel() or not 0 <= units < tensor.dim():
            return True
        # One module may serve several layers: their numbers of units tell them apart, and their order in a step.
        key = (site, tensor.shape[units])
        turn = self._turns[key] = min(self._turns.get(key, -1) + 1, _MOST_TURNS)
        place = (*key, turn)
        activation = self._activations.get(place)
        if activation is None:
            activation = self._activations[place] = _Activation("relu", turn)
        self._seen[address] = activation
        activation.see_units(tensor.detach(), units)
        return self._count(site, activation, tensor.numel() // tensor.shape[units])

    def _see_bounded(self, site: str, tensor: torch.Tensor, form: str) -> bool:
        activation = self._activations.setdefault((site, 0, 0), _Activation(form))
        with torch.no_grad():
            values = tensor.detach()
            far = (values - 0.5).abs() > 0.49 if form == "sigmoid" else values.abs() > 0.99
            activation.shares.append(float(far.float().mean()))
        return self._count(site, activation, tensor.shape[0])

    def _count(self, site: str, activation: _Activation, samples: int) -> bool:
        """Note what the block of batches came to, at its end or when that is known; return whether it is."""
        activation.batches += 1
        activation.samples += samples
        activation.is_known = self._block >= 0 and activation.is_settled()
        if activation.batches < _BLOCK and not activation.is_known:
            return False
        self.recorder.note(
            "activation",
            {
                "site": site,
                "form": activation.form,
                "turn": activation.turn,
                "is_output": activation.is_output,
                "batches": activation.batches,
                "samples": activation.samples,
                "units": activation.units,
                "dead": max(activation.dead, 0),
                "saturated": median(activation.shares) if activation.shares else 0.0,
            },
        )
        activation.clear()
        return activation.is_known

    # ---------------------------------------------------------------- what leaves a model

    def _see_root(self, call: Call) -> bool:
        """Compare the outputs of a step with each other, those of all calls: a model may see one class a call.

        Return whether some steps in a row have shown that they differ.
        """
        outputs = (call.output,) if _is_plain(call.output) else list_leaves(call.output)
        found = next((leaf for leaf in outputs if leaf.is_floating_point()), None)
        if (
            found is None
            or found.grad_fn is None
            or found.dim() < 1
            or found.shape[0] < 4
            or not found.numel()
        ):
            return True
        seen = self._outputs.get(call.entry.name)
        if seen is None:
            seen = self._outputs[call.entry.name] = _Outputs()
        if seen.serial != self._serial:
            self._judge_outputs(call.entry.name, seen)
            seen.serial, seen.low, seen.high = self._serial, None, None
            seen.clear_turns = seen.clear_turns + 1 if seen.differ else 0
            seen.inputs_differ = seen.differ = False
        turned = seen.direction.see(found, self.recorder.step)
        if turned is not None and _inputs_differ(call, found.shape[0]):
            self.recorder.note("one-direction", {"site": call.entry.name, **turned})
        if seen.differ or _differ_clearly(found.detach()):
            seen.differ, seen.equal_steps, seen.low = True, 0, None
            return seen.clear_turns >= _FEWEST_TURNS - 1 and not seen.direction.is_followed
        with torch.no_grad():
            sample = _sample(found)
            low, high = sample.amin(0), sample.amax(0)
            if seen.low is not None and seen.high is not None and seen.low.shape == low.shape:
                low, high = torch.minimum(low, seen.low), torch.maximum(high, seen.high)
            seen.low, seen.high = low, high
            seen.inputs_differ = seen.inputs_differ or _inputs_differ(call, found.shape[0])
        return False

    def _judge_outputs(self, name: str, seen: _Outputs) -> None:
        if seen.low is None or seen.high is None or not seen.inputs_differ:
            return
        spread = float((seen.high - seen.low).max())
        largest = max(float(seen.high.max()), -float(seen.low.min()))
        if not spread <= 1e-4 * largest + 1e-30:
            seen.equal_steps = 0
            return
        if not seen.equal_steps:
            seen.since = self.recorder.step - 1
        seen.equal_steps += 1
        if seen.equal_steps >= _BLOCK and not seen.was_told:
            seen.was_told = True
            self.recorder.note(
                "equal-outputs",
                {
                    "site": name,
                    "since": seen.since,
                    "steps": seen.equal_steps,
                    "spread": spread,
                    "largest": largest,
                },
            )


def _find_active(values: NDArray[Any], dim: int) -> NDArray[np.bool_]:
    """Return which units gave anything but zero somewhere; a NaN is not zero."""
    others = tuple([each for each in range(values.ndim) if each != dim])
    found: NDArray[np.bool_] = np.logical_or.reduce(values, others)
    return found


def _is_plain(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout == torch.strided
        and not value.is_nested
        and not value.is_meta
    )


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether some of the numbers of a tensor are whole numbers, as bytes are."""
    some = tensor.detach().reshape(-1)[:_FEATURES]
    return bool((some == some.round()).all())


def _is_mask(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds nothing but zeros and minus infinity."""
    return bool(((tensor == 0) | (tensor == -torch.inf)).all())


def _inputs_differ(call: Call, samples: int) -> bool:
    """Return whether a batch holds different samples; one that cannot be compared does not count."""
    for _, leaf in walk((call.args, call.kwargs)):
        if _is_plain(leaf) and leaf.numel() and leaf.dim() and leaf.shape[0] == samples:
            rows = _sample(leaf)
            return not torch.equal(rows[0], rows[-1]) or bool((rows != rows[:1]).any())
    return False


def _differ_clearly(outputs: torch.Tensor) -> bool:
    """Return whether the first and the last output are so far apart that no third one could make them equal."""
    if outputs.is_complex():
        return False
    if outputs.numel() <= _SMALL * len(outputs):
        first, last = glance_row(outputs, 0, _SMALL), glance_row(outputs, -1, _SMALL)
        enough = 0.1 * max(map(abs, first))
        return any(abs(a - b) > enough for a, b in zip(first, last, strict=True))
    one, other = copy_numbers(outputs[0]), copy_numbers(outputs[-1])
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(abs(one - other).max() > 0.1 * abs(one).max())


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a few samples and features of a tensor as float: enough to tell whether rows differ."""
    rows = tensor.detach()[:_SAMPLES]
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj())
    return rows.reshape(len(rows), -1)[:, :_FEATURES].float()


def _is_table(node: Any) -> bool:
    """Return whether a tensor is made of raw columns beside embeddings of others, as those of a table are."""
    if type(node).__name__ != "CatBackward0":
        return False
    parts = [feeder(node, at) for at in range(len(node.next_functions))]
    return None in parts and all(part is None or _is_embedded(part) for part in parts)


def _is_embedded(node: Any) -> bool:
    """Return whether a tensor is an embedding, or several side by side, with or without dropout."""
    for _ in range(4):
        if node is None or type(node).__name__ in _EMBEDDING:
            return node is not None
        if type(node).__name__ not in _AROUND:
            return False
        node = feeder(node)
    return False


def _name_activation(node: Any) -> str:
    """Return the activation a tensor comes from, seen through reshaping and pooling, or nothing."""
    for _ in range(4):
        name = type(node).__name__
        if name in _RELU:
            return "relu"
        if name in _BOUNDED:
            return _BOUNDED[name]
        if name not in _PASSING or node.next_functions[0][0] is None:
            return ""
        node = node.next_functions[0][0]
    return ""
