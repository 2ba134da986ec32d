"""Notes rows that are evaluated although the model was trained on them."""

from __future__ import annotations

import math
import weakref
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from clew.capture.torch.glance import sample_first, sample_rows
from clew.capture.torch.leaves import list_leaves, walk
from clew.capture.torch.naming import user_frames
from clew.capture.torch.probe_events import find_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

_Sample = tuple[int, bytes, np.dtype[Any]]
"""How many rows, some numbers of each, and their type."""

_STEPS: Final = 400
"""Steps of which every row is remembered; later those of probed steps."""

_MOST_ROWS: Final = 100_000
_NUMBERS: Final = 32
_FEWEST_NUMBERS: Final = 16
_STEPS_APART: Final = 4
_MOST_PASSES: Final = 40
_MOST_FRAMES: Final = 6
_CHANCE_ROWS: Final = 256
_CHANCE_CALLS: Final = 4
_WHOLLY: Final = 0.98
"""A call with so many trained rows, at least half of all there are, is one of the training data itself."""


class _Pass:
    """Rows that were given to the model without gradients, between two training calls."""

    def __init__(self, line: str, dataset: int) -> None:
        self.line = line
        self.dataset = dataset
        self.rows = 0
        self.known = 0
        self.own_rows = 0
        self.own_known = 0
        """Rows of calls with the training data itself, and how many of them were trained on."""
        self.is_eval = False
        self.is_whole = True
        """All numbers are whole, as those of tokens, counts and choices are: such rows may be equal by chance."""
        self.is_tokens = True
        self.calls = 0
        self.chance = 0.0
        """How likely two rows are to be equal if each column is drawn by itself, in the most uniform of the calls."""
        self.alike = 0
        self.seen: set[float] = set()

    def add(self, sample: _Sample, known: set[float]) -> None:
        """Count the rows of one call: how many were trained on, and how many were in this pass before."""
        found = _hash(sample)
        trained = sum(value in known for value in found)
        self.rows += len(found)
        self.known += trained
        if trained >= max(_WHOLLY * len(found), len(known) / 2, 1):
            self.own_rows += len(found)
            self.own_known += trained
        self.is_whole = self.is_whole and _is_whole(sample)
        self.is_tokens = self.is_tokens and sample[2].kind in "iu"
        if self.is_whole and self.calls < _CHANCE_CALLS:
            self.calls += 1
            self.chance = max(self.chance, _find_chance(sample))
        self.alike += len(found) - len(set(found) - self.seen)
        self.seen.update(found)


