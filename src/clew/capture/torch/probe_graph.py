"""Reading the head of a loss's graph: which operation feeds which, through everything that only reshapes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MOST_NODES: Final = 120
_BEYOND: Final = 5
"""How far the walk goes into the models whose outputs the loss is made of."""

VIEWS: Final = frozenset(
    f"{name}Backward{number}"
    for name in (
        "View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "T", "Squeeze", "Unsqueeze", "Slice", "Select",
        "Clone", "ToCopy", "Alias", "AsStrided", "Index", "MaskedSelect", "Contiguous", "MT", "Flatten", "IndexSelect",
    )
    for number in range(4)
)  # fmt: skip
"""Operations that hand the same numbers on, all or some of them, in another shape."""

LOGARITHMS: Final = frozenset(
    f"{name}Backward0"
    for name in (
        "LogSoftmax",
        "Log",
        "Log1P",
        "Log2",
        "Logsumexp",
        "LogSigmoid",
        "Logaddexp",
        "LogSigmoidForward",
    )
)
"""Operations whose results are log-probabilities as far as a name can tell."""


def walk_head(node: Any, border: frozenset[int]) -> Iterator[Any]:
    """Yield the nodes of a loss from its end, nearest first; ``border`` are the numbers of the models' outputs."""
    seen, queue = {node}, [(node, 0)]
    for current, beyond in queue:
        yield current
        inside = beyond + 1 if beyond or current._sequence_nr() in border else 0
        if inside > _BEYOND:
            continue
        for before, _ in current.next_functions:
            if before is not None and before not in seen and len(seen) < MOST_NODES:
                seen.add(before)
                queue.append((before, inside))


def feeder(node: Any, operand: int = 0) -> Any:
    """Return the node whose numbers enter at an operand, seen through reshaping, or None."""
    edges = node.next_functions
    before = edges[operand][0] if operand < len(edges) else None
    for _ in range(12):
        if before is None or type(before).__name__ not in VIEWS:
            return before
        before = before.next_functions[0][0] if before.next_functions else None
    return before


def find_squashing(node: Any) -> str:
    """Return what a node's input comes from, seen through reshaping and clamps: ``Softmax``, ``Sigmoid`` …"""
    above = feeder(node)
    for _ in range(3):
        if name_of(above) not in ("Clamp", "ClampMin", "ClampMax"):
            break
        above = feeder(above)
    return name_of(above)


def name_of(node: Any) -> str:
    """Return ``Softmax`` for a SoftmaxBackward0, and nothing for no node."""
    return "" if node is None else type(node).__name__.partition("Backward")[0]


def has_logarithm(node: Any, *, most: int = 24, deepest: int = 6) -> bool:
    """Return whether a node or something close above it takes a logarithm."""
    queue, seen = [(node, 0)], {node}
    for current, depth in queue:
        if current is None:
            continue
        if type(current).__name__ in LOGARITHMS:
            return True
        if depth >= deepest:
            continue
        for before, _ in current.next_functions:
            if before is not None and before not in seen and len(seen) < most:
                seen.add(before)
                queue.append((before, depth + 1))
    return False


def shape_of(node: Any, number: int = 0) -> tuple[int, ...] | None:
    """Return the shape of a node's result, or None where autograd does not know it."""
    metadata = node._input_metadata
    if metadata is None or number >= len(metadata) or metadata[number].is_nested_tensor:
        return None
    return tuple(metadata[number].shape)


def size_before_expanding(edge: tuple[Any, int]) -> int | None:
    """Return how many numbers enter through an edge before they were expanded to a larger shape."""
    node, number = edge
    for _ in range(4):
        if node is None or not type(node).__name__.startswith("ExpandBackward"):
            break
        node, number = node.next_functions[0]
    shape = shape_of(node, number) if node is not None else None
    return None if shape is None else count(shape)


def count(shape: Iterable[int]) -> int:
    """Return how many numbers a shape has room for."""
    return math.prod(shape)


def stored_numbers(tensor: Any) -> int:
    """Return how many different numbers an expanded tensor holds."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return count(size for size, stride in strides if stride or size <= 1)
