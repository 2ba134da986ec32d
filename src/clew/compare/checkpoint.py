"""What a checkpoint holds, and what changed between two: one row per tensor, totals per group."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from clew.compare import metric
from clew.compare.checkpoint_fused import Slice, compare_fused, find_fused_tensors
from clew.compare.checkpoint_measure import (
    has_equal_bits,
    is_one_pass,
    measure_pair,
    piece_elements,
    run_parallel,
    split,
    split_pair,
    summarise,
)
from clew.compare.checkpoint_name import group_depth, group_of, match_names
from clew.compare.tolerance import judge, loosest
from clew.model.glob import compile_globs
from clew.model.schema import STAT_NAMES
from clew.stats import reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from clew.store.checkpoint import Checkpoint
    from clew.store.checkpoint_tensor import StoredTensor

    Progress = Callable[[int], None]

SORTS: Final = ("name", "size", "abs_max", "l2", "std", "mean", "zero", "nan")
"""What the tensors of a checkpoint can be ordered by, next to the order of the file."""


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor of a checkpoint with its statistics (the words of the record)."""

    name: str
    section: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    stats: dict[str, float]
    same_as: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Totals over the tensors whose names begin alike; tied tensors count once."""

    name: str
    tensors: int
    elements: int
    size_bytes: int
    l2: float
    nan: int
    inf: int
    zero: int


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that both checkpoints hold: how its values differ, and how large that is for its dtype.

    ``verdict`` is ``same`` (only the dtype differs), ``rounding`` or ``different``. ``name_b`` is set when the
    second checkpoint names it otherwise.
    """

    name: str
    section: str
    shape: tuple[int, ...]
    dtype: str
    dtype_b: str
    difference: metric.Difference
    verdict: str
    name_b: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """A pair that was compared: the reference tensor, what changed if anything, and the sums if measured."""

    tensor: StoredTensor
    change: Change | None
    sums: metric.Sums | None
    slice_name: str = ""

    @property
    def name(self) -> str:
        """The name of the reference, or of the slice of it."""
        return self.slice_name or self.tensor.name


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A tensor that both checkpoints hold in different shapes."""

    name: str
    shape: tuple[int, ...]
    shape_b: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupChange:
    """What changed in a group: tensors changed of all, error relative to the reference, largest error."""

    name: str
    tensors: int
    changed: int
    relative_l2: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """Everything that differs between two checkpoints, and what does not; in the order of the first."""

    changed: tuple[Change, ...]
    unchanged: tuple[str, ...]
    reshaped: tuple[Reshaped, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    groups: tuple[GroupChange, ...]
    values: dict[str, tuple[Any, Any]]
    notes: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether both hold the same tensors, bit for bit but for the sign of zero and the bits of a NaN."""
        return not (self.changed or self.reshaped or self.only_a or self.only_b)


def select(checkpoint: Checkpoint, patterns: Sequence[str]) -> list[StoredTensor]:
    """Return the tensors whose names fit the patterns, all for none."""
    fits = compile_globs(patterns)
    return [tensor for tensor in checkpoint.tensors if fits(tensor.name)]


def summarise_checkpoint(
    checkpoint: Checkpoint, patterns: Sequence[str] = (), *, progress: Progress | None = None
) -> list[TensorSummary]:
    """Return one summary per tensor in the order of the file; ``progress`` is told the bytes as they are done."""
    tensors = select(checkpoint, patterns)
    tied = checkpoint.tied
    pieces = [
        (index, piece)
        for index, tensor in enumerate(tensors)
        if tied.get(tensor.name) is None
        for piece in split(tensor, piece_elements(tensor))
    ]
    parts = defaultdict(list)
    for (index, piece), row in zip(
        pieces, run_parallel(lambda item: summarise(item[1]), pieces), strict=True
    ):
        parts[tensors[index].name].append(row)
        if progress:
            progress(piece.size_bytes)
    stats = {
        name: dict(zip(STAT_NAMES, reference.merge(rows).tolist(), strict=True))
        for name, rows in parts.items()
    }
    known = {tensor.name for tensor in tensors}
    return [_summary(tensor, stats, tied.get(tensor.name, ""), known) for tensor in tensors]


