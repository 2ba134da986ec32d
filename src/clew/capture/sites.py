"""The table of sites: names become integers once, and keep their order of first execution."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from clew.errors import suggest
from clew.model.glob import compile_globs
from clew.model.record import Site

if TYPE_CHECKING:
    from collections.abc import Iterable


class SiteTable:
    """Every site of one recording, by name; knows which of them the user asked for."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = tuple(patterns)
        self.is_wanted = compile_globs(self._patterns)
        """Whether the user's patterns take a name in."""
        self._by_name: dict[str, int] = {}
        self._sites: list[Site] = []
        self._changed: set[int] = set()
        self._executed = 0
        self.shapes: list[tuple[int, ...] | None] = []
        """The last shape of each site: one comparison tells the hot path that nothing is new."""

    def __len__(self) -> int:
        return len(self._sites)

    def __getitem__(self, number: int) -> Site:
        return self._sites[number]

    def add(
        self,
        name: str,
        role: str,
        *,
        type: str = "",
        parent: int = -1,
        root: str = "",
        trainable: bool = False,
        source: str = "",
        args: str = "",
    ) -> int:
        """Return the number of the site of this name, made now if it is new."""
        known = self._by_name.get(name)
        if known is not None:
            return known
        number = len(self._sites)
        self._by_name[name] = number
        self._sites.append(
            Site(
                number,
                name,
                role,
                type=type,
                parent=parent,
                root=root,
                trainable=trainable,
                source=source,
                args=args,
            )
        )
        self.shapes.append(None)
        self._changed.add(number)
        return number

    def find(self, name: str) -> int:
        """Return the number of a site, or -1."""
        return self._by_name.get(name, -1)

    def describe(self, number: int, shape: tuple[int, ...], dtype: str) -> None:
        """Keep the shape and dtype last seen at a site, and its place in the order of execution."""
        site = self._sites[number]
        self.shapes[number] = shape
        if site.shape == shape and site.dtype == dtype and site.order >= 0:
            return
        order = site.order
        if order < 0:
            order = self._executed
            self._executed += 1
        self._sites[number] = replace(site, shape=shape, dtype=dtype, order=order)
        self._changed.add(number)

    def amend(self, number: int, args: str) -> None:
        """Give a site other arguments: the module was changed while it was watched."""
        if self._sites[number].args != args:
            self._sites[number] = replace(self._sites[number], args=args)
            self._changed.add(number)

    def tell_unmatched(self) -> list[str]:
        """Return a sentence for each of the user's patterns that no site fits, with the nearest name."""
        names = list(self._by_name)
        wanted = [pattern for pattern in self._patterns if not pattern.startswith("!")] if names else []
        lost = [pattern for pattern in wanted if not any(map(compile_globs([pattern]), names))]
        return [f"no site fits '{pattern}'; {suggest(pattern, names)}".rstrip("; ") for pattern in lost]

    def take_changes(self) -> list[Site]:
        """Hand over the sites that are new or different since the last call."""
        changed = [self._sites[number] for number in sorted(self._changed)]
        self._changed.clear()
        return changed
