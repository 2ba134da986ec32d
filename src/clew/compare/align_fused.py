"""Several places of one side that are one on the other: q, k and v in one matrix, gate and up in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from clew.compare.name import own_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from clew.model.record import Site

_FAMILIES: Final = (("q", "k", "v"), ("k", "v"), ("gate", "up"), ("w1", "w3"))
"""How the modules that are often fused begin, in the order in which they usually lie in the whole."""


@dataclass(frozen=True, slots=True)
class Fused:
    """Several sites of one side that are one on the other, such as q, k and v in one matrix."""

    parts: tuple[str, ...]
    whole: str
    whole_is_in: str

    @property
    def label(self) -> str:
        """The parts in one name: ``attn.{q,k,v}.weight``."""
        return join_names(self.parts)


def join_names(names: Sequence[str]) -> str:
    """Return several names as one, what they have in common before and after the braces."""
    split = [name.split(".") for name in names]
    shortest = min(map(len, split))
    head = next((at for at in range(shortest) if len({parts[at] for parts in split}) > 1), shortest)
    tail = next((at for at in range(shortest - head) if len({parts[-1 - at] for parts in split}) > 1), 0)
    inner = ",".join(".".join(parts[head : len(parts) - tail]) for parts in split)
    return ".".join([*split[0][:head], f"{{{inner}}}", *split[0][len(split[0]) - tail :]])


def find_fused(
    parts: Sequence[Site],
    wholes: Sequence[Site],
    *,
    whole_is_in: str,
    partners: Mapping[str, str] | None = None,
) -> list[Fused]:
    """Return neighbours whose matrices, put together, have the shape of one on the other side; then their modules.

    ``partners``: names on the side of the wholes of those on the side of the parts, as far as they are known; a whole
    is looked for only inside the partner of the module around the parts.
    """
    found: list[Fused] = []
    waiting = [site for site in parts if site.role == "parameter" and site.shape]
    for whole in wholes:
        if whole.role != "parameter" or not whole.shape:
            continue
        kin = [site for site in waiting if own_name(site.name) == _fused_own_name(whole.name)]
        run = _find_run(kin, whole, partners or {})
        if run:
            found.append(Fused(tuple(site.name for site in run), whole.name, whole_is_in))
            waiting = [site for site in waiting if site not in run]
    return [*found, *_find_modules(found, parts, wholes, set((partners or {}).values()))]


def _find_run(kin: Sequence[Site], whole: Site, partners: Mapping[str, str]) -> Sequence[Site]:
    """Return two to four neighbours that fit: those with names that are often fused, else the only ones there are."""
    for container, members in _by_container(kin).items():
        if not _is_inside(whole.name, container, partners):
            continue
        for family in _FAMILIES:
            chosen = [site for word in family for site in members if _module_word(site).startswith(word)]
            if len(chosen) == len(family) and _fits(chosen, whole):
                return chosen
        if 2 <= len(members) <= 4 and _fits(members, whole):
            return members
    return ()


def _by_container(sites: Iterable[Site]) -> dict[str, list[Site]]:
    """Return the parameters by the module that holds the modules they belong to."""
    table: dict[str, list[Site]] = {}
    for site in sites:
        table.setdefault(_parent(_parent(site.name)), []).append(site)
    return table


def _is_inside(whole: str, container: str, partners: Mapping[str, str]) -> bool:
    """Whether a whole lies where the nearest module around the parts that has a partner has it."""
    while container:
        if container in partners:
            return whole.startswith(f"{partners[container]}.")
        container = _parent(container)
    return True


def _find_modules(
    found: Sequence[Fused], parts: Sequence[Site], wholes: Sequence[Site], paired: set[str]
) -> list[Fused]:
    """Return the modules of fused parameters, where each part and the whole have one for themselves."""
    left, right = ({site.name for site in side if site.role == "module"} for side in (parts, wholes))
    others = [*paired, *(site.name for site in wholes)]
    known = {fused.whole for fused in found}
    modules = {
        Fused(tuple(_parent(part) for part in fused.parts), _parent(fused.whole), fused.whole_is_in): None
        for fused in found
    }
    return [
        each
        for each in modules
        if each.whole in right
        and set(each.parts) <= left
        and len(set(each.parts)) == len(each.parts)
        and not any(name.startswith(f"{each.whole}.") and name not in known for name in others)
    ]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _module_word(site: Site) -> str:
    return _parent(site.name).rpartition(".")[2].lower()


def _fused_own_name(name: str) -> str:
    """Return weight or bias, also for names such as ``in_proj_weight``."""
    last = own_name(name)
    return next((word for word in ("weight", "bias") if last.endswith(word)), last)


def _fits(run: Sequence[Site], whole: Site) -> bool:
    """Whether neighbours, stacked along the first dimension, give the whole, maybe transposed."""
    if any(site.shape[1:] != run[0].shape[1:] for site in run):
        return False
    stacked = (sum(site.shape[0] for site in run), *run[0].shape[1:])
    return whole.shape in (stacked, stacked[::-1])
