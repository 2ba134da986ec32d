"""Lets threads that train at the same time write into one record in turns."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    _Method = TypeVar("_Method", bound=Callable[..., Any])


def take_turns(method: _Method) -> _Method:
    """Let a method of an object with a ``lock`` run in one thread at a time."""

    @functools.wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked  # type: ignore[return-value]
