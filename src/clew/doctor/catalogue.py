"""The rules that there are: the families of this package, and those that other packages offer as ``clew.rules``."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final

from clew.doctor.rule import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.doctor.rule import Rule

GROUP: Final = "clew.rules"

FAMILIES: Final = (
    "inputs", "nonfinite", "activation", "progress", "update", "gradient", "timing", "ranks",
    "loop_loss", "loop_targets", "loop_gradients", "loop_coverage", "loop_modes", "loop_data", "loop_schedule",
    "loop_precision", "loop_weights", "loop_samples",
)  # fmt: skip
"""Modules of this package that register rules when they are imported, in the order of the catalogue."""

_loaded: Final[set[str]] = set()


def load_rules(tell: Callable[[str], None] | None = None) -> list[Rule]:
    """Return every rule, those of other packages included; one that cannot be loaded is told of and left out."""
    for family in FAMILIES:
        import_module(f"clew.doctor.{family}")
    for entry in entry_points(group=GROUP):
        if entry.value in _loaded:
            continue
        _loaded.add(entry.value)
        try:
            entry.load()
        except Exception as error:  # noqa: BLE001 - somebody else's package must not stop ours
            if tell is not None:
                tell(f"clew: the rules of '{entry.name}' could not be loaded: {error}")
    return list(REGISTRY.values())
