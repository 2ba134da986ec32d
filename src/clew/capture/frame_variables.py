"""The variables of a frame, read without a trace.

Before Python 3.13 a function has one dictionary for ``locals()``, and whoever looks at its frame renews it:
what the function keeps as ``config = locals()`` would change under its hands.
"""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import CodeType, FrameType

_IS_SHARED: Final = sys.version_info < (3, 13)
_OPTIMIZED: Final = 0x1
"""Mark of a code whose variables are no dictionary."""


def is_function(frame: FrameType) -> bool:
    """Return whether the dictionary of a frame's variables is one that was made for who looks at it."""
    return bool(frame.f_code.co_flags & _OPTIMIZED)


def variables_of(frame: FrameType) -> Mapping[str, Any]:
    """Return the variables of a frame by name; none of a function that asks for ``locals()`` itself."""
    code = frame.f_code
    if _IS_SHARED and is_function(frame) and "locals" in code.co_names and _asks_for_locals(code):
        return {}
    return frame.f_locals


@lru_cache(maxsize=256)
def _asks_for_locals(code: CodeType) -> bool:
    """Return whether a function uses the builtin, and not something else of that name."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    return any(each.argval == "locals" and each.opname in loads for each in dis.get_instructions(code))
