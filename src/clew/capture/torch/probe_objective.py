"""Notes what the loss is made of: the cross-entropy or squared error itself, and how a constant guess would do.

The nodes at the head of the loss's graph hold their operands, whatever the loss was called or where it came from.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from clew.capture.torch.glance import count_labels
from clew.capture.torch.probe_graph import feeder, name_of
from clew.capture.torch.saved import walk_nodes
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.saved import SavedRegions

_MOST_NODES: Final = 120
_MOST_CLASSES: Final = 1024
_MOST_ELEMENTS: Final = 1 << 20
_FEW: Final = 4096
"""Labels of one loss that may be kept for later."""

_SINGLE_NOTES: Final = 3
_SHARP: Final = 3.0
_WHOLE_WALKS: Final = 64
_BLOCK: Final = 16
"""The first objectives are noted one by one, later ones as the mean of so many."""


class _Tally:
    """One form of objective over the steps: its values, and what is known of the targets."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.observed = 0
        self.values: list[float] = []
        self.counts: Counter[int] | None = None
        self.uncounted: list[tuple[torch.Tensor, int, int]] = []
        """Labels that are counted later, with their version and the label that is ignored."""
        self.total = 0
        self.sum = 0.0
        self.squares = 0.0

    def add_labels(self, counted: Counter[int], classes: int) -> None:
        """Take the labels of a few classes, counted."""
        if classes <= _MOST_CLASSES:
            self.counts = counted if self.counts is None else self.counts + counted
        self.total += sum(counted.values())

    def count(self, classes: int) -> None:
        """Count what was put off; labels that were overwritten meanwhile are left out."""
        waiting, self.uncounted = self.uncounted, []
        kept = [labels for labels, version, _ in waiting if labels._version == version]
        if kept:
            counted = count_labels(kept)
            ignored = waiting[0][2]
            strange = [label for label in counted if not 0 <= label < classes or label == ignored]
            for label in strange:
                del counted[label]
            self.add_labels(counted, classes)

    def add_numbers(self, targets: torch.Tensor) -> None:
        """Take targets that are numbers into their mean and variance."""
        numbers = targets.double()
        self.total += targets.numel()
        self.sum += float(numbers.sum())
        self.squares += float(numbers.square().sum())

    def guess(self) -> float | None:
        """Return the loss of the best constant guess on the targets seen so far."""
        if not self.total:
            return None
        if self.form == "cross-entropy":
            if self.counts is None:
                return None
            known = sum(self.counts.values())
            return _entropy([count / known for count in self.counts.values()])
        mean = self.sum / self.total
        if self.form == "binary":
            return _entropy([mean, 1 - mean]) if 0 <= mean <= 1 else None
        return max(self.squares / self.total - mean * mean, 0.0)


def _entropy(shares: list[float]) -> float:
    return -sum(share * math.log(share) for share in shares if share > 0)


class _Usual(NamedTuple):
    """A loss that was seen to be the plain mean of cross-entropies: the kind of its node, and where it is counted."""

    kind: type
    tally: _Tally
    ignored: int


class _Reach:
    """How far into the graphs of losses with one and the same end something was found to read."""

    def __init__(self) -> None:
        self.walks = 0
        self.furthest = 0
        self.is_plain = False
        """Whether the first whole walk has found the end itself, and nothing further in."""

    def begin(self) -> int:
        """Return how many nodes to look at: most of them are the model's, and only now and then looked through."""
        self.walks += 1
        is_whole = self.walks <= (1 if self.is_plain else _SINGLE_NOTES) or self.walks % _WHOLE_WALKS == 0
        return _MOST_NODES if is_whole else self.furthest + 1


