"""Which stored weight is for which parameter, when two frameworks name and lay them out in their own ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from clew.compare.align import align
from clew.compare.name import is_turned_by_name
from clew.model.record import Site

if TYPE_CHECKING:
    from collections.abc import Mapping

    Shapes = Mapping[str, tuple[int, ...]]

_CONV_AXES: Final = {3: (2, 1, 0), 4: (2, 3, 1, 0), 5: (2, 3, 4, 1, 0)}
"""From the order out, in, space of PyTorch to the order space, in, out."""


@dataclass(frozen=True, slots=True)
class WeightMatch:
    """A parameter, the weight it gets, how they were found to belong together, and the order of the weight's axes."""

    target: str
    source: str
    how: str
    axes: tuple[int, ...]

    @property
    def is_turned(self) -> bool:
        """Whether the weight is laid out otherwise."""
        return self.axes != tuple(range(len(self.axes)))


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was matched, which parameters got nothing, and which weights nobody took."""

    matched: tuple[WeightMatch, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has its weight and every weight was taken."""
        return not self.missing and not self.unused

    def __str__(self) -> str:
        turned = sum(match.is_turned for match in self.matched)
        lines = [f"{len(self.matched)} parameters matched, {turned} of them turned"]
        lines += [
            f"  {match.target} <- {match.source} ({match.how}{', turned' if match.is_turned else ''})"
            for match in self.matched
            if match.how != "name" or match.is_turned
        ]
        lines += [f"  no weight for {name}" for name in self.missing]
        lines += [f"  not used: {name}" for name in self.unused]
        return "\n".join(lines)


def plan_import(targets: Shapes, sources: Shapes, *, names: Mapping[str, str] | None = None) -> ImportReport:
    """Return which weight each parameter gets; ``names`` maps parameters to weights and wins over everything."""
    alignment = align(_make_sites(targets), _make_sites(sources), names=dict(names or {}))
    matched, missing = [], list(alignment.only_a)
    unused = list(alignment.only_b)
    for pair in alignment.pairs:
        if pair.a not in targets or pair.b not in sources:
            continue
        axes = find_axes(pair.a, targets[pair.a], pair.b, sources[pair.b])
        if axes is None:
            missing.append(pair.a)
            unused.append(pair.b)
        else:
            matched.append(WeightMatch(pair.a, pair.b, pair.how, axes))
    return ImportReport(
        tuple(matched),
        tuple(name for name in missing if name in targets),
        tuple(name for name in unused if name in sources),
    )


def find_axes(
    target: str, wanted: tuple[int, ...], source: str, given: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the order of a weight's axes that makes it fit a parameter, or None."""
    straight = tuple(range(len(given)))
    turned = _CONV_AXES.get(len(given), straight[::-1])
    # Names tell what shapes cannot: a square matrix fits both ways.
    is_named = is_turned_by_name(target, source)
    if is_turned_by_name(source, target) and len(given) in _CONV_AXES:
        turned = tuple(turned.index(axis) for axis in straight)
    if is_turned_by_name(source, target):
        is_named = True
    for axes in (turned, straight) if is_named and len(given) >= 2 else (straight, turned):
        if tuple(given[axis] for axis in axes) == tuple(wanted):
            return axes
    return None


def _make_sites(shapes: Shapes) -> list[Site]:
    """Return parameters, and the modules that their names speak of, as sites."""
    sites: list[Site] = []
    known: set[str] = set()
    for name, shape in shapes.items():
        parts = name.split(".")
        for at in range(1, len(parts)):
            module = ".".join(parts[:at])
            if module not in known:
                known.add(module)
                sites.append(Site(len(sites), module, "module"))
        sites.append(Site(len(sites), name, "parameter", "float32", shape=tuple(shape)))
    return sites
