"""Parts of one model that are a whole in the other, compared by slices: weights, and what the modules give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from clew.api.apart import CallTrace, call_model, compare_tensors, copy_tensors, keep_buffers, to_numpy
from clew.capture.torch.randomness import RandomStates
from clew.compare.fused import find_layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from clew.compare.align_fused import Fused
    from clew.compare.diff import TensorDifference
    from clew.compare.fused import Layout


def compare_slices(
    model_a: torch.nn.Module, model_b: torch.nn.Module, batch: Any, fused: Sequence[Fused]
) -> list[TensorDifference]:
    """Return how each part differs from its stretch of the whole: weights first, then the outputs of the modules."""
    weights: list[dict[str, torch.Tensor]] = [dict(model.named_parameters()) for model in (model_a, model_b)]
    layouts: dict[str, Layout] = {}
    rows: list[TensorDifference] = []
    for each in sorted(fused, key=lambda each: each.whole.endswith("bias")):
        some, other = weights if each.whole_is_in == "b" else weights[::-1]
        if each.whole in other:
            rows += _compare(each, [some[name] for name in each.parts], other[each.whole], layouts)
    modules = [each for each in fused if each.whole in layouts]
    if modules and all(row.verdict != "different" for row in rows):
        outputs = [_call(model, batch) for model in (model_a, model_b)]
        for each in modules:
            some, other = outputs if each.whole_is_in == "b" else outputs[::-1]
            if each.whole in other and all(name in some for name in each.parts):
                given = [some[name] for name in each.parts]
                rows += _compare(each, given, other[each.whole], layouts, kind="output")
    return rows


def _call(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Return the first output of each module in a call that leaves no trace."""
    states = RandomStates()
    states.take()
    trace = CallTrace(model)
    try:
        with torch.no_grad(), keep_buffers(model), trace:
            call_model(model, copy_tensors(batch))
    finally:
        states.restore()
    return {call.name: call.outputs[0] for call in reversed(trace.calls) if call.outputs}


def _compare(
    fused: Fused,
    parts: Sequence[torch.Tensor],
    whole: torch.Tensor,
    layouts: dict[str, Layout],
    *,
    kind: str = "param",
) -> Iterator[TensorDifference]:
    numbers, total = [to_numpy(part) for part in parts], to_numpy(whole)
    if kind == "output":
        layout = layouts[fused.whole]
        sizes = [each.shape[-1] for each in numbers]
        pieces = layout.cut_last(total, sizes)
    else:
        place = fused.whole.rpartition(".")[0]
        layout = layouts.setdefault(place, find_layout(numbers, total))
        sizes = [len(each) for each in numbers]
        pieces = layout.cut(total, sizes) if total.ndim > 1 else layout.cut_last(total, sizes)
    for index, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
        names = fused.parts[index], layout.say(fused.whole, index, sizes)
        both = part, torch.from_numpy(piece.copy()).to(whole.dtype)
        if fused.whole_is_in == "a":
            names, both = names[::-1], both[::-1]
        yield compare_tensors(*both, site=names[0], site_b=names[1], kind=kind)
