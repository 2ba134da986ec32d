"""What colour a box has: by the kind of its operation, by the health of its values, or by one statistic."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, Protocol

from clew.errors import UsageError, suggest
from clew.views.number import format_number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clew.model.graph import Graph, Operation
    from clew.views.graph_tree import Box

CATEGORIES: Final = {
    "conv": "convolution",
    "linear": "linear, matmul, embedding",
    "attention": "attention",
    "norm": "normalisation",
    "activation": "activation",
    "pool": "pooling, resizing",
    "arithmetic": "arithmetic",
    "other": "other",
}
"""Kinds of operations with a colour of their own, in the order of the legend."""

_PATTERNS: Final = (
    ("conv", r"conv"),
    ("attention", r"attention|multi_head"),
    ("norm", r"norm"),
    ("pool", r"pool|interpolate|upsample|pixel_(un)?shuffle|grid_sample"),
    (
        "activation",
        r"relu|gelu|silu|^mish|elu|tanh|sigmoid|softmax|softmin|softplus|softsign|^glu|hardt|shrink",
    ),
    ("linear", r"linear|addmm|matmul|^mm$|bmm|einsum|embedding|affine|^(mv|dot|tensordot|gru|lstm|rnn)"),
    ("arithmetic", r"^(r|i)?(add|sub|mul|div|truediv|pow|neg|rsub|square|sqrt|rsqrt|exp|log|abs)(\b|_|\d|$)"),
    ("arithmetic", r"^(addc|mean|sum|prod|cumsum|lerp|reciprocal|sin|cos|floor|ceil|round|clamp)"),
)
_COMPILED: Final = tuple((category, re.compile(pattern)) for category, pattern in _PATTERNS)

LARGE: Final = 1e4
"""A value of this size is near the end of half precision and rarely wanted anywhere else."""

HEALTHS: Final = {
    "bad": "NaN or infinite",
    "warn": f"a value of {LARGE:,.0f} or more",
    "dead": "all zero",
    "good": "fine",
    "unknown": "not measured",
}


@dataclass(frozen=True, slots=True)
class Paint:
    """How one box is filled, outlined and written on, why in words, and what of it stands on the box."""

    fill: str
    stroke: str
    reason: str = ""
    ink: str = "ink"
    note: str = ""


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A colour and what it means."""

    fill: str
    stroke: str
    text: str


class Coloring(Protocol):
    """A rule that colours boxes."""

    title: str

    def paint(self, box: Box) -> Paint:
        """Return the colours of a box; a closed group answers for what is inside."""

    def legend(self) -> tuple[LegendEntry, ...]:
        """Return the colours that occur, with their meaning."""


def choose_coloring(graph: Graph, color: str) -> Coloring:
    """Return the rule of that name: ``op``, ``health``, or a statistic that the tensors carry."""
    if color == "op":
        return _ByOperation(graph)
    if color == "health":
        return _ByHealth(graph)
    known = sorted({name for tensor in graph.tensors for name in (tensor.stats or {})})
    if color in known:
        return _ByStat(graph, color)
    meant = suggest(color, ["op", "health"])
    if not known and not meant:
        raise UsageError(
            f"cannot colour by '{color}': the tensors of this graph carry no statistics",
            where=graph.name,
            next_step="measure them: clew.trace(model, x, summary=True), or colour by 'op'",
        )
    hint = suggest(color, ["op", "health", *known]) or f"one of: {', '.join(['op', 'health', *known])}"
    raise UsageError(f"no statistic '{color}' to colour by", where=graph.name, next_step=hint)


@cache
def categorize(op: str) -> str:
    """Return the kind of an operation by its name, a key of ``CATEGORIES``."""
    name = op.rpartition("::")[2].strip("_").lower()
    return next((category for category, pattern in _COMPILED if pattern.search(name)), "other")


class _ByOperation:
    title = "operation"

    def __init__(self, graph: Graph) -> None:
        self.categories = [categorize(operation.op) for operation in graph.operations]

    def paint(self, box: Box) -> Paint:
        if box.kind != "op":
            return Paint("box", "box-line")
        category = self.categories[box.operation]
        return Paint(category, f"{category}-line", CATEGORIES[category])

    def legend(self) -> tuple[LegendEntry, ...]:
        present = set(self.categories)
        return tuple(
            LegendEntry(name, f"{name}-line", text) for name, text in CATEGORIES.items() if name in present
        )


