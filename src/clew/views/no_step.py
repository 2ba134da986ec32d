"""What to say of a recording in which nothing was called; ``clew run`` and ``clew show`` say the same."""

from __future__ import annotations

from typing import Final

NO_STEP: Final = (
    "no model was called in this process; where others train, start clew in them: "
    "torchrun … -m clew run train.py, or clew.watch in the function that is spawned"
)
