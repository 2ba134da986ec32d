"""What steps beside the optimizers and has a state of its own: learning-rate schedules and gradient scalers."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.patches import Patches


_APART: Final = (
    lr_scheduler.ReduceLROnPlateau,
    lr_scheduler.SequentialLR,
    lr_scheduler.ChainedScheduler,
)
"""Schedules that do not call the constructor of the others."""


class Companions:
    """Learns of schedulers when they are made and of scalers when they step; holds on to none of them."""

    def __init__(self) -> None:
        self._schedulers: list[weakref.ref[Any]] = []
        self._scalers: list[weakref.ref[Any]] = []

    def install(self, patches: Patches) -> None:
        """Begin to see them; the schedulers that are there already are found in memory."""
        self._schedulers = [weakref.ref(thing) for thing in gc.get_objects() if _is_scheduler(thing)]
        for kind in (LRScheduler, *_APART):
            patches.replace(kind, "__init__", self._make_scheduler)
        patches.replace(torch.amp.GradScaler, "step", self._make_scaler_step)

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers that are there, in the order they were made."""
        return _living(self._schedulers)

    @property
    def scalers(self) -> list[Any]:
        """The scalers that are there, in the order of their first steps."""
        return _living(self._scalers)

    def _make_scheduler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(scheduler: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(scheduler, *args, **kwargs)
            self._schedulers.append(weakref.ref(scheduler))

        return __init__

    def _make_scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if all(known() is not scaler for known in self._scalers):
                self._scalers.append(weakref.ref(scaler))
            return original(scaler, *args, **kwargs)

        return step


def _is_scheduler(thing: object) -> bool:
    # type(), not isinstance: a proxy may answer for its target, and loading that would be our doing.
    return issubclass(type(thing), LRScheduler)


def _living(references: list[weakref.ref[Any]]) -> list[Any]:
    return [thing for thing in (reference() for reference in references) if thing is not None]
