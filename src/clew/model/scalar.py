"""The names of the numbers that clew takes of a step, and what a script's own numbers are called beside them."""

from __future__ import annotations

from typing import Final

OWN_NAMES: Final = ("loss", "lr", "grad_norm", "start_seconds")
OWN_PREFIXES: Final = (
    *("clew.", "clip.", "group.", "memory.", "nonfinite.", "scaler.", "time."),
    "log.",
)
"""Everything that a recording writes beside the statistics of tensors has one of these names or beginnings. ``log.`` is
for numbers of the script that would otherwise be taken for one of them."""


def is_own(name: str) -> bool:
    """Return whether a number of this name is clew's; ``lr[1]`` is how the second learning rate of a step is called."""
    return name.partition("[")[0] in OWN_NAMES or name.startswith(OWN_PREFIXES)


def name_logged(name: str) -> str:
    """Return the name under which a number of the script is kept, such as ``log.loss``; most keep their own."""
    return f"log.{name}" if is_own(name) else name
