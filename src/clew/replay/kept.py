"""Values of an executed step, kept once each and within a bound: the same content is never kept twice."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from clew.errors import UnsupportedTensor, UsageError
from clew.model.schema import STAT_NAMES
from clew.stats.rows import Rows

if TYPE_CHECKING:
    import torch

_BAD: Final = tuple(STAT_NAMES.index(name) for name in ("nan", "pos_inf", "neg_inf"))
DEFAULT_BYTES: Final = 1_000_000_000
"""How much memory the values of one step may take unless asked otherwise."""


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor at one moment: its form, its statistics, and the key of its content in the vault.

    ``role`` names a tensor that came from outside (a parameter, the batch), ``producer`` the operation that last
    wrote it, -1 where that was before the step.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    key: int
    stats: tuple[float, ...]
    role: str = ""
    producer: int = -1

    @property
    def is_bad(self) -> bool:
        """Whether some element is NaN or infinite."""
        return (
            any(self.stats[STAT_NAMES.index(name)] for name in ("nan", "pos_inf", "neg_inf"))
            if self.stats
            else False
        )


class Gone:
    """Stands for a value that was not kept; whoever uses it is told why."""

    def __init__(self, held: Held, limit_bytes: int) -> None:
        self._told = (
            f"this {held.dtype}{list(held.shape)} was not kept: the values of the step take more than "
            f"{limit_bytes / 1e9:g} GB"
        )

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            self._told, next_step="clew replay … --memory 4GB, or --ops A:B around what you look for"
        )

    __getattr__ = __call__ = __getitem__ = __add__ = __mul__ = __sub__ = __truediv__ = __bool__ = __iter__ = (
        _refuse
    )

    def __repr__(self) -> str:
        return f"<{self._told}>"


class Vault:
    """Contents by key; when they take more than the limit, the oldest go, their statistics stay with the user."""

    def __init__(self, limit_bytes: int = DEFAULT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.dropped = 0
        self.is_open = True
        """Whether contents are taken in; statistics are measured always."""
        self._contents: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._rows = Rows(hashes=True, capacity=1)
        self._unhashed = 0

    def hold(self, tensor: torch.Tensor, *, role: str = "", producer: int = -1) -> Held:
        """Keep what a tensor holds now."""
        key, stats = self._measure(tensor)
        size = tensor.numel() * tensor.element_size()
        shape, dtype = tuple(int(n) for n in tensor.shape), str(tensor.dtype).removeprefix("torch.")
        key = hash((key, shape, dtype))
        if self.is_open:
            self._keep(key, tensor, size)
        return Held(shape, dtype, size, key, stats, role, producer)

    def value(self, held: Held) -> Any:
        """Return a copy of the content, or something that says why it is not there."""
        found = self._contents.get(held.key)
        return Gone(held, self.limit_bytes) if found is None else found

    def has(self, held: Held) -> bool:
        """Return whether the content is still there."""
        return held.key in self._contents

    def _keep(self, key: int, tensor: torch.Tensor, size: int) -> None:
        if key in self._contents:
            self._contents.move_to_end(key)
            return
        if size > self.limit_bytes:
            self.dropped += 1
            return
        self._contents[key] = tensor.detach().clone()
        self.held_bytes += size
        while self.held_bytes > self.limit_bytes:
            _, old = self._contents.popitem(last=False)
            self.held_bytes -= old.numel() * old.element_size()
            self.dropped += 1

    def _measure(self, tensor: torch.Tensor) -> tuple[int, tuple[float, ...]]:
        try:
            self._rows.measure(tensor, 0, hash=True)
            self._rows.settle()
        except UnsupportedTensor:
            # Without a hash it counts as a content of its own.
            self._unhashed -= 1
            return self._unhashed, ()
        assert self._rows.hashes is not None
        return int(self._rows.hashes[0]), tuple(float(number) for number in self._rows.values[0])
