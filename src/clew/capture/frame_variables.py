"""The variables of a frame, read without a trace.

Before Python 3.13 a function has one dictionary for ``locals()``, and whoever looks at its frame renews it:
what the function keeps as ``config = locals()`` would change under its hands.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

_IS_SHARED: Final = sys.version_info < (3, 13)
_OPTIMIZED: Final = 0x1
"""Mark of a code whose variables are no dictionary."""


def is_function(frame: FrameType) -> bool:
    """Return whether the dictionary of a frame's variables is one that was made for who looks at it."""
    return bool(frame.f_code.co_flags & _OPTIMIZED)


def variables_of(frame: FrameType) -> Mapping[str, Any]:
    """Return the variables of a frame by name; none of a function that asks for ``locals()`` itself."""
    if _IS_SHARED and is_function(frame) and "locals" in frame.f_code.co_names:
        return {}
    return frame.f_locals