class _ByHealth:
    title = "health of the values"

    def __init__(self, graph: Graph) -> None:
        self.verdicts = [_judge(_output_stats(graph, operation)) for operation in graph.operations]

    def paint(self, box: Box) -> Paint:
        inside = self.verdicts[box.first : box.last + 1] or ["unknown"]
        worst = next(verdict for verdict in HEALTHS if verdict in inside)
        note = HEALTHS[worst] if worst in ("bad", "warn", "dead") else ""
        return Paint(worst, f"{worst}-line", HEALTHS[worst], note=note)

    def legend(self) -> tuple[LegendEntry, ...]:
        present = set(self.verdicts)
        return tuple(
            LegendEntry(name, f"{name}-line", text) for name, text in HEALTHS.items() if name in present
        )


def _output_stats(graph: Graph, operation: Operation) -> list[dict[str, float]]:
    tensors = [graph.tensors[index] for index in operation.outputs]
    return [stats for tensor in tensors for stats in (tensor.stats, tensor.grad_stats) if stats]


def _judge(measured: list[dict[str, float]]) -> str:
    """Return the verdict on one operation from the statistics of its outputs."""
    if not measured:
        return "unknown"
    if any(stats.get(name, 0) for stats in measured for name in ("nan", "pos_inf", "neg_inf")):
        return "bad"
    if any(_magnitude(stats) >= LARGE for stats in measured):
        return "warn"
    if any(_magnitude(stats) == 0 for stats in measured):
        return "dead"
    return "good"


def _magnitude(stats: dict[str, float]) -> float:
    """Return the largest absolute value, or NaN when nothing tells."""
    known = [abs(stats[name]) for name in ("abs_max", "min", "max") if name in stats]
    finite = [value for value in known if not math.isnan(value)]
    return max(finite, default=math.nan)


_RAMP: Final = ("#f2f0f7", "#cfd3ea", "#9fb8dd", "#62a0cf", "#2f82b8", "#11608f", "#083c63")
"""From little to much, even steps of lightness, readable by the colour-blind."""


_DARK_INK: Final = "#17202b"
_LIGHT_INK: Final = "#ffffff"


class _ByStat:
    def __init__(self, graph: Graph, stat: str) -> None:
        self.title = stat
        self.values = [
            max((stats[stat] for stats in _own_stats(graph, operation) if stat in stats), default=None)
            for operation in graph.operations
        ]
        finite = [value for value in self.values if value is not None and math.isfinite(value)]
        self.low, self.high = min(finite, default=0.0), max(finite, default=0.0)
        self.is_log = self.low > 0 and self.high / self.low > 100

    def paint(self, box: Box) -> Paint:
        inside = [value for value in self.values[box.first : box.last + 1] if value is not None]
        if not inside:
            return Paint("unknown", "unknown-line", "not measured")
        strange = [value for value in inside if not math.isfinite(value)]
        value = strange[0] if strange else max(inside)
        reason = f"{self.title} {format_number(value)}"
        if strange:
            return Paint("bad", "bad-line", reason, note=reason)
        step = self._step(value)
        ink = _DARK_INK if step < 4 else _LIGHT_INK
        return Paint(_RAMP[step], "box-line", reason, ink, note=reason)

    def _step(self, value: float) -> int:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low) if high > low else 0.0
        return min(int(share * len(_RAMP)), len(_RAMP) - 1)

    def legend(self) -> tuple[LegendEntry, ...]:
        entries = [LegendEntry(_RAMP[step], "box-line", self._describe(step)) for step in self._steps()]
        if any(value is not None and not math.isfinite(value) for value in self.values):
            entries.append(LegendEntry("bad", "bad-line", "not finite"))
        if any(value is None for value in self.values):
            entries.append(LegendEntry("unknown", "unknown-line", "not measured"))
        return tuple(entries)

    def _steps(self) -> Iterable[int]:
        return range(len(_RAMP)) if self.high > self.low else range(1)

    def _describe(self, step: int) -> str:
        share = step / len(_RAMP)
        if self.is_log:
            return f"from {format_number(self.low * (self.high / self.low) ** share)}"
        return f"from {format_number(self.low + (self.high - self.low) * share)}"


def _own_stats(graph: Graph, operation: Operation) -> list[dict[str, float]]:
    return [stats for index in operation.outputs if (stats := graph.tensors[index].stats)]
