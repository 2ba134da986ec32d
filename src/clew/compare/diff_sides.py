"""Two runs side by side: which site is which, what each was set to, and what cannot be compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.compare.align import Alignment, Pair, align
from clew.compare.tolerance import loosest, tolerance_of
from clew.model.record import SEED_AT_START

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

    from clew.model.record import Site
    from clew.query import Run

BY_HAND: Final = "recorded_by_hand"
"""The setting of a run that was put together from arrays: what it lacks says nothing about the model."""

CODE: Final = "forward()"
LATER: Final = "then."
"""In the arguments of a module: the words of its code, and what was changed while it was watched."""

STAT_FACTOR: Final = 4.0
"""Statistics may be this many tolerances of their dtype apart: small errors add up from site to site."""


_PACKED: Final = "MultiheadAttention"
"""The class that has the matrices of q, k and v in one parameter, and calls no module for any of its own."""


@dataclass(slots=True)
class Sides:
    """The two runs, their alignment as numbers, and their sites by name.

    ``pairs`` are those of the alignment in its order, then those of several sites with one. ``pair_of_a`` and
    ``pair_of_b`` give the pair of a site's number, -1 for none. ``is_fragment``: one side has only
    some of the sites, so one that is missing is no difference. ``is_by_hand``: one side was put together from arrays.
    """

    a: Run
    b: Run
    alignment: Alignment
    sites_a: dict[str, Site] = field(default_factory=dict)
    sites_b: dict[str, Site] = field(default_factory=dict)
    pair_of_a: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    pair_of_b: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    is_fragment: bool = False
    is_by_hand: bool = False
    pairs: tuple[Pair, ...] = ()

    @property
    def only_a(self) -> tuple[str, ...]:
        """The sites of the first run that nothing is compared with."""
        return self._alone(self.alignment.only_a, "a")

    @property
    def only_b(self) -> tuple[str, ...]:
        """The sites of the second run that nothing is compared with."""
        return self._alone(self.alignment.only_b, "b")

    def absorbed(self, side: str) -> set[str]:
        """Return the modules of a side that the other run has no call for, though it has all of their weights."""
        joined = [name for pair in self.alignment.joined for name in pair.sites(side)]
        sites, others = (self.sites_a, self.sites_b) if side == "a" else (self.sites_b, self.sites_a)
        other = "b" if side == "a" else "a"
        found = {name.rpartition(".")[0] for name in joined if sites[name].role == "parameter"}
        own = {name for name in found if not _has_other_parameters(name, sites, joined)}
        own |= {name for name in found if name in sites and sites[name].type.endswith(_PACKED)}
        for pair in self.alignment.pairs if joined else ():
            around = others.get(pair.sites(other)[0].rpartition(".")[0])
            if around is not None and around.type.endswith(_PACKED):
                own.add(pair.sites(side)[0])
        return own

    def is_around_parts(self, a: Site, b: Site) -> bool:
        """Whether two modules hold parts of a whole: their classes and their code cannot be the same."""
        return any(
            name.startswith(f"{module.name}.")
            for pair in self.alignment.joined
            for module, side in ((a, "a"), (b, "b"))
            for name in pair.sites(side)
        )

    def _alone(self, names: tuple[str, ...], side: str) -> tuple[str, ...]:
        joined = {name for pair in self.alignment.joined for name in pair.sites(side)}
        return tuple(name for name in names if name not in joined)

    def site_pair(self, pair: int) -> tuple[Site, Site]:
        """Return both sites of a pair."""
        names = self.pairs[pair]
        return self.sites_a[names.a], self.sites_b[names.b]

    def module_of(self, site: Site, run: str) -> Site:
        """Return the module that a leaf of an output belongs to; any other site stands for itself."""
        if site.role != "leaf" or site.parent < 0:
            return site
        sites = self.sites_a if run == "a" else self.sites_b
        return next((each for each in sites.values() if each.id == site.parent), site)

    def by_statistics(self) -> NDArray[np.bool_]:
        """Return which pairs cannot be compared by hash: turned matrices, parts, integers of other widths."""
        return np.array(
            [_needs_statistics(pair, *self.site_pair(i)) for i, pair in enumerate(self.pairs)], bool
        )

    def tolerances(self) -> NDArray[np.float64]:
        """Return the relative error of statistics that rounding explains, for each pair."""
        dtypes = [[_dtype(site) for site in self.site_pair(index)] for index in range(len(self.pairs))]
        return STAT_FACTOR * np.array([tolerance_of(loosest(*each)).relative for each in dtypes], np.float64)


def _has_other_parameters(module: str, sites: Mapping[str, Site], known: Collection[str]) -> bool:
    return any(
        site.role == "parameter" and name.startswith(f"{module}.") and name not in known
        for name, site in sites.items()
    )


def join_sides(a: Run, b: Run, *, names: Mapping[str, str] | None = None) -> Sides:
    """Align two runs; ``names`` is the user's map, with its stars filled in."""
    sites_a, sites_b = {site.name: site for site in a.sites}, {site.name: site for site in b.sites}
    alignment = _align(a, b, names or {})
    pairs = (*alignment.pairs, *alignment.joined)
    place_a, place_b = (
        {name: index for index, pair in enumerate(pairs) for name in pair.sites(side)} for side in "ab"
    )
    settings = (a.info.settings, b.info.settings)
    is_by_hand = any(each.get(BY_HAND) for each in settings)
    return Sides(
        a,
        b,
        alignment,
        sites_a,
        sites_b,
        np.array([place_a.get(site.name, -1) for site in a.sites], np.int64),
        np.array([place_b.get(site.name, -1) for site in b.sites], np.int64),
        is_fragment=is_by_hand or settings[0].get("sites") != settings[1].get("sites"),
        is_by_hand=is_by_hand,
        pairs=pairs,
    )


