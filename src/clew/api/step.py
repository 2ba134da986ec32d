"""``@clew.step``: tells clew which function is one step of the training."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from clew.capture import current

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = TypeVar("Step", bound=Callable[..., Any])


def step(function: Step) -> Step:
    """Mark a function as one step: forward, backward and optimizer, everything from its arguments.

    A bad step is then executed again by calling this function with the same arguments, which is exact whatever the loop
    around it looks like. Without a recording the mark does nothing.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = getattr(current.active(), "recorder", None)
        if recorder is None or recorder.is_off():
            return function(*args, **kwargs)
        flight = recorder.flight
        outer = flight.step_call
        flight.begin_call(lambda: function(*args, **kwargs))
        try:
            return function(*args, **kwargs)
        finally:
            flight.step_call = outer

    return call  # type: ignore[return-value]
