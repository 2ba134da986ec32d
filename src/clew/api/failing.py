"""Joins an exception that ends a training with its examination, the run folder and the user's terminal."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from clew.store.exception import write_exception

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from clew.capture.torch.recorder import Recorder

_MARK: Final = "clew: "
_LEAST_WIDTH: Final = 30


def tell_exception(
    error: BaseException, recorder: Recorder, rank_folder: Path, *, tell: Callable[[str], None] | None
) -> dict[str, Any] | None:
    """Keep the card of an exception in the run, tell it and return it; a fault of ours is noted, not raised."""
    from clew.replay.exception import examine_exception

    try:
        card = examine_exception(error, recorder)
        if card is None:
            return None
        write_exception(rank_folder, card)
        if tell is not None:
            from clew.render.terminal import Screen, lower
            from clew.views.exception_page import make_page

            screen = Screen.of(sys.stderr)
            narrower = replace(screen, width=max(screen.width - len(_MARK), _LEAST_WIDTH))
            text = lower(make_page(card), narrower)
            tell("\n".join(f"{_MARK}{line}".rstrip() for line in text.splitlines()))
        return card
    except Exception as fault:  # noqa: BLE001 - the user's exception is what counts
        recorder.guard.fault(fault, "examining an exception", step=recorder.step)
        return None
