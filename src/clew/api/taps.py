"""Taps in the user's code: print, check or tap a value in flight.

``CLEW_CHECKS=0`` in the environment switches all of them off when they are first used: they become functions that
return their value and load nothing, not even torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from clew.capture.settings import parse_switch
from clew.errors import MissingExtra, UsageError

__all__ = ["check", "checks", "dump", "on", "print", "tap"]

SWITCH: Final = "CLEW_CHECKS"


def is_switched_on() -> bool:
    """Return whether taps do anything in this process."""
    try:
        return parse_switch(os.environ.get(SWITCH, "1"))
    except UsageError as error:
        raise UsageError(f"{SWITCH}: {error.what}", where="environment", next_step="write 0 or 1") from None


if TYPE_CHECKING or is_switched_on():
    try:
        from clew.capture.torch import check
        from clew.capture.torch.check_sites import checks
        from clew.capture.torch.taps import print_value as print
        from clew.capture.torch.taps import tap
        from clew.capture.torch.taps_dump import dump
        from clew.capture.torch.taps_on import on
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("taps need torch", next_step="pip install torch") from None
else:
    from clew.capture.torch import check_off as check
    from clew.capture.torch.check_off import checks, dump, on, tap
    from clew.capture.torch.check_off import print_value as print
