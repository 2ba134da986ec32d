"""Finds dropout that is written out: a random mask that takes some numbers out and makes the others larger for it.

Runs in a copy of the process only: it sees every operation of a forward, which switches fused paths off.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clew.capture.torch.probe_events import find_line

_UNIFORM: Final = frozenset(("rand", "rand_like", "uniform", "uniform_"))
_DRAWN: Final = frozenset(("bernoulli", "bernoulli_"))
_COMPARED: Final = frozenset(("gt", "lt", "ge", "le", "floor", "floor_"))
_SHIFTED: Final = frozenset(("add", "add_", "sub", "rsub"))
_TURNED: Final = frozenset(("logical_not", "bitwise_not", "rsub", "sub"))
_SAME: Final = frozenset((
    "_to_copy", "clone", "detach", "alias", "unsqueeze", "view", "expand", "reshape", "_unsafe_view", "_reshape_copy",
    "squeeze", "copy_",
))  # fmt: skip
_PRODUCTS: Final = frozenset(("mul", "mul_"))
_FACTORS: Final = frozenset(("mul", "mul_", "div", "div_"))
_LARGER: Final = 1.001


class MaskWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows uniform random numbers to the masks that are made of them, and masks to what is multiplied by them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, Any] | None = None
        self._alive: list[torch.Tensor] = []
        self._random: set[int] = set()
        self._masks: set[int] = set()
        self._masked: dict[int, torch.Tensor] = {}
        self._scaled: dict[int, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and take in what it does with random numbers."""
        out = func(*args, **(kwargs or {}))
        if self.found is None and type(out) is torch.Tensor:
            self._follow(func.overloadpacket.__name__, args, out)
        return out

    def _follow(self, name: str, args: Any, out: torch.Tensor) -> None:
        first = args[0] if args else None
        other = args[1] if len(args) > 1 else None
        if name in _UNIFORM:
            self._keep(out, self._random)
        elif name in _DRAWN and _is_one_number(first if other is None else other):
            self._keep(out, self._masks)
        elif id(first) in self._random:
            if name in _COMPARED and not isinstance(other, torch.Tensor):
                self._keep(out, self._masks)
            elif name in _SAME or (name in _SHIFTED and not isinstance(other, torch.Tensor)):
                self._keep(out, self._random)
        elif id(first) in self._masks or id(other) in self._masks:
            self._follow_mask(name, first, other, out)
        elif name in _FACTORS and (factor := _find_factor(name, other)):
            if id(first) in self._masked:
                self._judge(self._masked[id(first)], factor)
            elif factor > _LARGER:
                self._alive.append(out)
                self._scaled[id(out)] = factor

    def _follow_mask(self, name: str, first: Any, other: Any, out: torch.Tensor) -> None:
        is_plain = not isinstance(other, torch.Tensor) or other.dim() == 0
        if id(first) in self._masks and (name in _SAME or (name in _FACTORS | _TURNED and is_plain)):
            self._keep(out, self._masks)
        elif name in _PRODUCTS and isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
            mask, given = (first, other) if id(first) in self._masks else (other, first)
            if given.is_floating_point():
                self._alive.append(out)
                self._masked[id(out)] = mask
                self._judge(mask, self._scaled.get(id(given), 1.0))

    def _judge(self, mask: torch.Tensor, factor: float) -> None:
        """Numbers that are left are made larger, by as much as others are taken out: that is dropout."""
        kept = mask != 0
        share = float(kept.float().mean())
        if not 0 < share < 1:
            return
        values = mask[kept].double() * factor
        larger = float(values.mean())
        if larger > _LARGER and float(values.max() - values.min()) < 1e-3 * larger:
            noise = 4 * (share * (1 - share) / mask.numel()) ** 0.5
            if abs(share - 1 / larger) < noise + 0.01:
                self.found = {"p": round(1 - 1 / larger, 3), "source": find_line()}

    def _keep(self, tensor: torch.Tensor, where: set[int]) -> None:
        self._alive.append(tensor)  # as long as it is there nothing else has its number
        where.add(id(tensor))


def _find_factor(name: str, other: Any) -> float:
    """Return what a product or quotient with one number makes of its input, or 0 for any other."""
    if isinstance(other, torch.Tensor) and other.dim() == 0 and not other.is_complex():
        other = float(other)
    if not isinstance(other, (int, float)) or not other:
        return 0.0
    return float(other) if name.startswith("mul") else 1 / other


def _is_one_number(value: Any) -> bool:
    """Return whether a probability is the same for all: one that the model has computed makes a sample, no dropout."""
    if not isinstance(value, torch.Tensor):
        return True
    return value.numel() > 0 and bool((value == value.reshape(-1)[0]).all())
