"""Losses written by hand: a likelihood or an error that is added up, and whether training makes it better or worse.

A loss of torch's own has one node that says what it is. One written out, such as ``-log_probs[range(n), y].mean()``, is
a likelihood that only linear operations lead to: picking, adding up, averaging, weighting by targets. Then the sign of
the gradient that arrives there tells which way it is pushed. Where anything else takes part, or the weights may be
rewards or costs, which have a sign of their own, nothing can be told, and nothing is.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from clew.capture.torch.probe_graph import VIEWS, feeder, name_of, shape_of
from clew.stats.readable import undisturbed
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from clew.capture.torch.saved import SavedRegions

_MOST_NODES: Final = 64
_MOST_PICKED: Final = 8
_MOST_ELEMENTS: Final = 1 << 20
_SUMS: Final = frozenset(
    ("Sum", "Mean", "Neg", "Add", "Sub", "Rsub", "Gather", "Index", "Stack", "Cat", "Take", "Nansum", "Diagonal",
     "Expand", "Unbind", "Split")
)  # fmt: skip
_PRODUCTS: Final = frozenset(("Mul", "Div"))
_LOGARITHMS: Final = frozenset(("Log", "Log1P", "Log2", "Log10"))
_SHIFTS: Final = frozenset(
    ("Add", "Sub", "Rsub", "Clamp", "ClampMin", "ClampMax", "Neg", "Gather", "Maximum", "Minimum")
)
_PROBABILITIES: Final = frozenset(("Softmax", "Sigmoid"))
_CURVES: Final = frozenset(("Pow", "Exp"))
_ARITHMETIC: Final = (
    _CURVES
    | _LOGARITHMS
    | _PRODUCTS
    | _SHIFTS
    | frozenset(("Sum", "Mean", "Split", "Unbind", "Expand", "Softplus"))
)


class _Weight(NamedTuple):
    """What stands before a part: one number, and what kind of weights."""

    scale: float = 1.0
    targets: str = ""


_NO_WEIGHT: Final = _Weight()


class Part(NamedTuple):
    """A node at which a hand-written loss ends, and what it is: the logarithm of a likelihood, or an error.

    ``scale`` is the number it is multiplied with; ``targets`` says what it is weighted by: nothing, classes whose
    shares add up to 1, or shares from 0 to 1.
    """

    node: Any
    form: str
    is_error: bool
    scale: float = 1.0
    targets: str = ""


def list_parts(loss: Any, *, saved: SavedRegions, border: frozenset[int]) -> list[Part]:
    """Return what a hand-written loss is made of, or nothing where something else takes part in it.

    ``border`` are the numbers of the nodes of the models' outputs: scores may enter as they are beside their logsumexp,
    the logarithm of a spread beside the error that is divided by it, and the divergence of outputs from a distribution
    that is not trained.
    """
    parts: list[Part] = []
    others: set[str] = set()
    queue, seen = [(loss, _NO_WEIGHT)], {loss}
    for node, weight in queue:
        part = _read_part(node)
        if part is not None:
            parts.append(part._replace(scale=weight.scale, targets=weight.targets))
            continue
        if node._sequence_nr() in border or name_of(node) in _LOGARITHMS:
            others.add("scores" if node._sequence_nr() in border else "logarithm")
            continue
        if name_of(node) in _CURVES and _is_of_outputs(node, border):
            others.add("divergence")
            continue
        error = _find_scaled_error(node, saved)
        inner = weight if error is not None else _weigh(node, weight, saved)
        if inner is None or len(seen) > _MOST_NODES:
            return []
        entering = [error] if error is not None else [before for before, _ in node.next_functions]
        others |= {"spread"} if error is not None else set()
        fresh = [before for before in entering if before is not None and before not in seen]
        seen.update(fresh)
        queue += [(before, inner) for before in dict.fromkeys(fresh)]
    return parts if _is_whole(parts, others) else []


def find_picked(
    loss: Any, *, saved: SavedRegions, shapes: dict[int, tuple[int, ...]]
) -> tuple[Any, int] | None:
    """Return the node that picks one score for each sample, where a loss is their mean, and the number of the scores.

    Right with logarithms of probabilities, as in ``-log_probs[range(n), y].mean()``; scores have no largest value.
    """
    node, weight = loss, _NO_WEIGHT
    for _ in range(_MOST_PICKED):
        edges = [before for before, _ in node.next_functions if before is not None]
        above = feeder(node)
        number = above._sequence_nr() if above is not None else -1
        shape = shapes.get(number, ())
        if len(shape) == 2 and shape[1] > 1 and _picks(node, shape, saved):
            return node, number
        inner = _weigh(node, weight, saved)
        if len(edges) != 1 or inner is None or inner.targets:
            return None
        node, weight = edges[0], inner
    return None


def _picks(node: Any, shape: tuple[int, ...], saved: SavedRegions) -> bool:
    """Return whether a node takes one number of each row, by its place or as the one that is multiplied by 1."""
    name = name_of(node)
    if name in ("Gather", "Index"):
        picked = shape_of(node)
        return picked in ((shape[0],), (shape[0], 1))
    if name != "Mul" or not saved.may_read(node):
        return False
    weights = node._saved_self if node.next_functions[0][0] is None else node._saved_other
    if (
        not isinstance(weights, torch.Tensor)
        or tuple(weights.shape) != shape
        or weights.numel() > _MOST_ELEMENTS
    ):
        return False
    with torch.no_grad():
        return bool((weights.detach().max(1).values == 1).all()) and bool(
            (weights.detach().sum(1) == 1).all()
        )


def _is_whole(parts: list[Part], others: set[str]) -> bool:
    """Return whether the parts make up a loss, and their weights are targets."""
    has_sum = any(part.form == "logsumexp" for part in parts)
    # A divergence holds the logarithm of a spread, or the outputs that are one.
    is_explained = bool(others & {"spread", "divergence"}) or (has_sum and others == {"scores"})
    if others and not is_explained:
        return False
    if has_sum and "scores" not in others:
        return False  # an energy
    if any(part.targets == "other" or (part.targets and part.is_error) for part in parts):
        return False
    return len(parts) > 1 or not any(part.targets == "shares" for part in parts)


def _is_of_outputs(node: Any, border: frozenset[int]) -> bool:
    """Return whether a curve is one of models' outputs alone, as in a divergence from a known distribution."""
    queue, seen = [node], {node}
    has_outputs = False
    for current in queue:
        if current._sequence_nr() in border:
            has_outputs = True
            continue
        is_plain = name_of(current) in _ARITHMETIC or type(current).__name__ in VIEWS
        if not is_plain or len(seen) > _MOST_NODES:
            return False
        fresh = [before for before, _ in current.next_functions if before is not None and before not in seen]
        seen.update(fresh)
        queue += dict.fromkeys(fresh)
    return has_outputs