def _summary(
    tensor: StoredTensor, stats: dict[str, dict[str, float]], same_as: str, known: set[str]
) -> TensorSummary:
    row = stats.get(tensor.name)
    if row is None and same_as in known:
        row = stats[same_as]
    if row is None:
        row = dict(zip(STAT_NAMES, summarise(tensor).tolist(), strict=True))
    return TensorSummary(
        tensor.name, tensor.section, tensor.shape, tensor.dtype, tensor.size_bytes, row, same_as
    )


def sort_summaries(summaries: Iterable[TensorSummary], order: str) -> list[TensorSummary]:
    """Return summaries by one of ``SORTS``: names upwards, everything else largest first, NaN last."""
    if order == "name":
        return sorted(summaries, key=lambda each: each.name)
    if order == "size":
        return sorted(summaries, key=lambda each: -each.size_bytes)
    return sorted(summaries, key=lambda each: _descending(each.stats[order]))


def _descending(value: float) -> float:
    return math.inf if math.isnan(value) else -value


def total_groups(summaries: Sequence[TensorSummary], depth: int | None = None) -> list[Group]:
    """Return totals of the groups by the first ``depth`` parts of the names; None chooses a depth that tells."""
    depth = _choose_depth(summaries) if depth is None else depth
    members: dict[str, list[TensorSummary]] = defaultdict(list)
    for each in summaries:
        members[group_of(each.name, depth, section=each.section)].append(each)
    return [_total(name, group) for name, group in members.items()]


def _choose_depth(tensors: Sequence[TensorSummary] | Sequence[StoredTensor]) -> int:
    return group_depth([each.name for each in tensors if each.section != "optimizer"])


def _total(name: str, members: Sequence[TensorSummary]) -> Group:
    own = [each for each in members if not each.same_as]
    squares = [each.stats["l2"] ** 2 for each in own if not math.isnan(each.stats["l2"])]
    return Group(
        name=name,
        tensors=len(members),
        elements=sum(math.prod(each.shape) for each in own),
        size_bytes=sum(each.size_bytes for each in own),
        l2=math.sqrt(math.fsum(squares)),
        nan=sum(int(each.stats["nan"]) for each in own),
        inf=sum(int(each.stats["pos_inf"] + each.stats["neg_inf"]) for each in own),
        zero=sum(int(each.stats["zero"]) for each in own),
    )


def diff_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    patterns: Sequence[str] = (),
    *,
    depth: int | None = None,
    progress: Progress | None = None,
) -> CheckpointDiff:
    """Return what differs between two checkpoints; the first is the reference of every error."""
    left = {tensor.name: tensor for tensor in select(a, patterns)}
    right = {tensor.name: tensor for tensor in select(b, patterns)}
    names, notes = match_names(list(left), list(right))
    pairs = [(left[x], right[y]) for x, y in names.items()]
    same_shape = [pair for pair in pairs if pair[0].shape == pair[1].shape]
    reshaped = [Reshaped(x.name, x.shape, y.shape) for x, y in pairs if x.shape != y.shape]
    compared = _compare_all(same_shape, progress)
    matched = set(names.values())
    only_a = [name for name in left if name not in names]
    only_b = [name for name in right if name not in matched]
    fused = find_fused_tensors([left[name] for name in only_a], [right[name] for name in only_b])
    slices, told = compare_fused(left, right, fused)
    compared += [_judge_slice(each) for each in slices]
    joined = {name for each in fused for name in (*each.parts, each.whole)}
    return CheckpointDiff(
        changed=tuple(each.change for each in compared if each.change),
        unchanged=tuple(each.name for each in compared if not each.change),
        reshaped=tuple(reshaped),
        only_a=tuple(name for name in only_a if name not in joined),
        only_b=tuple(name for name in only_b if name not in joined),
        groups=tuple(_total_changes(compared, depth)),
        values=_differing_values(a.values, b.values),
        notes=(*notes, *told, *a.notes, *(note for note in b.notes if note not in a.notes)),
    )


