"""Parts of a model that have another path on the other side: a prefix more, a block that moved up by one.

Parameters with equal contents vote for it, or, where nothing has equal contents, names that end alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from clew.compare.name import unwrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from clew.model.record import Site

Rename = tuple[str, str]


def find_renamed(
    a: Sequence[Site], b: Sequence[Site], fingerprints: tuple[Mapping[str, int], Mapping[str, int]]
) -> dict[str, str]:
    """Return the names of ``a`` that stand under another path in ``b``, with their names there.

    Renames keep the order of both sides: two layers that changed places are a difference, not other names.
    """
    votes = _vote_by_contents(*fingerprints) or _vote_by_names(a, b)
    renames = _keep_order(_elect(votes), a, b)
    known = {site.name for site in b}
    moved = {site.name: _rename(site.name, renames) for site in a}
    found = {name: other for name, other in moved.items() if other != name and other in known}
    # A name that several would take belongs to none of them.
    owners = Counter(found.values())
    return {name: other for name, other in found.items() if owners[other] == 1}


def _vote_by_contents(a: Mapping[str, int], b: Mapping[str, int]) -> Counter[Rename]:
    by_value = {value: name for name, value in b.items()}
    pairs = [(name, by_value[value]) for name, value in a.items() if value in by_value]
    return Counter(_strip(first, second) for first, second in pairs if unwrap(first) != unwrap(second))


def _vote_by_names(a: Sequence[Site], b: Sequence[Site]) -> Counter[Rename]:
    """One side has all names of the other below one more part of the path."""
    votes: Counter[Rename] = Counter()
    names_a, names_b = ({s.name: s for s in side if s.role == "parameter"} for side in (a, b))
    if not names_a or len(names_a.keys() & names_b.keys()) * 2 > min(len(names_a), len(names_b)):
        return votes
    for first, second, turn in ((names_a, names_b, 1), (names_b, names_a, -1)):
        tails: dict[str, list[str]] = defaultdict(list)
        for name in second:
            parts = name.split(".")
            for at in range(1, len(parts)):
                tails[".".join(parts[at:])].append(name)
        for name, site in first.items():
            found = [other for other in tails.get(name, ()) if second[other].shape == site.shape]
            votes.update(_strip(*(name, other)[::turn]) for other in found)
    return Counter(
        {rename: count for rename, count in votes.items() if count * 2 > min(len(names_a), len(names_b))}
    )


def _strip(a: str, b: str) -> Rename:
    """Return what is left of two paths when the parts they have in common at the end are gone."""
    first, second = a.split("."), b.split(".")
    while first and second and first[-1] == second[-1]:
        del first[-1], second[-1]
    return ".".join(first), ".".join(second)


def _elect(votes: Counter[Rename]) -> list[Rename]:
    """Return the renames with the most votes, each path once on either side."""
    chosen: list[Rename] = []
    taken: tuple[set[str], set[str]] = (set(), set())
    for (first, second), _ in sorted(votes.items(), key=lambda item: (-item[1], len(item[0][0]))):
        if first not in taken[0] and second not in taken[1]:
            chosen.append((first, second))
            taken[0].add(first)
            taken[1].add(second)
    return chosen


def _keep_order(renames: Iterable[Rename], a: Sequence[Site], b: Sequence[Site]) -> list[Rename]:
    """Return the renames without those that cross: of two, the one that came to the other's place and back."""
    places = [_first_places(side) for side in (a, b)]
    ordered = sorted((places[0].get(x, -1), places[1].get(y, -1), x, y) for x, y in renames)
    return [
        (x, y)
        for i, j, x, y in ordered
        if not any((i - k) * (j - m) < 0 for k, m, first, second in ordered if first == y or second == x)
    ]


def _first_places(sites: Sequence[Site]) -> dict[str, int]:
    places: dict[str, int] = {}
    for index, site in enumerate(sites):
        parts = site.name.split(".")
        for at in range(len(parts) + 1):
            places.setdefault(".".join(parts[:at]), index)
    return places


def _rename(name: str, renames: Iterable[Rename]) -> str:
    """Return a name with the longest path of it that was renamed exchanged for the other one."""
    best: Rename | None = None
    for first, second in renames:
        is_inside = not first or name == first or name.startswith(f"{first}.")
        if is_inside and (best is None or len(first) > len(best[0])):
            best = (first, second)
    if best is None:
        return name
    rest = name[len(best[0]) :].lstrip(".")
    return ".".join(part for part in (best[1], rest) if part)