def _find_scaled_error(node: Any, saved: SavedRegions) -> Any:
    """Return the error that a node divides by a spread that is trained as well, or multiplies by its inverse."""
    edges = node.next_functions
    if name_of(node) not in _PRODUCTS or len(edges) != 2 or any(before is None for before, _ in edges):
        return None
    for operand, other in ((0, "other"), (1, "self")) if name_of(node) == "Mul" else ((0, "other"),):
        above = edges[operand][0]
        for _ in range(3):
            if name_of(above) not in ("Neg", *_PRODUCTS) or _read_part(above) is not None:
                break
            above = above.next_functions[0][0] or above.next_functions[-1][0]
        part = _read_part(above) if above is not None else None
        if part is None or part.form != "error" or not saved.may_read(node):
            continue
        spread = getattr(node, f"_saved_{other}", None)
        if isinstance(spread, torch.Tensor) and _is_never_negative(spread):
            return edges[operand][0]
    return None


def _is_never_negative(tensor: torch.Tensor) -> bool:
    if is_functorch_wrapped_tensor(tensor) or not 0 < tensor.numel() <= _MOST_ELEMENTS or tensor.is_complex():
        return False
    with torch.no_grad():
        return bool(tensor.detach().min() >= 0)


def _read_part(node: Any) -> Part | None:
    name = name_of(node)
    if name == "LogSoftmax" or name.startswith("LogSigmoid"):
        return Part(node, name.lower(), is_error=False)
    if name == "Logsumexp":
        return Part(node, "logsumexp", is_error=True)
    if name in _LOGARITHMS and _is_probability(node):
        return Part(node, "log of a probability", is_error=False)
    if name == "Abs" or (name == "Pow" and _is_even(node)):
        return Part(node, "error", is_error=True) if _is_difference(feeder(node)) else None
    if name == "Mul" and _is_square(node):
        return Part(node, "error", is_error=True) if _is_difference(feeder(node)) else None
    return None


