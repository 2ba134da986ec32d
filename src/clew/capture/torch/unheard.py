"""Keeps what clew asks about tensors from the user's own torch-function modes, which hear every question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from clew.capture.torch.patches import step_aside

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")

is_heard: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
"""Return whether a torch-function mode of this thread listens; a default device is one, too."""

has_dispatch_mode: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return how many modes of this thread hear of every operation that is carried out."""


@step_aside
def ask_unheard(function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Call a function of ours so that no mode hears it."""
    with torch._C.DisableTorchFunction():
        return function(*args, **kwargs)


def let_hear(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return a function of the user's for a call inside ``ask_unheard``: the modes hear it as ever."""
    if not torch._C._is_torch_function_enabled():
        return function  # the user has switched off what subclasses hear, and that would come on again

    @step_aside
    def heard(*args: Any, **kwargs: Any) -> _Result:
        with torch._C._EnableTorchFunction():
            return function(*args, **kwargs)

    return heard
