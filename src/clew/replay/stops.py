"""Where a run was asked to stop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stops:
    """Where ``clew run`` was asked to stop. ``commands`` are executed at the stops instead of asking."""

    breaks: tuple[str, ...] = ()
    shell_at_step: int | None = None
    post_mortem: bool = False
    commands: tuple[str, ...] | None = None