def _is_probability(node: Any) -> bool:
    """Return whether the logarithm is that of a softmax or sigmoid, with an epsilon or taken from 1."""
    above = feeder(node)
    for _ in range(4):
        if name_of(above) not in _SHIFTS:
            break
        above = feeder(above) or feeder(above, 1)
    return name_of(above) in _PROBABILITIES


def _is_even(node: Any) -> bool:
    exponent = getattr(node, "_saved_exponent", None)
    return isinstance(exponent, (int, float)) and exponent % 2 == 0 and exponent > 0


def _is_square(node: Any) -> bool:
    edges = node.next_functions
    return len(edges) == 2 and edges[0][0] is not None and edges[0] == edges[1]


def _is_difference(node: Any) -> bool:
    """Return whether something that is trained is compared with something that is not."""
    if name_of(node) not in ("Sub", "Rsub"):
        return False
    edges = node.next_functions
    return len(edges) == 2 and sum(before is None for before, _ in edges) == 1


def _weigh(node: Any, weight: _Weight, saved: SavedRegions) -> _Weight | None:
    """Return the weight of what enters a node that only picks, adds up and weighs; None for any other node."""
    if type(node).__name__ in VIEWS or name_of(node) in _SUMS:
        return weight
    edges = node.next_functions
    if name_of(node) not in _PRODUCTS or sum(before is not None for before, _ in edges) != 1:
        return None
    is_second = edges[0][0] is None
    if not saved.may_read(node) or (is_second and name_of(node) == "Div"):
        return None
    factor = getattr(node, "_saved_self" if is_second else "_saved_other", None)
    if not isinstance(factor, torch.Tensor):
        return weight
    if is_functorch_wrapped_tensor(factor) or factor.is_complex() or not 0 < factor.numel() <= _MOST_ELEMENTS:
        return None
    with torch.no_grad():
        return _multiply(weight, factor.detach(), is_product=name_of(node) == "Mul")


def _multiply(weight: _Weight, factor: torch.Tensor, *, is_product: bool) -> _Weight | None:
    if factor.numel() == 1:
        return weight._replace(scale=weight.scale * float(factor)) if is_product else weight
    lowest, highest = float(factor.min()), float(factor.max())
    if lowest < 0:
        return None
    if not is_product:
        return weight
    if weight.targets:
        return weight._replace(targets="other")
    if factor.shape[-1] > 1 and bool(((factor.sum(-1) - 1).abs() < 1e-3).all()):
        return weight._replace(targets="classes")
    return weight._replace(targets="shares" if highest <= 1 else "other")


class DirectionHook:
    """Keeps the sign that a part is given, counted as that of a loss: 1 where training makes it better."""

    __slots__ = ("is_error", "term")

    def __init__(self, term: dict[str, Any], *, is_error: bool) -> None:
        self.term = term
        self.is_error = is_error

    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Look at the gradient that arrives; mixed signs count as better."""
        gradient = gradients[0] if gradients else None
        if gradient is None or is_functorch_wrapped_tensor(gradient):
            return
        number = KERNEL.read_number(gradient) if KERNEL is not None else None
        if number is not None:
            self._keep(number, number)
            return
        # What else a gradient may be is no reason to end the user's backward pass.
        with undisturbed(), contextlib.suppress(RuntimeError, TypeError, ValueError, AttributeError):
            if gradient.layout is not torch.strided or gradient.is_complex() or not gradient.numel():
                return
            self._keep(float(gradient.min()), float(gradient.max()))

    def _keep(self, low: float, high: float) -> None:
        if not self.is_error:
            low, high = -high, -low
        self.term["sign"] = 1 if high > 0 else (-1 if low < 0 else 0)
