"""Which modules were called and in which order; where the parameters without a gradient sit among them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from clew.capture.torch.probe_events import find_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.capture.torch.probe_lost import Cut

_MOST_NAMES: Final = 8
_MOST_ELEMENTS: Final = 2048
_ALIKE: Final = 0.7
_QUIET_CALLS: Final = 3


class _Called(NamedTuple):
    """A module that was called: the first time among all, and whether gradients were switched on then."""

    ref: weakref.ref[torch.nn.Module]
    name: str
    order: int
    with_grad: bool


class CallLog:
    """Modules that were called while training, roots, and modules that belong to no model."""

    def __init__(self) -> None:
        self.called: dict[int, _Called] = {}
        self.strangers: dict[int, weakref.ref[torch.nn.Module]] = {}
        self.is_new_stranger = False
        self._roots: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._newest: list[int] = []
        self._quiet: dict[int, tuple[weakref.ref[torch.nn.Module], int]] = {}

    def add(self, module: torch.nn.Module, name: str) -> None:
        """Take a module that was called for the first time."""
        ref = weakref.ref(module)
        self.called[id(module)] = _Called(ref, name, len(self.called), torch.is_grad_enabled())
        self._newest.append(id(module))

    def add_root(self, module: torch.nn.Module) -> None:
        """Take a root that was called with gradients switched on."""
        self._newest.clear()
        known = self._roots.get(id(module))
        if known is None or known() is not module:
            self._roots[id(module)] = weakref.ref(module)

    def forget_newest(self) -> None:
        """The root was called without gradients: what ran inside it for the first time does not count."""
        for key in self._newest:
            called = self.called.pop(key, None)
            if called is not None:
                known, count = self._quiet.get(key, (called.ref, 0))
                self._quiet[key] = (called.ref, count + 1 if known() is called.ref() else 1)
        self._newest.clear()

    def add_stranger(self, module: torch.nn.Module) -> None:
        """Take a module that no model contains."""
        known = self.strangers.get(id(module))
        self.is_new_stranger = known is None or known() is not module
        if self.is_new_stranger:
            self.strangers[id(module)] = weakref.ref(module)

    def roots(self) -> list[torch.nn.Module]:
        """Return the roots that are still there."""
        return [module for ref in self._roots.values() if (module := ref()) is not None]

    def is_called(self, module: torch.nn.Module) -> bool:
        """Return whether a module was called."""
        known = self.called.get(id(module))
        return known is not None and known.ref() is module

    def is_quiet(self, module: torch.nn.Module) -> bool:
        """Return whether a module was called several times, and never with gradients switched on."""
        known, count = self._quiet.get(id(module), (None, 0))
        is_known = known is not None and known() is module
        return is_known and count >= _QUIET_CALLS and not self.is_called(module)

    def list_parameters(self) -> set[int]:
        """Return the identities of the parameters of all roots and strangers."""
        inside = {id(p) for root in self.roots() for p in root.parameters()}
        return inside | {id(p) for p in self.list_strange_parameters()}

    def list_strange_parameters(self) -> list[torch.Tensor]:
        """Return the trainable parameters of modules that no model contains."""
        living = [module for ref in self.strangers.values() if (module := ref()) is not None]
        return [p for module in living for p in module.parameters(recurse=False) if p.requires_grad]

    def find_container(self, parameters: list[torch.Tensor]) -> tuple[list[str], dict[str, str]]:
        """Return the classes of the modules that hold these parameters, and where a model keeps them."""
        wanted = {id(parameter) for parameter in parameters}
        living = [module for ref in self.strangers.values() if (module := ref()) is not None]
        owners = [m for m in living if any(id(p) in wanted for p in m.parameters(recurse=False))]
        names = [type(module).__name__ for module in owners]
        for root in self.roots():
            for path, parent in root.named_modules():
                for attribute, value in vars(parent).items():
                    if attribute.startswith("_") or not _holds(value, owners):
                        continue
                    place = f"{path}.{attribute}" if path else attribute
                    return names, {
                        "model": type(root).__name__,
                        "attribute": place,
                        "container": type(value).__name__,
                    }
        return names, {"model": "", "attribute": "", "container": ""}


def _holds(value: Any, owners: list[torch.nn.Module], depth: int = 0) -> bool:
    """Return whether a plain container holds one of the modules, or a module that contains one."""
    if isinstance(value, torch.nn.Module):
        inside = set(map(id, value.modules()))
        return bool(depth) and any(id(owner) in inside for owner in owners)
    if depth >= 3:
        return False
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = list(value.values())[:64]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)[:64]
    return any(_holds(part, owners, depth + 1) for part in parts)


# ---------------------------------------------------------------- parameters without a gradient


class _Place(NamedTuple):
    """Where a parameter sits: its name, its module, and the module that contains that one."""

    name: str
    path: str
    module: torch.nn.Module
    parent: torch.nn.Module | None
    root: torch.nn.Module


def tell_unreached(
    calls: CallLog, wanting: list[torch.Tensor], *, tops: list[torch.nn.Module], is_late: bool
) -> list[dict[str, Any]]:
    """Return what is to be said about parameters without a gradient: cut off after a call, or never used.

    ``tops`` are models that hold what is called; they need not be called themselves.
    """
    missing = {id(parameter) for parameter in wanting}
    places = {id(p): place for root in [*tops, *calls.roots()] for p, place in _list_places(root)}
    cut: list[_Place] = []
    unused: list[_Place] = []
    quiet: list[_Place] = []
    copies = _find_copies(calls, missing)
    for parameter in wanting:
        place = places.get(id(parameter))
        if place is None or any(id(place.module) in inside for inside in copies):
            continue
        if _is_cut(calls, place, missing):
            cut.append(place)
        elif is_late or not _has_reached_sibling(place, missing):
            (quiet if calls.is_quiet(_find_caller(place)) else unused).append(place)
    found = []
    if cut:
        found.append({"form": "cut", **_tell_places(cut, missing), **_tell_border(calls, cut, missing)})
    if quiet:
        names = [f"{find_name(place.root) or type(place.root).__name__}.{place.path}" for place in quiet]
        modules = list(dict.fromkeys(name.removesuffix(".") for name in names))[:_MOST_NAMES]
        found.append({"form": "quiet", **_tell_places(quiet, missing), "modules": modules})
    if unused:
        found.append({"form": "unused", **_tell_places(unused, missing)})
    return found


def tell_cut(
    calls: CallLog, wanting: list[torch.Tensor], *, tops: list[torch.nn.Module], cut: Cut
) -> dict[str, Any] | None:
    """Return what is to be said about parameters that had gradients and lost them, or None without a module to name."""
    missing = {id(parameter) for parameter in wanting}
    places = {id(p): place for root in [*tops, *calls.roots()] for p, place in _list_places(root)}
    found = [places[id(p)] for p in wanting if id(p) in places]
    found = [each for each in found if id(each.module) in cut.called and _is_cut(calls, each, missing)]
    if not found:
        return None
    orders = [calls.called[id(place.module)] for place in found if id(place.module) in calls.called]
    last = max(orders, key=lambda each: each.order, default=None)
    return {
        "form": "cut",
        "steps": cut.steps,
        **_tell_places(found, missing),
        "before": last.name if last is not None else found[-1].path,
        "after": cut.users[0],
        "without_grad": all(cut.called[id(place.module)] for place in found),
    }


def _list_places(root: torch.nn.Module) -> Iterator[tuple[torch.Tensor, _Place]]:
    modules = dict(root.named_modules())
    for path, module in modules.items():
        parent = modules.get(path.rpartition(".")[0]) if path else None
        for name, parameter in module.named_parameters(recurse=False):
            yield parameter, _Place(f"{path}.{name}" if path else name, path, module, parent, root)


def _is_cut(calls: CallLog, place: _Place, missing: set[int]) -> bool:
    """Return whether the module did run, and nothing of it is reached: the way back is cut behind it."""
    module = _find_caller(place)
    if not calls.is_called(module):
        return False
    return all(id(p) in missing for p in module.parameters() if p.requires_grad)


def _find_caller(place: _Place) -> torch.nn.Module:
    """Return the module whose call uses a parameter: attention reads the weights of its parts without calling them."""
    return place.parent if isinstance(place.parent, torch.nn.MultiheadAttention) else place.module


def _has_reached_sibling(place: _Place, missing: set[int]) -> bool:
    """Return whether a like module in the same list is trained: an expert or a head whose turn may come."""
    branch: torch.nn.Module | None = place.root
    for part in place.path.split("."):
        if isinstance(branch, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            own = branch._modules.get(part)
            others = [each for each in branch._modules.values() if each is not None and each is not own]
            if any(id(p) not in missing for other in others for p in other.parameters() if p.requires_grad):
                return True
        branch = branch._modules.get(part) if branch is not None else None
    return False


def _find_copies(calls: CallLog, missing: set[int]) -> list[set[int]]:
    """Return the modules inside networks that follow another one from afar: target nets, momentum encoders.

    Such a network has the shapes of one that is trained, and weights that resemble its weights.
    """
    networks = [
        (path, module)
        for root in calls.roots()
        for path, module in root.named_modules()
        if path and not path.rpartition(".")[2].isdigit()
    ]
    lost = [module for _, module in networks if _is_lost(module, missing)]
    kept = [module for _, module in networks if _is_trained(module, missing)]
    found = []
    for module in lost:
        shapes = [p.shape for p in module.parameters()]
        likes = [each for each in kept if [p.shape for p in each.parameters()] == shapes]
        if any(_resemble(module, each) for each in likes):
            found.append({id(each) for each in module.modules()})
    return found


def _is_lost(module: torch.nn.Module, missing: set[int]) -> bool:
    own = [p for p in module.parameters() if p.requires_grad]
    return bool(own) and all(id(p) in missing for p in own)


def _is_trained(module: torch.nn.Module, missing: set[int]) -> bool:
    own = [p for p in module.parameters() if p.requires_grad]
    return bool(own) and not any(id(p) in missing for p in own)


def _resemble(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Return whether the weight matrices of two networks point the same way; chance does not do that."""
    with torch.no_grad():
        pairs = [
            (
                a.detach().reshape(-1)[:_MOST_ELEMENTS].double(),
                b.detach().reshape(-1)[:_MOST_ELEMENTS].double(),
            )
            for a, b in zip(one.parameters(), other.parameters(), strict=True)
            if a.dim() > 1
        ]
        cosines = [float(a @ b / (a.norm() * b.norm()).clamp_min(1e-30)) for a, b in pairs]
    return bool(cosines) and min(cosines) > _ALIKE


