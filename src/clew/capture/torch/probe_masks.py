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
        self._masked: set[int] = set()

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
        elif isinstance(first, torch.Tensor) and id(first) in self._masked and name in _FACTORS:
            self._judge(first, out)

    def _follow_mask(self, name: str, first: Any, other: Any, out: torch.Tensor) -> None:
        is_plain = not isinstance(other, torch.Tensor) or other.dim() == 0
        if id(first) in self._masks and (name in _SAME or (name in _FACTORS | _TURNED and is_plain)):
            self._keep(out, self._masks)
        elif name in _PRODUCTS and isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
            mask, given = (first, other) if id(first) in self._masks else (other, first)
            if given.is_floating_point():
                self._keep(out, self._masked)
                self._judge(mask, mask)

    def _judge(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Numbers that are left are made larger, by as much as others are taken out: that is dropout."""
        kept = after != 0
        if not bool(kept.any()) or bool(kept.all()):
            return
        factors = after[kept].double() if before is after else after[kept].double() / before[kept].double()
        if float(factors.min()) > _LARGER and float(factors.max() - factors.min()) < 1e-3 * float(
            factors.max()
        ):
            self.found = {"p": round(1 - 1 / float(factors.mean()), 3), "source": find_line()}

    def _keep(self, tensor: torch.Tensor, where: set[int]) -> None:
        self._alive.append(tensor)  # as long as it is there nothing else has its number
        where.add(id(tensor))


def _is_one_number(value: Any) -> bool:
    """Return whether a probability is the same for all: one that the model has computed makes a sample, no dropout."""
    if not isinstance(value, torch.Tensor):
        return True
    return value.numel() > 0 and bool((value == value.reshape(-1)[0]).all())
