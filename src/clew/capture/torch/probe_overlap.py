"""Notes rows that are evaluated although the model was trained on them."""

from __future__ import annotations

import weakref
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.leaves import walk
from clew.capture.torch.naming import user_frames
from clew.capture.torch.probe_events import find_line

if TYPE_CHECKING:
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

_STEPS: Final = 400
"""Steps of which every row is remembered; later those of recorded steps."""

_MOST_ROWS: Final = 100_000
_NUMBERS: Final = 64
_FEWEST_NUMBERS: Final = 16
_STEPS_APART: Final = 4
_MOST_PASSES: Final = 40
_MOST_FRAMES: Final = 6


class _Pass:
    """Rows that were given to the model without gradients, between two training calls."""

    def __init__(self, line: str, dataset: int) -> None:
        self.line = line
        self.dataset = dataset
        self.rows = 0
        self.known = 0
        self.is_eval = False


class OverlapProbe:
    """Remembers fingerprints of the rows that led to training, and counts those that come back in evaluation."""

    def __init__(self, recorder: Recorder, events: LoopEvents) -> None:
        self.recorder = recorder
        self.events = events
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._trained: dict[int, set[float]] = {}
        self._trained_on: set[int] = set()
        self._fed: tuple[int, frozenset[int]] = (0, frozenset())
        self._roots: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._streams: dict[tuple[Any, ...], _Pass] = {}
        self._passes = 0
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
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if torch.is_grad_enabled():
            if module.training:
                self._see_training(module, args, kwargs, output)
        elif self._trained.get(id(module)) and self._roots[id(module)]() is module:
            self._see_quiet(module, args, kwargs)

    def _see_training(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._close()
        step = self.recorder.step
        known = self._roots.get(id(module))
        if known is None or known() is not module:
            # Another model has seen nothing yet: folds of one data set train one each.
            self._roots[id(module)], self._trained[id(module)] = weakref.ref(module), set()
        rows = self._trained[id(module)]
        if len(rows) >= _MOST_ROWS or (step >= _STEPS and not self.recorder.due):
            return
        first = next((leaf for _, leaf in walk(output)), None)
        leaf = _find_rows(args, kwargs)
        if leaf is not None and first is not None and first.requires_grad:
            rows.update(self._hash(leaf))
            dataset, addresses = self._fed
            if leaf.untyped_storage().data_ptr() in addresses:
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
        found = self._hash(leaf)
        stream.rows += len(found)
        stream.known += sum(value in self._trained[id(module)] for value in found)
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
            told = {"rows": done.rows, "trained": done.known, "has_loader": bool(done.dataset)}
            self.recorder.note("evaluated-rows", {**told, "source": done.line})

    def _hash(self, leaf: torch.Tensor) -> list[float]:
        """Return a number for each row that is not constant, the same for equal rows."""
        with torch.no_grad():
            rows = leaf.detach().reshape(len(leaf), -1)
            known = self._weights.get(rows.shape[1])
            if known is None:
                generator = torch.Generator().manual_seed(rows.shape[1])
                places = torch.randperm(rows.shape[1], generator=generator)[:_NUMBERS]
                weights = torch.rand(len(places), generator=generator, dtype=torch.float64)
                known = self._weights[rows.shape[1]] = (places.to(rows.device), weights.to(rows.device))
            some = rows[:, known[0]].double()
            values = (some @ known[1]).tolist()
            is_telling = (some != some[:, :1]).any(1).tolist()
        return [value for value, telling in zip(values, is_telling, strict=True) if telling]


def _find_rows(args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return the first input whose rows can be told apart: data, with enough numbers each."""
    for _, leaf in walk((args, kwargs)):
        is_plain = type(leaf) is torch.Tensor and leaf.layout == torch.strided and not leaf.is_complex()
        if not is_plain or leaf.dim() < 2 or leaf.grad_fn is not None or leaf.device.type == "meta":
            continue
        if leaf.numel() and leaf.numel() // leaf.shape[0] >= _FEWEST_NUMBERS:
            return leaf
    return None
