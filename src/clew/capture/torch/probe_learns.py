"""Whether a module has parameters at all, remembered: torch walks the whole module to answer."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_known: Final[dict[int, weakref.ref[torch.nn.Module]]] = {}


def has_parameters(module: torch.nn.Module) -> bool:
    """Return whether a module has parameters, unlike a criterion; one that has does not lose them."""
    key = id(module)
    known = _known.get(key)
    if known is not None and known() is module:
        return True
    if next(module.parameters(), None) is None:
        return False
    _known[key] = weakref.ref(module, lambda _: _known.pop(key, None))
    return True