def _compare_all(
    pairs: Sequence[tuple[StoredTensor, StoredTensor]], progress: Progress | None
) -> list[Compared]:
    """Return what changed in each pair; large tensors are shared among threads."""
    pieces = [(index, x, y) for index, pair in enumerate(pairs) for x, y in split_pair(*pair)]
    parts: dict[int, list[metric.Sums | None]] = defaultdict(list)
    for (index, x, y), sums in zip(pieces, run_parallel(_compare_piece, pieces), strict=True):
        parts[index].append(sums)
        if progress:
            progress(x.size_bytes + y.size_bytes)
    # Pieces with equal bits were not measured; beside one that differs they count in its relative error.
    return [_judge(x, y, _complete(x, y, parts[index])) for index, (x, y) in enumerate(pairs)]


def _compare_piece(piece: tuple[int, StoredTensor, StoredTensor]) -> metric.Sums | None:
    """Return the sums over a piece; None when its bits are equal and no loop had to look at the numbers."""
    _, x, y = piece
    if not is_one_pass(x, y) and x.element is y.element and has_equal_bits(x, y):
        return None
    return measure_pair(x, y)


def _complete(
    x: StoredTensor, y: StoredTensor, parts: Sequence[metric.Sums | None]
) -> list[metric.Sums] | None:
    if all(part is None for part in parts):
        return None
    pieces = zip(split_pair(x, y), parts, strict=True)
    return [measure_pair(*piece) if part is None else part for piece, part in pieces]


def _judge(x: StoredTensor, y: StoredTensor, parts: list[metric.Sums] | None) -> Compared:
    if parts is None:
        return Compared(x, None, None)
    sums = metric.merge(parts)
    difference = metric.describe(sums)
    if difference.is_same and x.element is y.element:
        return Compared(x, None, sums)
    change = Change(
        name=x.name,
        section=x.section,
        shape=x.shape,
        dtype=x.dtype,
        dtype_b=y.dtype,
        difference=difference,
        verdict=judge(difference, loosest(x.dtype, y.dtype)),
        name_b=y.name if y.name != x.name else "",
    )
    return Compared(x, change, sums)


def _judge_slice(each: Slice) -> Compared:
    found = _judge(each.a, each.b, [each.sums])
    change = found.change and replace(
        found.change,
        name=each.name_a,
        name_b=each.name_b if each.name_b != each.name_a else "",
        shape=each.shape,
    )
    return Compared(each.a, change, each.sums, each.name_a)


def _total_changes(compared: Sequence[Compared], depth: int | None) -> list[GroupChange]:
    depth = _choose_depth([each.tensor for each in compared]) if depth is None else depth
    members: dict[str, list[Compared]] = defaultdict(list)
    for each in compared:
        members[group_of(each.tensor.name, depth, section=each.tensor.section)].append(each)
    return [_total_change(name, group) for name, group in members.items()]


def _total_change(name: str, members: Sequence[Compared]) -> GroupChange:
    """Return the totals of a group; its relative error is over the tensors that changed."""
    changes = [each.change for each in members if each.change]
    total = metric.describe(
        metric.merge(each.sums for each in members if each.change and each.sums is not None)
    )
    return GroupChange(name, len(members), len(changes), total.relative_l2, total.max_abs)


def _differing_values(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values that both hold and that differ; NaN equals NaN."""
    return {
        name: (value, b[name])
        for name, value in a.items()
        if name in b and b[name] != value and not (value != value and b[name] != b[name])  # noqa: PLR0124
    }
