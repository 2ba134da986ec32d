"""Plain sentences for tensors whose forms do not fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import re

Tensors = dict[str, dict[str, Any]]


def tell_broadcast(found: re.Match[str], tensors: Tensors) -> str:
    """Two tensors that cannot be combined element by element."""
    left, right, dimension = found.groups()
    listed = _list_forms(tensors)
    advice = "give one of them a size of 1 there (unsqueeze), or check the layers that made them"
    return f"dimension {dimension} is {left} in one tensor and {right} in the other{listed}: {advice}"


def tell_batched_product(found: re.Match[str], tensors: Tensors) -> str:
    """Two batches of matrices that cannot be multiplied."""
    wanted, given = ([int(size) for size in text.split(",")] for text in found.groups())
    listed = _list_forms(tensors)
    if wanted[0] != given[0]:
        return f"batches of {wanted[0]} and {given[0]} matrices cannot be multiplied{listed}: both need one number"
    return (
        f"the matrices cannot be multiplied{listed}: the last size of the first, {wanted[1]}, must be the size before "
        f"the last of the second, {given[1]}; transpose one, as in k.transpose(-2, -1)"
    )


def tell_product(found: re.Match[str], tensors: Tensors) -> str:
    """Two matrices that cannot be multiplied, outside any layer."""
    return (
        f"the matrices cannot be multiplied{_list_forms(tensors)}: the last size of the first, {found[2]}, must be the "
        f"first of the second, {found[3]}; transpose one, as in w.T"
    )


def tell_stack(found: re.Match[str], _: Tensors) -> str:
    """Tensors, most often the samples of a batch, that have different sizes."""
    first, second, number = found[1], found[3], found[4]
    return (
        f"tensors of different sizes cannot be stacked: the first has [{first}], number {number} has [{second}]; "
        "samples of a batch need one size: pad or crop them, or give the DataLoader a collate_fn"
    )


def tell_target(found: re.Match[str], _: Tensors) -> str:
    """A loss of scores and targets of different shapes."""
    target, scores = (f"[{text}]" for text in found.groups())
    return (
        f"the scores have the shape {scores} and the targets {target}: make them alike, as in scores.squeeze(1) or "
        "targets.unsqueeze(1)"
    )


def _list_forms(tensors: Tensors) -> str:
    forms = [f"{name} {list(facts['shape'])}" for name, facts in tensors.items()]
    return f" ({', '.join(forms)})" if len(forms) == 2 else ""