class ObjectiveProbe:
    """Reads the head of every loss in recorded steps; tells its value and that of a constant guess."""

    def __init__(self, recorder: Recorder, saved: SavedRegions) -> None:
        self.recorder = recorder
        self.saved = saved
        self._tallies: dict[tuple[str, int], _Tally] = {}
        self._usual: _Usual | None = None
        self._reaches: dict[type, _Reach] = {}
        self._readers: dict[str, Callable[[Any, torch.Tensor], None]] = {
            "NllLossBackward0": self._read_classes,
            "NllLoss2DBackward0": self._read_classes,
            "BinaryCrossEntropyWithLogitsBackward0": self._read_binary,
            "MseLossBackward0": self._read_squares,
        }

    def install(self, patches: Patches) -> None:
        """Begin to see losses."""
        patches.listen(self.recorder.on_loss, self._see)
        self.recorder.note("probe", {"probe": "objective"})

    def _see(self, loss: torch.Tensor) -> None:
        end = loss.grad_fn
        if not self.recorder.due or end is None:
            return
        reach = self._reaches.get(type(end))
        if reach is None:
            reach = self._reaches[type(end)] = _Reach()
        elif self._read_usual(end, loss, reach):
            return
        for position, node in enumerate(walk_nodes(end, most=reach.begin())):
            read = self._readers.get(type(node).__name__)
            if read is None or not self.saved.may_read(node):
                continue
            reach.furthest = max(reach.furthest, position)
            reach.is_plain = not reach.furthest
            try:
                with torch.no_grad():
                    read(node, loss)
            except RuntimeError:
                # Freed by an earlier backward, or changed in place: autograd itself will complain where it matters.
                continue

    # ---------------------------------------------------------------- forms

    def _read_usual(self, node: Any, loss: torch.Tensor, reach: _Reach) -> bool:
        """Take a loss that is the mean of cross-entropies as the last ones were; return whether it may be one."""
        usual, kind = self._usual, type(node)
        if usual is None or usual.kind is not kind or len(self._tallies) > 1:
            return False
        if reach.furthest or (reach.walks + 1) % _WHOLE_WALKS == 0:
            return False  # this walk does not end where it begins
        tally = usual.tally
        if len(tally.values) + 1 >= _BLOCK or KERNEL is None or not self.saved.may_read(node):
            return False
        value = KERNEL.read_number(loss)
        if value is None:
            return False
        try:
            targets = node._saved_target
        except RuntimeError:  # freed by an earlier backward
            return True
        if targets.numel() > _FEW:
            return False
        tally.uncounted.append((targets, targets._version, usual.ignored))
        tally.values.append(value)
        tally.observed += 1
        reach.walks += 1
        return True

    def _read_classes(self, node: Any, loss: torch.Tensor) -> None:
        scores, targets = node._saved_self, node._saved_target
        ignored = node._saved_ignore_index
        ignored = ignored - (1 << 64) if ignored >= 1 << 63 else ignored
        classes = scores.shape[1] if scores.dim() > 1 else scores.shape[0]
        if scores.dim() == 1 or not 0 < targets.numel() <= _MOST_ELEMENTS or not _is_normalised(node):
            return
        tally = self._tally("cross-entropy", classes)
        if tally.observed >= _SINGLE_NOTES and targets.numel() <= _FEW and _is_plain_mean(node, loss):
            # One by one they would cost ten times as much.
            tally.uncounted.append((targets, targets._version, ignored))
            self._usual = _Usual(type(node), tally, ignored)
            self._keep(tally, float(loss), classes=classes, describe=lambda: self._describe(node, classes))
            return
        counted = count_labels([targets])
        del counted[ignored]
        if not counted or min(counted) < 0 or max(counted) >= classes:
            return
        tally.add_labels(counted, classes)
        self._keep(
            tally,
            float(loss) if _is_plain_mean(node, loss) else _find_mean(scores, targets, targets != ignored),
            classes=classes,
            describe=lambda: self._describe(node, classes),
        )

    def _describe(self, node: Any, classes: int) -> dict[str, bool]:
        return {
            "is_pairing": _is_pairing(node._saved_target, classes),
            "is_sharpened": _is_sharpened(node, self.saved),
        }

    def _read_binary(self, node: Any, _loss: torch.Tensor) -> None:
        scores, targets = node._saved_self, node._saved_target
        if targets.numel() > _MOST_ELEMENTS or not targets.numel():
            return
        value = torch.nn.functional.softplus(scores) - scores * targets
        tally = self._tally("binary", 0)
        tally.add_numbers(targets)
        self._keep(tally, float(value.double().mean()), classes=2)

    def _read_squares(self, node: Any, _loss: torch.Tensor) -> None:
        guesses, targets = node._saved_self, node._saved_target
        if targets.numel() > _MOST_ELEMENTS or not targets.numel() or targets.requires_grad:
            return
        tally = self._tally("squares", 0)
        tally.add_numbers(targets)
        self._keep(tally, float((guesses - targets).double().square().mean()), classes=0)

    # ---------------------------------------------------------------- notes

    def _tally(self, form: str, classes: int) -> _Tally:
        return self._tallies.setdefault((form, classes), _Tally(form))

    def _keep(
        self,
        tally: _Tally,
        value: float,
        *,
        classes: int,
        describe: Callable[[], dict[str, bool]] = lambda: {"is_pairing": False, "is_sharpened": False},
    ) -> None:
        tally.values.append(value)
        tally.observed += 1
        if tally.observed > _SINGLE_NOTES and len(tally.values) < _BLOCK:
            return
        if tally.uncounted:
            tally.count(classes)
        self.recorder.note(
            "objective",
            {
                "form": tally.form,
                "value": sum(tally.values) / len(tally.values),
                "steps": len(tally.values),
                "guess": tally.guess(),
                "targets": tally.total,
                "classes": classes,
                **describe(),
            },
        )
        tally.values.clear()


def _is_plain_mean(node: Any, loss: torch.Tensor) -> bool:
    """Return whether the loss is the mean of a node's cross-entropies, all of the same weight."""
    return int(node._saved_reduction) == 1 and node._saved_weight is None and node is loss.grad_fn


def _find_mean(scores: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor) -> float:
    picked = scores.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    return -float(picked[valid].double().mean())


def _is_normalised(node: Any) -> bool:
    """Return whether a log-softmax comes before: only then are the inputs log-probabilities."""
    before = node.next_functions[0][0] if node.next_functions else None
    return before is not None and type(before).__name__ == "LogSoftmaxBackward0"


def _is_sharpened(node: Any, saved: SavedRegions) -> bool:
    """Return whether the scores were multiplied by one number of over 3, as those of a cosine are on purpose."""
    above = feeder(feeder(node))
    if name_of(above) not in ("Mul", "Div") or not saved.may_read(above):
        return False
    kept = [getattr(above, name, None) for name in ("_saved_other", "_saved_self")]
    factors = [abs(float(each)) for each in kept if isinstance(each, torch.Tensor) and each.dim() == 0]
    return any(factor > _SHARP if name_of(above) == "Mul" else 0 < factor < 1 / _SHARP for factor in factors)


def _is_pairing(targets: torch.Tensor, classes: int) -> bool:
    """Return whether every sample is a class of its own: a contrastive loss, whose scores have no usual scale."""
    if targets.dim() != 1 or len(targets) != classes:
        return False
    return bool((targets.sort().values == torch.arange(classes, device=targets.device)).all())
