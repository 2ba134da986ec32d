"""How parts lie inside a whole, told from their contents, and the whole cut into what stands for each part."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

KNOWN: Final = 0.7
"""Parts that are this near to the stretches of a layout (relative L2) lie so; strangers are 1.4 apart."""
_COLUMNS: Final = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """How parts lie in a whole: one after the other, or in each of ``heads`` stretches a share of every part.

    ``order``: the part that stands at each place. ``is_turned``: along the last axis, not the first. ``is_known``: the
    contents say so; otherwise it is what is usual.
    """

    order: tuple[int, ...]
    heads: int = 1
    is_turned: bool = False
    is_known: bool = True

    def cut(self, whole: NDArray[Any], sizes: Sequence[int]) -> list[NDArray[Any]]:
        """Return what stands for each part, in the order of the parts and laid out as they are."""
        rows = whole.T if self.is_turned else whole
        places = [sizes[part] for part in self.order]
        if self.heads == 1:
            pieces = np.split(rows, np.cumsum(places)[:-1])
        else:
            shared = rows.reshape(self.heads, len(places), places[0] // self.heads, *rows.shape[1:])
            pieces = [shared[:, place].reshape(places[0], *rows.shape[1:]) for place in range(len(places))]
        return [pieces[self.order.index(part)] for part in range(len(places))]

    def cut_last(self, whole: NDArray[Any], sizes: Sequence[int]) -> list[NDArray[Any]]:
        """Return what stands for each part's result: the rows of a matrix are the last axis of what it gives."""
        flat = np.moveaxis(whole, -1, 0)
        plain = Layout(self.order, self.heads)
        return [np.moveaxis(piece, 0, -1) for piece in plain.cut(flat, sizes)]

    def say(self, whole: str, part: int, sizes: Sequence[int]) -> str:
        """Return the name of the stretch of a whole that stands for a part."""
        place = self.order.index(part)
        if self.heads > 1:
            return f"{whole}[{place + 1} of {len(sizes)} in each of {self.heads} heads]"
        start = sum(sizes[each] for each in self.order[:place])
        return f"{whole}[{':, ' if self.is_turned else ''}{start}:{start + sizes[part]}]"


def find_layout(parts: Sequence[NDArray[Any]], whole: NDArray[Any]) -> Layout:
    """Return the layout that brings the whole nearest to the parts; the plain one where no layout is near."""
    sizes = [len(part) for part in parts]
    stacked = (sum(sizes), *parts[0].shape[1:])
    usual = Layout(tuple(range(len(parts))), is_turned=stacked != whole.shape, is_known=False)
    best, least = usual, KNOWN
    for is_turned in (False, True):
        if (whole.T if is_turned else whole).shape != stacked:
            continue
        samples, sample = _sample(parts, whole.T if is_turned else whole)
        for heads in _heads(sizes):
            for order, error in _try_orders(samples, sample, sizes, heads):
                if error < least:
                    best, least = Layout(order, heads, is_turned), error
        if least == 0.0:
            break
    return best


def _sample(parts: Sequence[NDArray[Any]], whole: NDArray[Any]) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """Return a few columns of each, in float64: enough to tell one row from another."""
    if whole.ndim == 1:
        return [np.asarray(part, np.float64)[:, None] for part in parts], np.asarray(whole, np.float64)[
            :, None
        ]
    flat = whole.reshape(len(whole), -1)
    columns = np.unique(np.linspace(0, flat.shape[1] - 1, _COLUMNS).astype(int))
    taken = [np.asarray(part.reshape(len(part), -1)[:, columns], np.float64) for part in parts]
    return taken, np.asarray(flat[:, columns], np.float64)


def _heads(sizes: Sequence[int]) -> list[int]:
    """Return into how many equal stretches the parts can be cut: 1 first, the usual one."""
    if len(set(sizes)) > 1:
        return [1]
    return [number for number in range(1, sizes[0] + 1) if sizes[0] % number == 0]


def _try_orders(
    parts: Sequence[NDArray[Any]], whole: NDArray[Any], sizes: Sequence[int], heads: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield each order of the parts with how far the whole is from them then, the order of the parts first."""
    size = sum(float((part**2).sum()) for part in parts) or 1.0
    for order in permutations(range(len(parts))):
        pieces = Layout(order, heads).cut(whole, sizes)
        error = sum(float(((x - y) ** 2).sum()) for x, y in zip(parts, pieces, strict=True))
        yield order, (error / size) ** 0.5