def _align(a: Run, b: Run, names: Mapping[str, str]) -> Alignment:
    first, second = [site.name for site in a.sites], [site.name for site in b.sites]
    if not names and len(first) == len(second) and set(first) == set(second):
        return Alignment(tuple(Pair(name, name, "name") for name in first), (), ())
    return align(a.sites, b.sites, names={**_tops(first, second), **names}, fingerprints=_prints(a, b))


def _tops(a: list[str], b: list[str]) -> dict[str, str]:
    """Pair the models themselves: their sites are named after their classes, in brackets."""
    tops = [[name for name in side if name.startswith("(")] for side in (a, b)]
    return {tops[0][0]: tops[1][0]} if [len(each) for each in tops] == [1, 1] else {}


def _prints(a: Run, b: Run) -> tuple[dict[str, int], dict[str, int]]:
    """Return the hashes of initial weights that one differently named site on each side has."""
    tables = [_initial_hashes(run) for run in (a, b)]
    owners: list[dict[int, list[str]]] = [{}, {}]
    for table, owner in zip(tables, owners, strict=True):
        for name, value in table.items():
            owner.setdefault(value, []).append(name)
    unique = [
        value
        for value, mine in owners[0].items()
        if len(mine) == 1 and len(owners[1].get(value, ())) == 1 and owners[1][value] != mine
    ]
    return {owners[0][v][0]: v for v in unique}, {owners[1][v][0]: v for v in unique}


def _initial_hashes(run: Run) -> dict[str, int]:
    steps = run.steps
    if not len(steps):
        return {}
    table = run.stats(kind="param", step=int(steps[0]), columns=["hash"])
    hashes = zip(table["site"].tolist(), table["hash"].tolist(), strict=True)
    return {name: value for name, value in hashes if value}


def _dtype(site: Site) -> str:
    return site.dtype or (site.type if site.role != "module" else "") or "float32"


def is_float(dtype: str) -> bool:
    """Whether a dtype is one of real or complex floating-point numbers."""
    return dtype.startswith(("float", "bfloat", "complex"))


def _needs_statistics(pair: Pair, a: Site, b: Site) -> bool:
    first, second = _dtype(a), _dtype(b)
    return (
        pair.is_transposed
        or bool(pair.parts)
        or (first != second and not (is_float(first) or is_float(second)))
    )


def float_dtypes(sides: Sides, pair: int) -> tuple[str, str] | None:
    """Return the two floating-point types of a pair when they differ."""
    a, b = (site.dtype for site in sides.site_pair(pair))
    return (a, b) if a and b and a != b and is_float(a) and is_float(b) else None


def differing_arguments(a: Site, b: Site) -> dict[str, tuple[str, str]]:
    """Return the plain attributes of two modules that differ; where nothing was recorded nothing does."""
    if not a.args or not b.args:
        return {}
    first, second = _parse(a.args), _parse(b.args)
    names = [*first, *(name for name in second if name not in first)]
    pairs = {name: (first.get(name, "absent"), second.get(name, "absent")) for name in names}
    return {
        name: values
        for name, values in pairs.items()
        if values[0] != values[1] and name != CODE and not name.startswith(LATER)
    }


def later_arguments(a: Site, b: Site) -> dict[str, tuple[str, str]]:
    """Return the plain attributes that were changed while the modules were watched and differ since."""
    first, second = _parse(a.args), _parse(b.args)
    names = [name.removeprefix(LATER) for name in (*first, *second) if name.startswith(LATER)]
    last = [
        {name: side.get(LATER + name, side.get(name, "absent")) for name in names} for side in (first, second)
    ]
    return {
        name: (last[0][name], last[1][name])
        for name in names
        if last[0][name] != last[1][name] and name != CODE
    }


def code_of(site: Site) -> str:
    """Return the words of the code of a module's forward, as far as it is the user's own."""
    return site.args.partition(f"{CODE}=")[2].partition("; ")[0] if f"{CODE}=" in site.args else ""


def _parse(text: str) -> dict[str, str]:
    return dict(part.partition("=")[::2] for part in text.split("; ") if "=" in part)


def numbers_at(run: Run, step: int, *, rank: int = 0) -> dict[str, float]:
    """Return learning rates and the optimizer's other numbers as they stood at a step."""
    found: dict[str, float] = {}
    for name, series in run.scalars(rank=rank).items():
        if not name.startswith("group.") and name.partition("[")[0] != "lr":
            continue
        until = int(np.searchsorted(series.steps, step, side="right"))
        if until:
            found[name] = float(series.values[until - 1])
    return found


def differing_numbers(sides: Sides, step: int, *, rank: int = 0) -> dict[str, tuple[Any, Any]]:
    """Return the numbers of the optimizers that differ at a step, None where one side has none."""
    a, b = (numbers_at(run, step, rank=rank) for run in (sides.a, sides.b))
    if not a or not b:
        return {}
    names = [*a, *(name for name in b if name not in a)]
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def differing_seeds(sides: Sides) -> tuple[Any, Any] | None:
    """Return the seeds of both runs when both are known and differ."""
    a, b = (
        seeds.get("torch", seeds.get(SEED_AT_START)) for seeds in (sides.a.info.seeds, sides.b.info.seeds)
    )
    return (a, b) if a is not None and b is not None and a != b else None