class OverlapProbe:
    """Remembers fingerprints of the rows that led to training, and counts those that come back in evaluation."""

    def __init__(self, recorder: Recorder, events: LoopEvents) -> None:
        self.recorder = recorder
        self.events = events
        self._waiting: dict[int, list[_Sample]] = {}
        self._counts: dict[int, int] = {}
        self._trained: dict[int, set[float]] = {}
        self._trained_on: set[int] = set()
        self._fed: tuple[int, frozenset[int]] = (0, frozenset())
        self._roots: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._streams: dict[tuple[Any, ...], _Pass] = {}
        self._passes = 0
        self._alike = 0
        """Rows that were equal to another one of their training batch."""
        self._last = -_STEPS_APART

    def install(self, patches: Patches) -> None:
        """Begin to compare."""
        patches.listen(self.recorder.on_batch, self._see_batch)
        patches.listen(self.recorder.on_root, self._see_root)
        patches.on_undo(self._close)
        self.recorder.note("probe", {"probe": "overlap"})

    def _see_batch(self, iterator: Any, batch: Any) -> None:
        addresses = frozenset(
            leaf.untyped_storage().data_ptr() for _, leaf in walk(batch) if type(leaf) is torch.Tensor
            and leaf.layout == torch.strided
        )  # fmt: skip
        self._fed = (id(getattr(iterator, "_dataset", None)), addresses)

    def _see_root(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._passes >= _MOST_PASSES or self.recorder.in_backward:
            return
        if torch.is_grad_enabled():
            if module.training:
                self._see_training(module, args, kwargs, output)
        elif self._counts.get(id(module)) and self._roots[id(module)]() is module and not _is_transformed():
            self._see_quiet(module, args, kwargs)

    def _see_training(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # What a transform gives is wrapped: where it is one tensor, asking that takes less time.
        is_one = type(output) is torch.Tensor
        if is_functorch_wrapped_tensor(output) if is_one else _is_transformed():
            return
        if self._streams:
            self._close()
        step = self.recorder.step
        known = self._roots.get(id(module))
        if known is None or known() is not module:
            # Another model has seen nothing yet: folds of one data set train one each.
            self._roots[id(module)], self._trained[id(module)] = weakref.ref(module), set()
            self._waiting.pop(id(module), None)
            self._counts[id(module)] = 0
        seen = self._counts[id(module)]
        if seen >= _MOST_ROWS or (step >= _STEPS and not self.recorder.probing):
            return
        dataset, addresses = self._fed
        if dataset in self._trained_on or not dataset:
            is_trained = is_one and output.requires_grad
            sample = sample_first((args, kwargs), _NUMBERS, _FEWEST_NUMBERS) if is_trained else None
            if sample:
                self._waiting.setdefault(id(module), []).append(sample)
                self._counts[id(module)] = seen + sample[0]
            if sample is not None:
                return
        first = output if type(output) is torch.Tensor else next(iter(list_leaves(output)), None)
        leaf = _find_rows(args, kwargs)
        if leaf is not None and first is not None and first.requires_grad:
            rows = len(leaf)
            self._waiting.setdefault(id(module), []).append((rows, *sample_rows(leaf, _NUMBERS)))
            self._counts[id(module)] = seen + rows
            if dataset not in self._trained_on and leaf.untyped_storage().data_ptr() in addresses:
                self._trained_on.add(dataset)

    def _see_quiet(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        leaf = _find_rows(args, kwargs)
        if leaf is None:
            return
        dataset, addresses = self._fed
        dataset = dataset if leaf.untyped_storage().data_ptr() in addresses else 0
        # One function may evaluate several sets: who calls it tells them apart.
        lines = tuple(frame.f_lineno for frame in islice(user_frames(), _MOST_FRAMES))
        stream = self._streams.get((dataset, lines))
        if stream is None:
            stream = self._streams[dataset, lines] = _Pass(find_line(), dataset)
        stream.add((len(leaf), *sample_rows(leaf, _NUMBERS)), self._known_rows(module))
        stream.is_eval = stream.is_eval or not module.training

    def _close(self) -> None:
        """A pass without gradients has ended: tell how much of it was trained on."""
        if not self._streams:
            return
        streams, self._streams = self._streams, {}
        since, self._last = self.recorder.step - self._last, self.recorder.step
        self._passes += 1
        for done in streams.values():
            # A call in every step makes targets or labels for the training; it is no evaluation.
            if (
                (since < _STEPS_APART and not done.is_eval)
                or not done.rows
                or done.dataset in self._trained_on
            ):
                continue
            told: dict[str, Any] = {
                "rows": done.rows,
                "trained": done.known,
                "has_loader": bool(done.dataset),
            }
            if done.own_rows:
                told["training_data"] = {"rows": done.own_rows, "trained": done.own_known}
            told |= {"is_whole": done.is_whole, "is_tokens": done.is_tokens, "chance": done.chance}
            told["alike"] = done.alike + self._alike
            self.recorder.note("evaluated-rows", {**told, "source": done.line})

    def _known_rows(self, module: torch.nn.Module) -> set[float]:
        """Return the fingerprints of the rows a model was trained on; they are made when somebody asks."""
        known, waiting = self._trained[id(module)], self._waiting.pop(id(module), [])
        for sample in waiting:
            found = _hash(sample)
            self._alike += len(found) - len(set(found))
            known.update(found)
        return known


def _hash(sample: _Sample) -> list[float]:
    """Return a fingerprint of each row that is not constant, the same for equal rows."""
    rows, memory, dtype = sample
    numbers: NDArray[Any] = np.frombuffer(memory, dtype).reshape(rows, -1)
    width = numbers.shape[1]
    weights = np.random.Generator(np.random.PCG64(width)).random(width)
    # Summed row by row: a product of matrices may round differently from place to place.
    values = (numbers.astype(np.float64) * weights).sum(1)
    told: list[float] = values[(numbers != numbers[:, :1]).any(1)].tolist()
    return told


def _is_whole(sample: _Sample) -> bool:
    _, memory, dtype = sample
    numbers: NDArray[Any] = np.frombuffer(memory, dtype)
    return dtype.kind != "f" or bool((numbers == np.floor(numbers)).all())


def _find_chance(sample: _Sample) -> float:
    """Return how likely two rows are to be equal, their columns taken for independent of each other."""
    rows, memory, dtype = sample
    numbers: NDArray[Any] = np.frombuffer(memory, dtype).reshape(rows, -1)[:_CHANCE_ROWS]
    pairs = len(numbers) * (len(numbers) - 1)
    if not pairs:
        return 1.0
    counts = [np.unique(column, return_counts=True)[1] for column in numbers.T]
    # Where no two are equal, at most about one pair in all of them is.
    return math.prod(max(int((count * (count - 1)).sum()), 1) / pairs for count in counts)


def _is_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def _find_rows(args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return the first input whose rows can be told apart: data, with enough numbers each."""
    for leaf in list_leaves((args, kwargs)):
        if type(leaf) is not torch.Tensor or leaf.layout != torch.strided:
            continue
        if leaf.dim() < 2 or leaf.grad_fn is not None or leaf.is_meta or leaf.is_complex():
            continue
        if (size := leaf.numel()) and size // len(leaf) >= _FEWEST_NUMBERS:
            return leaf
    return None
