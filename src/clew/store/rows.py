"""Which rows of a table a reader wants, and which parts of the disk cannot hold any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

NONFINITE: Final = ("nan", "pos_inf", "neg_inf")


@dataclass(frozen=True)
class Rows:
    """A choice of rows; a field that is None does not restrict. ``first`` and ``last`` are steps, both included."""

    first: int | None = None
    last: int | None = None
    site: tuple[int, ...] | None = None
    kind: tuple[int, ...] | None = None
    ordinal: tuple[int, ...] | None = None
    mode: tuple[int, ...] | None = None
    name: tuple[str, ...] | None = None
    nonfinite: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns one must read to decide about a row."""
        listed = tuple(column for column, _ in self._listed())
        steps = ("step",) if self.first is not None or self.last is not None else ()
        return listed + steps + (NONFINITE if self.nonfinite else ())

    def _listed(self) -> list[tuple[str, tuple[Any, ...]]]:
        choices = [("site", self.site), ("kind", self.kind), ("ordinal", self.ordinal)]
        choices += [("mode", self.mode), ("name", self.name)]  # type: ignore[list-item]
        return [(column, wanted) for column, wanted in choices if wanted is not None]

    def mask(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_] | None:
        """Return which of the given rows are wanted, or None for all of them."""
        masks = [_is_one_of(columns[column], wanted) for column, wanted in self._listed()]
        if self.first is not None:
            masks.append(columns["step"] >= self.first)
        if self.last is not None:
            masks.append(columns["step"] <= self.last)
        if self.nonfinite:
            masks.append(np.logical_or.reduce([columns[name] > 0 for name in NONFINITE]))
        return np.logical_and.reduce(masks) if masks else None

    def excludes(self, bounds: Callable[[str], tuple[Any, Any] | None]) -> bool:
        """Say whether no row can be wanted, given the smallest and largest value of a column (None: not known)."""
        for column, wanted in self._listed():
            found = bounds(column)
            if found is not None and not any(found[0] <= value <= found[1] for value in wanted):
                return True
        steps = bounds("step") if self.first is not None or self.last is not None else None
        if steps is not None and not self.overlaps(*steps):
            return True
        return self.nonfinite and all((bounds(name) or (0, 1))[1] == 0 for name in NONFINITE)

    def overlaps(self, first: int, last: int) -> bool:
        """Say whether any step from ``first`` to ``last`` is wanted."""
        return not (self.first is not None and last < self.first) and not (
            self.last is not None and first > self.last
        )


def _is_one_of(column: NDArray[Any], wanted: tuple[Any, ...]) -> NDArray[np.bool_]:
    if len(wanted) <= 4:
        return np.logical_or.reduce([column == value for value in wanted], axis=0)  # type: ignore[no-any-return]
    return np.isin(column, np.asarray(wanted))
