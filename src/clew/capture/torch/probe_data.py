"""Notes what is odd about the data a model is trained on: equal samples, equal batches, sorted labels, uneven sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import ne
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from clew.capture.torch.glance import glance, glance_row, sample_rows
from clew.capture.torch.leaves import list_leaves, local_part, walk
from clew.capture.torch.probe_events import find_line
from clew.capture.torch.probe_learns import has_parameters
from clew.capture.torch.saved import walk_nodes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.saved import SavedRegions

_FIRST_STEPS: Final = 20
_INPUT_STEPS: Final = 3
"""Steps in which samples are compared; more of them where some were equal."""

_FEWEST_ROWS: Final = 4
_FEWEST_NUMBERS: Final = 4
_EQUAL_BATCHES: Final = 2
_SAME_FETCHES: Final = 10
_MOST_LABELS: Final = 4096
_FEWEST_LABELS: Final = 256
_FEWEST_BORDERS: Final = 3
"""Between so many batches the order is looked at: that inside one batch changes nothing."""
_ROW_NUMBERS: Final = 64
_ORDER_ROWS: Final = 64
_FEWEST_IN_ORDER: Final = 8
_GLANCE: Final = 16
_MOST_NODES: Final = 60
_MOST_STEPS: Final = 400
_MOST_NOTES: Final = 3

_LABEL_NAMES: Final = frozenset(("label", "labels", "target", "targets", "y"))
_LABELLED: Final = (
    "NllLossBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
    "BinaryCrossEntropyBackward0",
)


class _Fetched:
    """The batches of one data set that were fetched as the first of an iterator, one after the other."""

    def __init__(self) -> None:
        self.values: tuple[Any, ...] = ()
        self.same = 0
        self.length = 0
        self.source = ""


class DataProbe:
    """Looks at the inputs of the first training calls, at what loaders give, and at the order of labels."""

    def __init__(self, recorder: Recorder, events: LoopEvents, saved: SavedRegions) -> None:
        self.recorder = recorder
        self.events = events
        self.saved = saved
        self._equal = 0
        self._inputs: tuple[Any, ...] = ()
        self._repeats = 0
        self._is_told = False
        self._fetches = 0
        self._length = 0
        self._uneven = 0
        self._fetched: dict[int, _Fetched] = {}
        self._waiting: _Fetched | None = None
        self._labels: list[float] = []
        self._borders: list[bool] = []
        self._mixed: list[tuple[int, float]] = []
        """Of each batch how many labels it has, and how likely two of them are to differ."""
        self._order_step = -1
        self._rows: list[tuple[int, bytes, np.dtype[Any]]] = []
        """Of each of the first batches how many rows, some numbers of each, and their type."""
        self._is_counting = True

    def install(self, patches: Patches) -> None:
        """Begin to see batches, inputs and labels."""
        patches.listen(self.recorder.on_batch, self._see_batch)
        patches.listen(self.recorder.on_exhausted, self._see_exhausted)
        patches.listen(self.recorder.on_root, self._see_root)
        patches.listen(self.recorder.on_each_loss, self._see_loss)
        self.recorder.note("probe", {"probe": "data"})

    def is_settled(self) -> bool:
        """Return whether no samples and no batches of the last steps were equal."""
        is_repeating = self._repeats > 1 or any(each.same > 1 for each in self._fetched.values())
        return not self._equal and not is_repeating

    def wake(self) -> None:
        """Compare the batches from here on."""
        self._fetches, self._repeats, self._inputs, self._waiting = 0, 0, (), None
        self._fetched.clear()

    # ---------------------------------------------------------------- what loaders give

    def _see_batch(self, iterator: Any, batch: Any) -> None:
        self._see_sizes(batch)
        self._waiting = None
        self._fetches += 1
        self._length = max(self._length, _length(iterator))
        if getattr(iterator, "_num_yielded", 1) != 1:
            self._fetched.clear()  # an iterator that goes on is no iterator made anew for each batch
            return
        length = _length(iterator)
        if length == 1:
            return
        seen = self._fetched.setdefault(id(getattr(iterator, "_dataset", None)), _Fetched())
        values = _glance(leaf for _, leaf in walk(batch))
        seen.same = seen.same + 1 if values == seen.values else 1
        seen.values, seen.length = values, length
        self._waiting = seen

    def _see_exhausted(self, iterator: Any) -> None:
        """An iterator came to its end: whoever loops over it takes all there is, if that is one batch."""
        self._fetched.pop(id(getattr(iterator, "_dataset", None)), None)

    def _see_sizes(self, batch: Any) -> None:
        """Features and labels that do not belong together: so many of one, another number of the other."""
        if self._uneven >= _MOST_NOTES or not self._is_first():
            return
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        if not isinstance(parts, (list, tuple)) or len(parts) != 2:
            return
        given, labels = parts
        if not isinstance(given, torch.Tensor) or not isinstance(labels, torch.Tensor):
            return
        if given.dim() < 2 or not given.is_floating_point() or labels.dim() not in (1, 2):
            return
        if labels.dim() == 2 and labels.shape[1] != 1:
            return
        if len(labels) > 1 and len(labels) not in given.shape[:2]:
            self._uneven += 1
            self.recorder.note(
                "uneven-batch",
                {
                    "count": self._uneven,
                    "shapes": [list(given.shape), list(labels.shape)],
                    "source": find_line(),
                },
            )

    def _is_first(self) -> bool:
        return self.recorder.schedule.is_first(self.recorder.step, steps=_FIRST_STEPS)

    # ---------------------------------------------------------------- what a model is given

    def _see_root(self, module: torch.nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if not torch.is_grad_enabled():
            self._waiting = None
            return
        if self._waiting is not None and has_parameters(module):
            self._see_fetched(self._waiting)
            self._waiting = None
        if module.training and self._is_first() and not self.recorder.in_backward:
            if self._equal or self.recorder.schedule.is_first(self.recorder.step, steps=_INPUT_STEPS):
                self._see_inputs(module, args, kwargs)
            self._see_repeated(args, kwargs)

    def _see_repeated(self, args: Any, kwargs: Any) -> None:
        """The very inputs of the last step although the loader has given another batch since."""
        if not self._fetches or self._length < 2:
            return
        fetches, self._fetches = self._fetches, 0
        inputs = _glance(leaf for _, leaf in walk((args, kwargs)))
        self._repeats = self._repeats + 1 if inputs and inputs == self._inputs and fetches else 1
        self._inputs = inputs
        if self._repeats == _SAME_FETCHES and not self._is_told:
            self._is_told = True
            note = {"count": self._repeats, "batches": self._length, "source": find_line()}
            self.recorder.note("same-batch", note)

    def _see_fetched(self, seen: _Fetched) -> None:
        """The first batch of a new iterator led to training again, and it is the same one."""
        if seen.same == _SAME_FETCHES and not self._is_told:
            self._is_told = True
            note = {"count": seen.same, "batches": seen.length, "source": find_line()}
            self.recorder.note("same-batch", note)

    def _see_inputs(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not has_parameters(module):
            return
        # What is trained itself, such as a code for each sample, is no data.
        owns = self.recorder.registry.owns
        given = [leaf for leaf in list_leaves((args, kwargs)) if not leaf.requires_grad]
        leaves = [leaf for leaf in given if _is_data(leaf) and not owns(leaf)]
        labels = _list_labels((kwargs, *args))
        leaves = [leaf for leaf in leaves if not labels or id(leaf) not in labels]
        main = next((leaf for leaf in leaves if leaf.is_floating_point()), None)
        if main is None:
            main = self._find_tokens(leaves)
        if main is None or main.dim() < 2 or main.shape[0] < _FEWEST_ROWS:
            return
        rows = main.detach().reshape(len(main), -1)
        if main.is_floating_point():
            self._see_order(rows)
        together = [leaf for leaf in leaves if leaf.shape[0] == main.shape[0]]
        is_telling = rows.shape[1] >= _FEWEST_NUMBERS
        if (
            is_telling
            and self._equal < _MOST_NOTES
            and all(_has_equal_rows(leaf) for leaf in together)
            and any(_varies(leaf) for leaf in together)
        ):
            self._equal += 1
            name = self.recorder.registry.modules.get(id(module))
            self.recorder.note(
                "equal-samples",
                {
                    "count": self._equal,
                    "shape": list(main.shape),
                    "site": name.name if name is not None else type(module).__name__,
                    "source": find_line(),
                },
            )

    def _find_tokens(self, leaves: list[torch.Tensor]) -> torch.Tensor | None:
        """Return tokens that come from a loader: others may be positions, or one prompt for all on purpose."""
        tokens = next((leaf for leaf in leaves if leaf.dim() == 2), None)
        if tokens is None or tokens.dtype != torch.int64 or not self._length:
            return None
        given = (leaf for _, leaf in walk(self.recorder.flight.last_batch))
        return tokens if any(leaf.data_ptr() == tokens.data_ptr() for leaf in given) else None

    # ---------------------------------------------------------------- the order of labels

    def _see_order(self, rows: torch.Tensor) -> None:
        """Keep some numbers of the rows: they tell later how near neighbours are to each other."""
        if len(self._rows) < _MOST_NOTES and len(rows) >= _FEWEST_IN_ORDER:
            some = rows[:_ORDER_ROWS]
            self._rows.append((len(some), *sample_rows(some, _ROW_NUMBERS)))

    def _see_loss(self, loss: torch.Tensor) -> None:
        if loss.grad_fn is None:
            return
        is_enough = len(self._labels) >= _MOST_LABELS or self.recorder.step > _MOST_STEPS
        if is_enough or not self._is_counting:
            self.recorder.on_each_loss.remove(self._see_loss)
            return
        if self.recorder.step == self._order_step:
            self._is_counting = False  # several losses in a step: their labels are not one series
            return
        self._order_step = self.recorder.step
        labels = self._find_labels(loss)
        self._is_counting = bool(labels)
        before = len(self._labels) // _FEWEST_LABELS
        if labels and self._labels:
            self._borders.append(labels[0] != self._labels[-1])
        self._labels += labels
        if len(labels) > 1:
            self._mixed.append((len(labels), _differ(labels)))
        if len(self._labels) // _FEWEST_LABELS > before:
            self._tell_order()

    def _find_labels(self, loss: torch.Tensor) -> tuple[float, ...]:
        for node in walk_nodes(loss.grad_fn, most=_MOST_NODES):
            if type(node).__name__ in _LABELLED and self.saved.may_read(node):
                try:
                    targets = local_part(node._saved_target).detach()
                except RuntimeError:  # freed by an earlier backward
                    return ()
                if targets.dim() == 1 or (targets.dim() == 2 and targets.shape[1] == 1):
                    return glance(targets[:_MOST_LABELS], _MOST_LABELS)
                return ()
        return ()

    def _tell_order(self) -> None:
        labels = self._labels
        counts = Counter(labels)
        if len(counts) > len(labels) // 8:
            self._is_counting = False  # no classes
            return
        changes = sum(map(ne, labels, islice(labels, 1, None)))
        expected = _differ(labels)
        rate = changes / (len(labels) - 1)
        is_enough = len(labels) >= 2 * _FEWEST_LABELS and len(self._borders) >= _FEWEST_BORDERS
        self._is_counting = expected < 0.1 or not is_enough
        self.recorder.note(
            "label-order",
            {
                "labels": len(labels),
                "classes": len(counts),
                "change_rate": rate,
                "expected_rate": expected,
                "border_rate": sum(self._borders) / max(len(self._borders), 1),
                "borders": len(self._borders),
                "mixed_rate": sum(n * rate for n, rate in self._mixed)
                / max(sum(n for n, _ in self._mixed), 1),
                "neighbours": self._compare_neighbours() if rate < 0.5 * expected else 1.0,
            },
        )

    def _compare_neighbours(self) -> float:
        """Return how near neighbours are, by the distance of others: windows of one series are, samples are not."""
        found: list[float] = []
        for count, memory, dtype in self._rows:
            rows = np.frombuffer(memory, dtype).reshape(count, -1).astype(np.float64)
            near, far = _find_distance(rows, 1), _find_distance(rows, count // 2)
            found += [near / far] if far > 0 else []
        return min(found, default=1.0)


def _find_distance(rows: NDArray[np.float64], apart: int) -> float:
    """Return the mean squared distance of rows that lie so far apart."""
    with np.errstate(all="ignore"):
        between = rows[apart:] - rows[:-apart]
        return float(np.einsum("ij,ij->", between, between)) / len(between)


def _is_data(leaf: torch.Tensor) -> bool:
    is_plain = type(leaf) is torch.Tensor and leaf.layout == torch.strided and not leaf.is_meta
    return is_plain and leaf.grad_fn is None and leaf.dim() > 0 and leaf.numel() > 0


def _differ(labels: Sequence[float]) -> float:
    """Return how likely two of some labels are to differ."""
    count = len(labels)
    pairs = count * (count - 1)
    return 1 - sum(n * (n - 1) for n in Counter(labels).values()) / pairs if pairs else 0.0


def _list_labels(given: Iterable[Any]) -> set[int]:
    """Return which tensors are labels by their names: a model may be given a whole batch."""
    batches = [each for each in given if type(each) is not torch.Tensor and isinstance(each, Mapping)]
    return {id(value) for batch in batches for name, value in batch.items() if name in _LABEL_NAMES}


def _varies(leaf: torch.Tensor) -> bool:
    """Return whether a sample holds different numbers: zeros and ones all over are a state to begin with, no data."""
    with torch.no_grad():
        first = leaf.detach()[0].reshape(-1)
        return bool((first != first[:1]).any())


def _has_equal_rows(leaf: torch.Tensor) -> bool:
    values = leaf.detach()
    is_like = glance_row(values, 0, _GLANCE) == glance_row(values, -1, _GLANCE)
    return is_like and bool((values == values[:1]).all())


def _glance(leaves: Iterable[torch.Tensor]) -> tuple[Any, ...]:
    """Return the shapes and a few values of some tensors."""
    told: list[Any] = []
    for leaf in leaves:
        if not _is_data(leaf):
            continue
        told.append((tuple(leaf.shape), *glance(leaf, _GLANCE)))
    return tuple(told)


def _length(iterator: Any) -> int:
    try:
        return len(iterator)
    except TypeError:  # an iterable data set does not know
        return 0
