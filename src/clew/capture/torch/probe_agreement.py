"""Scores of agreement in a loss, such as Dice and the intersection over the union, and which way they are pushed.

Such a score is a quotient: what an output and a mask have in common, over what both have. Agreement is wanted, so that
it belongs into a loss with a minus sign. A mask that is the same in every loss may be a region to stay away from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from clew.capture.torch.glance import glance
from clew.capture.torch.probe_graph import VIEWS, feeder, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.capture.torch.saved import SavedRegions

_LINEAR: Final = frozenset(("Sum", "Mean", "Add", "Sub", "Rsub", "Mul", "Div", "ClampMin", "Clamp", "Neg"))
_ABOVE: Final = frozenset((*_LINEAR, "Stack", "Cat"))
_MOST_NODES: Final = 24
_MOST_ELEMENTS: Final = 1 << 20
_GLANCE: Final = 16


class Agreement(NamedTuple):
    """The quotient that is a score of agreement, and a few numbers of the mask."""

    node: Any
    mask: tuple[float, ...]


def list_agreements(loss: Any, saved: SavedRegions) -> list[Agreement]:
    """Return the scores of agreement that a loss is, up to sums, means and constant factors; none if it is more."""
    queue, seen = [loss], {loss}
    found: list[Agreement] = []
    for node in queue:
        score = _read_score(node, saved)
        if score is not None:
            found.append(score)
            continue
        if (name_of(node) not in _ABOVE and node.name() not in VIEWS) or len(seen) > _MOST_NODES:
            return []  # something else takes part
        fresh = [before for before, _ in node.next_functions if before is not None and before not in seen]
        seen.update(fresh)
        queue += fresh
    return found


def _read_score(node: Any, saved: SavedRegions) -> Agreement | None:
    """Return what a quotient says: the masked sum of an output, over a sum with the output itself in it."""
    edges = node.next_functions
    if name_of(node) != "Div" or len(edges) != 2 or any(before is None for before, _ in edges):
        return None
    common = next((each for each in _walk_linear(edges[0][0]) if _has_constant(each)), None)
    if common is None or not saved.may_read(common):
        return None
    is_first = common.next_functions[0][0] is None
    output = feeder(common, 1 if is_first else 0)
    whole = [each for each in _walk_linear(edges[1][0]) if name_of(each) == "Sum" and feeder(each) is output]
    mask = common._saved_self if is_first else common._saved_other
    return Agreement(node, glance(mask, _GLANCE)) if whole and _is_mask(mask) else None


def _walk_linear(node: Any) -> Iterator[Any]:
    """Yield the nodes that sums, differences and factors lead back to."""
    queue, seen = [node], {node}
    for current in queue:
        yield current
        if (name_of(current) not in _LINEAR and current.name() not in VIEWS) or len(seen) > _MOST_NODES:
            continue
        fresh = [before for before, _ in current.next_functions if before is not None and before not in seen]
        seen.update(fresh)
        queue += fresh


def _has_constant(node: Any) -> bool:
    """Return whether a node multiplies something that is trained by a tensor that is not."""
    edges = node.next_functions
    if name_of(node) != "Mul" or len(edges) != 2 or sum(before is None for before, _ in edges) != 1:
        return False
    other = node._saved_self if edges[0][0] is None else node._saved_other
    return isinstance(other, torch.Tensor) and other.dim() > 0


def _is_mask(tensor: torch.Tensor) -> bool:
    if is_functorch_wrapped_tensor(tensor) or not 1 < tensor.numel() <= _MOST_ELEMENTS:
        return False
    with torch.no_grad():
        values = tensor.detach()
        return bool(((values == 0) | (values == 1)).all()) and bool((values != values.reshape(-1)[0]).any())
