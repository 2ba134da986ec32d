"""The seeds of a run in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from clew.model.record import SEED_AT_START

if TYPE_CHECKING:
    from clew.model.record import RunInfo

GENERATORS: Final = ("torch", "random", "numpy")


def say_seeds(info: RunInfo) -> str | None:
    """Return which generators the script has seeded with what, and under ``clew run`` which it has not.

    What was set before ``clew.watch`` began is not known, so nothing is said of it.
    """
    seeds = info.seeds
    words = [f"{name} {seeds[name]}" for name in GENERATORS if name in seeds]
    unset = [name for name in GENERATORS if name not in seeds] if info.is_script else []
    if SEED_AT_START not in seeds:
        return None  # an older run: what it holds is no seed that the script has set
    if unset:
        words.append(f"{', '.join(unset)} not set")
    return ", ".join(words) or None
