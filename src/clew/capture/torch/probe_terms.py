"""What one node at the head of a loss tells: a cross-entropy, a squared error, a divergence, an unwanted broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from clew.capture.torch.glance import copy_numbers, count_labels
from clew.capture.torch.probe_graph import (
    VIEWS,
    count,
    feeder,
    find_squashing,
    has_logarithm,
    name_of,
    shape_of,
    size_before_expanding,
    stored_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from clew.capture.torch.saved import SavedRegions

_ROWS: Final = 64
_PLACES: Final = 1024
_MOST_ELEMENTS: Final = 1 << 20
_BROADCASTING: Final = (
    "SubBackward0", "AddBackward0", "MulBackward0", "DivBackward0", "RsubBackward0", "WhereBackward0",
)  # fmt: skip
_SCALINGS: Final = ("MulBackward0", "DivBackward0", "MulBackward1", "DivBackward1")


class Operands(NamedTuple):
    """What is known around a loss: where the models end, what they gave and what they were given.

    ``border``: nodes with a higher number were made after the last model had run; ``sizes``: batch sizes of models that
    give one number for each sample; ``highest``: the highest value of an output by the number of its node; ``tokens``:
    integer inputs; ``shares``: numbers of outputs whose rows are probabilities; ``shapes``: their shapes by number.
    """

    saved: SavedRegions
    border: int
    sizes: frozenset[int]
    highest: dict[int, float]
    tokens: list[torch.Tensor]
    shares: frozenset[int]
    shapes: dict[int, tuple[int, ...]]


def read_term(node: Any, operands: Operands) -> dict[str, Any] | None:
    """Return what a node with a reader says about the loss, or None where that is nothing."""
    try:
        return READERS[type(node).__name__](node, operands)
    except RuntimeError:
        # Freed by an earlier backward, or changed in place: autograd itself will complain where it matters.
        return None


# ---------------------------------------------------------------- classes


def _read_classes(node: Any, operands: Operands) -> dict[str, Any] | None:
    if not operands.saved.may_read(node):
        return None
    scores, targets = node._saved_self.detach(), node._saved_target.detach()
    classes = scores.shape[1] if scores.dim() > 1 else scores.shape[0]
    above = feeder(node)
    deviation = 0.0 if _is_over_classes(node, scores) else _find_deviation(scores)
    term: dict[str, Any] = {
        "form": "nll",
        "is_loss": True,
        "classes": classes,
        "rows": targets.numel(),
        "mean": int(node._saved_reduction) == 1,
        "above": name_of(above),
        "is_log": not _is_no_distribution(above, deviation) and has_logarithm(above),
        "deviation": deviation,
    }
    if 0 < targets.numel() <= _MOST_ELEMENTS and not targets.is_meta:
        ignored = node._saved_ignore_index
        ignored = ignored - (1 << 64) if ignored >= 1 << 63 else ignored
        counts = count_labels([targets])
        del counts[ignored]
        term["ignored"] = ignored
        term["valid"] = sum(counts.values())
        if counts:
            term["lowest"], term["highest"] = min(counts), max(counts)
            term["same_as_input"] = _share_of_inputs(targets, ignored, operands.tokens)
    return term


def _is_no_distribution(above: Any, deviation: float) -> bool:
    """Return whether logarithms are not those of the classes: of sigmoids, or of a softmax over another dimension.

    One over the batch mixes its samples, which says more of what is wrong.
    """
    name = name_of(above)
    if name == "LogSoftmax" and deviation > 1e-2:
        return bool(above._saved_dim != 0)
    return name.startswith("LogSigmoid")


def _is_over_classes(node: Any, scores: torch.Tensor) -> bool:
    """Return whether scores come straight from a log_softmax over the classes: then they are log-probabilities."""
    before = node.next_functions[0][0] if node.next_functions else None
    if before is None or type(before).__name__ != "LogSoftmaxBackward0":
        return False
    dim = before._saved_dim
    return bool((dim - (1 << 64) if dim >= 1 << 63 else dim) % scores.dim() == min(1, scores.dim() - 1))


def _find_deviation(scores: torch.Tensor) -> float:
    """Return how far rows are from log-probabilities, whose exponentials add up to 1: the median of a few rows."""
    if not scores.numel():
        return 0.0
    if scores.dim() == 1:
        rows = scores.unsqueeze(0)
    elif scores.dim() == 2:
        rows = scores[:_ROWS]
    else:  # classes for each place: those of the first sample mostly
        places = scores[0, 0].numel()
        rows = scores[: min(_ROWS, -(-_PLACES // places))].flatten(2)[:, :, :_PLACES]
    with np.errstate(all="ignore"):
        sums = abs(_logsumexp(copy_numbers(rows)).reshape(-1)[:_PLACES])
    sums.sort()
    return float(sums[-1]) if np.isnan(sums[-1]) else float(sums[(len(sums) - 1) // 2])


def _logsumexp(rows: NDArray[Any]) -> NDArray[Any]:
    highest = rows.max(1)
    highest[~np.isfinite(highest)] = 0.0
    found: NDArray[Any] = np.log(np.exp(rows - highest[:, None]).sum(1)) + highest
    return found


def _share_of_inputs(targets: torch.Tensor, ignored: int, tokens: list[torch.Tensor]) -> float | None:
    """Return the share of targets that repeat the token at their own place, where there is one input of that size.

    A model that computes its own loss is given the targets too, and masks and segments: those are no tokens.
    """
    size = targets.numel()
    given = {
        each.data_ptr(): each.detach() for each in tokens if each.numel() == size and int(each.max()) > 1
    }
    others = [each for address, each in given.items() if address != targets.data_ptr()]
    given_once = others or list(given.values())
    if len(given_once) != 1:
        return None
    labels = copy_numbers(targets).reshape(-1)
    same = copy_numbers(given_once[0]).reshape(-1) == labels
    return float(same[labels != ignored].mean())


def _read_log_softmax(node: Any, operands: Operands) -> dict[str, Any] | None:
    above = find_squashing(node)
    given = feeder(node)
    if given is not None and given._sequence_nr() in operands.shares:
        above = "Softmax"  # written out: what counts is that the rows are probabilities
    shape = shape_of(node)
    dim = node._saved_dim
    dim = dim - (1 << 64) if dim >= 1 << 63 else dim
    if above not in ("Softmax", "Sigmoid") and (shape is None or not shape or shape[dim] != 1):
        return None
    return {"form": "log_softmax", "above": above, "classes": shape[dim] if shape else 0}


# ---------------------------------------------------------------- yes or no


def _read_binary(node: Any, operands: Operands) -> dict[str, Any] | None:
    term: dict[str, Any] = {
        "form": "bce_logits" if "Logits" in type(node).__name__ else "bce",
        "is_loss": True,
        "above": find_squashing(node),
    }
    if operands.saved.may_read(node):
        targets = node._saved_target.detach()
        if 0 < targets.numel() <= _MOST_ELEMENTS and not targets.is_meta:
            term["lowest"], term["highest"] = float(targets.min()), float(targets.max())
    return term


def _read_log_sigmoid(node: Any, _operands: Operands) -> dict[str, Any] | None:
    """The loss of several labels is written with it: of the scores, and of the negative ones."""
    above = feeder(node)
    word = find_squashing(above if name_of(above) == "Neg" else node)
    return {"form": "log_sigmoid", "above": word} if word in ("Sigmoid", "Softmax") else None


def _read_margin(node: Any, _operands: Operands) -> dict[str, Any] | None:
    return {"form": "soft_margin", "is_loss": True, "above": find_squashing(node)}


# ---------------------------------------------------------------- sequences


def _read_sequences(node: Any, operands: Operands) -> dict[str, Any] | None:
    """CTC reads beyond its scores where a label has none, and says nothing: look at the labels themselves."""
    term: dict[str, Any] = {"form": "ctc", "is_loss": True}
    if not operands.saved.may_read(node):
        return term
    scores, labels = node._saved_log_probs, node._saved_targets.detach()
    lengths = [int(each) for each in node._saved_target_lengths]
    if not 0 < labels.numel() <= _MOST_ELEMENTS or labels.is_meta:
        return term
    used = (
        [row[:length] for row, length in zip(labels, lengths, strict=True)] if labels.dim() == 2 else [labels]
    )
    counts = count_labels([each for each in used if each.numel()])
    if counts:
        term.update(lowest=min(counts), highest=max(counts), classes=scores.shape[-1])
    return term


# ---------------------------------------------------------------- differences


def _read_difference(node: Any, operands: Operands) -> dict[str, Any] | None:
    term: dict[str, Any] = {"form": name_of(node), "is_loss": True}
    if not operands.saved.may_read(node):
        return term
    given, targets = node._saved_self, node._saved_target
    edges = node.next_functions
    size = size_before_expanding(edges[0]) if edges and edges[0][0] is not None else stored_numbers(given)
    other = (
        size_before_expanding(edges[1])
        if len(edges) > 1 and edges[1][0] is not None
        else stored_numbers(targets)
    )
    if size is not None and other is not None and given.numel() > max(size, other):
        term.update(grown=given.numel(), given=size, targets=other, shape=list(given.shape))
    return term


def _read_broadcast(node: Any, operands: Operands) -> dict[str, Any] | None:
    """A difference written by hand: one number per sample has met another one per sample and made a square."""
    if operands.border < 0 or node._sequence_nr() <= operands.border:
        return None
    divergence = _read_divergence(node, operands)
    if divergence is not None:
        return divergence
    shape = shape_of(node)
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if shape is not None and len(edges) == 2 and _is_pairing(node, edges, shape):
        return {"form": "pairs"}
    if shape is None or len(edges) != 1:
        return None
    size = size_before_expanding(edges[0])
    if size is None:
        return None
    constant = _find_constant(node, operands)
    if constant == count(shape):
        return None  # nothing has grown
    if not _is_outer(size, constant, shape, operands) and not _has_grown(edges[0], size, shape, operands):
        return None
    return {
        "form": "broadcast",
        "op": name_of(node),
        "grown": count(shape),
        "given": size,
        "shape": list(shape),
    }


def _has_grown(edge: tuple[Any, int], size: int, shape: tuple[int, ...], operands: Operands) -> bool:
    """Return whether every output of a model has met the target of every sample: (N, …) has become (N, N, …)."""
    if size in operands.sizes:
        return count(shape) == size * size
    given = _find_output(edge[0], operands)
    if not given or not given[0] > 1:
        return False
    is_map = len(given) > 2 and given[1] == 1 and size == count(given)
    if is_map and shape == (given[0], given[0], *given[2:]):
        return True  # a map for each sample, (N, 1, H, W), meets (N, H, W)
    own = shape_of(*edge)
    if own is None or own[:1] != given[:1]:
        return False
    is_picked = size == given[0] and shape == (size, size)
    # One number for each step of a series: (N, T, 1) meets (N, T), which torch lets pass where N is T.
    is_series = own[:2] == (own[0], own[0]) and size == own[0] ** 2 and shape == (own[0],) * 3
    return is_picked or is_series or (len(own) > 2 and shape == (own[0], *own))


def _find_output(node: Any, operands: Operands) -> tuple[int, ...] | None:
    """Return the shape of the model's output that a node is, reshapes or picks from; None for anything else."""
    for _ in range(6):
        if node is None:
            return None
        if node._sequence_nr() in operands.shapes:
            return operands.shapes[node._sequence_nr()]
        if type(node).__name__ not in VIEWS and name_of(node) not in (
            "Gather",
            "Sigmoid",
            "Softmax",
            "Expand",
        ):
            return None
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _is_outer(size: int, constant: int, shape: tuple[int, ...], operands: Operands) -> bool:
    """Return whether a number for each sample, such as its loss, is multiplied by a weight for every sample."""
    batches = {each[0] for each in operands.shapes.values() if each}
    return size > 1 and size == constant and shape == (size, size) and size in batches


