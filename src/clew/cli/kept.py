"""Pages made of what a run has kept as JSON, which may be damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clew.errors import RunBroken

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.query import Run
    from clew.views.block import Page


def make_kept_page(make: Callable[[Any], Page], kept: Any, run: Run, *, name: str, next_step: str) -> Page:
    """Return the page of what was kept; ``name`` says what that is where it cannot be made."""
    try:
        return make(kept)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RunBroken(f"{name} is damaged ({error!r})", where=str(run.path), next_step=next_step) from None
