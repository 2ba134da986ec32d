"""Joins an exception that ends a training with its examination, the run folder and the user's terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from clew.store.exception import write_exception

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from clew.capture.torch.recorder import Recorder


def tell_exception(
    error: BaseException, recorder: Recorder, rank_folder: Path, *, tell: Callable[[str], None] | None
) -> None:
    """Keep the card of an exception in the run and tell it; a fault of ours on the way is noted, not raised."""
    from clew.replay.exception import examine_exception

    try:
        card = examine_exception(error, recorder)
        if card is None:
            return
        write_exception(rank_folder, card)
        if tell is not None:
            from clew.render.terminal import Screen, lower
            from clew.views.exception_page import make_page

            text = lower(make_page(card), Screen.of(sys.stderr))
            tell("\n".join(f"clew: {line}".rstrip() for line in text.splitlines()))
    except Exception as fault:  # noqa: BLE001 - the user's exception is what counts
        recorder.guard.fault(fault, "examining an exception", step=recorder.step)