def _is_pairing(node: Any, edges: list[tuple[Any, int]], shape: tuple[int, ...]) -> bool:
    """Return whether every output is compared with every other: such a loss compares them with all data as well."""
    sides = {feeder(node, operand) for operand in (0, 1)}
    sizes = [size_before_expanding(edge) for edge in edges]
    return len(sides) == 1 and None not in sizes and count(shape) > max(size for size in sizes if size)


def _find_constant(node: Any, operands: Operands) -> int:
    """Return how many numbers the constant operand of a product holds, 0 where it is not known."""
    if not type(node).__name__.startswith(("Mul", "Div")) or not operands.saved.may_read(node):
        return 0
    name = "_saved_self" if node.next_functions[0][0] is None else "_saved_other"
    kept = getattr(node, name, None)
    return stored_numbers(kept) if isinstance(kept, torch.Tensor) else 0


# ---------------------------------------------------------------- divergences


def _read_divergence(node: Any, operands: Operands) -> dict[str, Any] | None:
    """Return the input of ``kl_div``: ``xlogy(t, t) - t * input``, or ``exp(t) * (t - input)`` with log targets."""
    outer, inner = ("SubBackward0", "MulBackward0")
    if type(node).__name__ == "MulBackward0":
        outer, inner = inner, outer
    edges = node.next_functions
    if type(node).__name__ != outer or len(edges) != 2 or edges[0][0] is not None or edges[1][0] is None:
        return None
    below = edges[1][0]
    if (
        type(below).__name__ != inner
        or len(below.next_functions) != 2
        or below.next_functions[0][0] is not None
    ):
        return None
    product = node if outer == "MulBackward0" else below
    if below.next_functions[1][0] is None or not operands.saved.may_read(product):
        return None
    targets = product._saved_self
    if not isinstance(targets, torch.Tensor) or not _are_probabilities(targets.detach()):
        return None
    return {"form": "kl", **_tell_input(feeder(below, 1), operands)}


