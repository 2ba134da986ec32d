"""The sites of a run: one table for all ranks, found by name or pattern."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from clew.errors import UsageError, suggest
from clew.model.glob import compile_globs, split_patterns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from clew.model.record import Site


class SiteIndex:
    """Sites of all ranks, joined by name. A rank numbers its sites itself; here each name has one number."""

    def __init__(self, by_rank: Mapping[int, list[Site]]) -> None:
        self.sites: list[Site] = []
        self._by_name: dict[str, Site] = {}
        self._joined: dict[int, NDArray[np.int32]] = {}
        self._local: dict[int, dict[int, int]] = {}
        for rank, sites in by_rank.items():
            self._add_rank(rank, sites)
        self.names = [site.name for site in self.sites]
        self._children: dict[int, list[Site]] = {}
        for site in self.sites:
            self._children.setdefault(site.parent, []).append(site)

    def _add_rank(self, rank: int, sites: list[Site]) -> None:
        joined = np.full(max((site.id for site in sites), default=-1) + 1, -1, np.int32)
        numbers = {name: site.id for name, site in self._by_name.items()}
        for site in sites:
            joined[site.id] = numbers.setdefault(site.name, len(numbers))
        for site in sites:
            if site.name in self._by_name:
                continue
            number = numbers[site.name]
            parent = int(joined[site.parent]) if 0 <= site.parent < len(joined) else -1
            if (number, parent) != (site.id, site.parent):
                site = replace(site, id=number, parent=parent)  # noqa: PLW2901 - the same site, as the run numbers it
            self._by_name[site.name] = site
            self.sites.append(site)
        self._joined[rank] = joined
        self._local[rank] = {int(number): local for local, number in enumerate(joined) if number >= 0}

    def join(self, rank: int, local: NDArray[Any]) -> NDArray[np.int32]:
        """Return the numbers of this table for the numbers a rank wrote."""
        numbers: NDArray[np.int32] = self._joined[rank][local]
        return numbers

    def localise(self, rank: int, numbers: list[int]) -> tuple[int, ...]:
        """Return the numbers a rank wrote for sites of this table, without those it does not know."""
        local = self._local[rank]
        return tuple(local[number] for number in numbers if number in local)

    def resolve(self, site: Site | str) -> Site:
        """Return the site of a name; raises with the nearest name when there is none."""
        name = site if isinstance(site, str) else site.name
        if name not in self._by_name:
            raise self._unknown(name)
        return self._by_name[name]

    def find(self, pattern: str) -> list[Site]:
        """Return the sites whose name fits a pattern, or has exactly that name; raises when there are none."""
        if pattern in self._by_name:
            return [self._by_name[pattern]]
        is_wanted = compile_globs(split_patterns(pattern))
        found = [site for site in self.sites if is_wanted(site.name)]
        if not found:
            raise self._unknown(pattern)
        return found

    def _unknown(self, name: str) -> UsageError:
        hint = suggest(name, self.names)
        some = ", ".join(self.names[:6]) + (" …" if len(self.names) > 6 else "")
        return UsageError(
            f"no site is called or matches '{name}'", next_step=hint or (some and f"there are: {some}")
        )

    def parameters_below(self, site: Site) -> list[Site]:
        """Return the parameters of a module and of the modules in it."""
        found: list[Site] = []
        for child in self._children.get(site.id, []):
            if child.role == "parameter":
                found.append(child)
            elif child.id != site.id:
                found += self.parameters_below(child)
        return found
