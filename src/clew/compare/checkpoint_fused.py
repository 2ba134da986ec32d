"""Tensors that are one in one checkpoint and several in the other: found by name and shape, compared by slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clew.compare import metric
from clew.compare.align_fused import Fused, find_fused
from clew.compare.fused import Layout, find_layout
from clew.compare.tolerance import loosest, tolerance_of
from clew.model.record import Site
from clew.store.checkpoint_dtype import widen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from clew.store.checkpoint_tensor import StoredTensor

    Tensors = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class Slice:
    """A part and the stretch of a whole that stands for it: names on both sides, the tensors, the sums over them."""

    a: StoredTensor
    b: StoredTensor
    name_a: str
    name_b: str
    shape: tuple[int, ...]
    sums: metric.Sums


def find_fused_tensors(a: Sequence[StoredTensor], b: Sequence[StoredTensor]) -> list[Fused]:
    """Return which tensors without a partner are together one on the other side."""
    left, right = _make_sites(a), _make_sites(b)
    return [
        *find_fused(left, right, whole_is_in="b"),
        *find_fused(right, left, whole_is_in="a"),
    ]


def _make_sites(tensors: Sequence[StoredTensor]) -> list[Site]:
    chosen = [tensor for tensor in tensors if tensor.section == "model" and tensor.element.is_float]
    return [
        Site(number, tensor.name, "parameter", tensor.dtype, shape=tensor.shape)
        for number, tensor in enumerate(chosen)
    ]


def compare_fused(a: Tensors, b: Tensors, found: Sequence[Fused]) -> tuple[list[Slice], list[str]]:
    """Return the slices of all wholes with what they differ by, and notes on how the parts lie in them."""
    layouts: dict[str, Layout] = {}
    slices: list[Slice] = []
    # A matrix tells how its bias lies too.
    for fused in sorted(found, key=lambda each: -len(_sides(each, a, b)[1][each.whole].shape)):
        slices += _compare_one(fused, a, b, layouts)
    return slices, _tell_layouts(found, layouts)


def _sides(fused: Fused, a: Tensors, b: Tensors) -> tuple[Tensors, Tensors]:
    """Return the side of the parts and that of the whole."""
    return (a, b) if fused.whole_is_in == "b" else (b, a)


def _compare_one(fused: Fused, a: Tensors, b: Tensors, layouts: dict[str, Layout]) -> Iterator[Slice]:
    some, other = _sides(fused, a, b)
    parts, whole = [some[name] for name in fused.parts], other[fused.whole]
    numbers, total = [_numbers(part) for part in parts], _numbers(whole)
    place = fused.whole.rpartition(".")[0]
    layout = layouts.get(place)
    if layout is None or total.ndim > 1:
        layout = layouts[place] = find_layout(numbers, total)
    elif layout.is_turned:
        layout = Layout(layout.order, layout.heads, is_known=layout.is_known)
    sizes = [len(each) for each in numbers]
    pieces = layout.cut(total, sizes)
    for index, part in enumerate(parts):
        names = (part.name, layout.say(fused.whole, index, sizes))
        both = (part, whole), names, (numbers[index], pieces[index])
        if fused.whole_is_in == "a":
            both = tuple(each[::-1] for each in both)  # type: ignore[assignment]
        (x, y), (name_a, name_b), (first, second) = both
        yield Slice(x, y, name_a, name_b, part.shape, _measure(first, second, loosest(x.dtype, y.dtype)))


def _numbers(tensor: StoredTensor) -> NDArray[Any]:
    return np.asarray(widen(tensor.load(), tensor.element))


def _measure(a: NDArray[Any], b: NDArray[Any], dtype: str) -> metric.Sums:
    x, y = metric.real_numbers(np.ascontiguousarray(a)), metric.real_numbers(np.ascontiguousarray(b))
    return metric.measure_numbers(x, y, floor=tolerance_of(dtype).small * (metric.abs_max(x) or 1.0))


def _tell_layouts(found: Sequence[Fused], layouts: Mapping[str, Layout]) -> list[str]:
    notes = []
    for is_known in (True, False):
        chosen = [fused for fused in found if layouts[fused.whole.rpartition(".")[0]].is_known == is_known]
        if not chosen:
            continue
        more = f", and {len(chosen) - 1} more such" if len(chosen) > 1 else ""
        how = (
            ""
            if is_known
            else "; the contents do not tell how the parts lie in it, so the usual order is taken"
        )
        notes.append(f"{chosen[0].label} is {chosen[0].whole} in {chosen[0].whole_is_in}{more}{how}")
    return notes