def _are_probabilities(tensor: torch.Tensor) -> bool:
    if not tensor.dim() or tensor.shape[-1] < 2 or not 0 < tensor.numel() <= _MOST_ELEMENTS:
        return False
    if float(tensor.min()) < 0:
        return False
    sums = [tensor.sum(dim) for dim in {tensor.dim() - 1, min(1, tensor.dim() - 1)}]
    return any(float((each - 1).abs().max()) < 1e-2 for each in sums)


def _tell_input(node: Any, operands: Operands) -> dict[str, Any]:
    """Return whether the input of a divergence is positive somewhere, which a log-probability never is."""
    above = node
    for _ in range(2):
        if above is not None and type(above).__name__ in _SCALINGS:
            above = feeder(above) or feeder(above, 1)
    if name_of(above) in ("Softmax", "Sigmoid", "Exp"):
        return {"above": name_of(above), "is_positive": True}
    highest = operands.highest.get(node._sequence_nr(), 0.0) if node is not None else 0.0
    return {"above": name_of(above), "is_positive": highest > 1e-6 and not has_logarithm(node)}


READERS: Final[dict[str, Callable[[Any, Operands], dict[str, Any] | None]]] = {
    "NllLossBackward0": _read_classes,
    "NllLoss2DBackward0": _read_classes,
    "LogSoftmaxBackward0": _read_log_softmax,
    "BinaryCrossEntropyWithLogitsBackward0": _read_binary,
    "BinaryCrossEntropyBackward0": _read_binary,
    "SoftMarginLossBackward0": _read_margin,
    "LogSigmoidBackward0": _read_log_sigmoid,
    "LogSigmoidForwardBackward0": _read_log_sigmoid,
    "CtcLossBackward0": _read_sequences,
    "CtcLossBackward1": _read_sequences,
    "MseLossBackward0": _read_difference,
    "SmoothL1LossBackward0": _read_difference,
    "HuberLossBackward0": _read_difference,
    **dict.fromkeys(_BROADCASTING, _read_broadcast),
}
"""By the kind of a node, what reads it."""