def _tell_places(places: list[_Place], missing: set[int]) -> dict[str, Any]:
    modules = list(dict.fromkeys(place.path or f"({type(place.root).__name__})" for place in places))
    alive = [
        place.name
        for place in places
        if any(id(p) not in missing for p in place.module.parameters() if p.requires_grad)
    ]
    return {
        "modules": modules[:_MOST_NAMES],
        "module_count": len(modules),
        "types": [type(place.module).__name__ for place in places][:_MOST_NAMES],
        "parameters": [place.name for place in places[:_MOST_NAMES]],
        "count": len(places),
        "single": alive[:_MOST_NAMES],
    }


def _tell_border(calls: CallLog, cut: list[_Place], missing: set[int]) -> dict[str, Any]:
    """Return the last module that is cut off and the first trained one that ran after it."""
    orders = [calls.called[id(place.module)] for place in cut if id(place.module) in calls.called]
    last = max(orders, key=lambda each: each.order, default=None)
    if last is None:
        return {"before": cut[-1].path, "after": "", "without_grad": False}
    later = sorted(
        (each for each in calls.called.values() if each.order > last.order), key=lambda each: each.order
    )
    after = next((each.name for each in later if _is_reached_here(each, missing)), "")
    return {"before": last.name, "after": after, "without_grad": not all(each.with_grad for each in orders)}


def _is_reached_here(called: _Called, missing: set[int]) -> bool:
    module = called.ref()
    own = [] if module is None else [p for p in module.parameters(recurse=False) if p.requires_grad]
    return bool(own) and not any(id(p) in missing for p in own)
