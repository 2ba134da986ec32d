"""Notes learning-rate schedules that step at the wrong moment or in the wrong unit."""

from __future__ import annotations

import functools
import math
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.probe_events import find_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

_FEWEST_STEPS: Final = 10
_MOST_STEPS: Final = 12
_MEANT_FOR_STEPS: Final = ("OneCycleLR", "CyclicLR", "ReduceLROnPlateau", "LinearLR", "ConstantLR")
"""Schedules made for steps, for numbers, or that only warm up."""


class _Followed:
    """One schedule: its steps against those of its optimizer."""

    def __init__(self, scheduler: Any, forget: Callable[[object], object]) -> None:
        self.ref = weakref.ref(scheduler, forget)
        self.steps = 0
        self.before_first = 0
        self.optimizer_steps = 0
        self.batches = 0
        self.length = 0
        self.highest = 0.0
        self.source = ""
        self.is_done = False
        self.is_early_told = False
        self.takes_arguments = False


class ScheduleProbe:
    """Counts the steps of every schedule, those of its optimizer, and the batches in between."""

    def __init__(self, recorder: Recorder, events: LoopEvents) -> None:
        self.recorder = recorder
        self.events = events
        self._followed: dict[int, _Followed] = {}
        self._tried: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._lengths: dict[int, int] = {}
        self._newest = 0
        self._fetched = 0
        self._is_starting = 0

    def install(self, patches: Patches) -> None:
        """Begin to see schedules."""
        schedulers = torch.optim.lr_scheduler
        for kind in vars(schedulers).values():
            if isinstance(kind, type) and issubclass(kind, schedulers.LRScheduler) and "step" in vars(kind):
                patches.replace(kind, "step", self._make_step)
        patches.replace(schedulers.LRScheduler, "_initial_step", self._make_initial)
        patches.listen(self.events.on_loader, self._see_loader)
        patches.listen(self.recorder.on_batch, self._see_batch)
        patches.listen(self.events.on_stepping, self._see_stepping)
        patches.listen(self.events.on_scaler_step, self._see_scaler)
        self.recorder.note("probe", {"probe": "schedule"})

    def is_settled(self) -> bool:
        """Return whether no schedule has stepped; this hears of one that does."""
        return not self._followed

    # ---------------------------------------------------------------- what happens

    def _make_initial(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _initial_step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            self._is_starting += 1
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._is_starting -= 1

        return _initial_step

    def _make_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        told = [self._see_step]

        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            starting, self._is_starting = self._is_starting, self._is_starting + 1
            try:
                result = original(scheduler, *args, **kwargs)
            finally:
                self._is_starting = starting
            if not starting:  # neither the constructor's own step nor one inside another schedule
                self.events.tell(told, scheduler, bool(args or kwargs))
            return result

        return step

    def _see_loader(self, loader: Any, iterator: Any) -> None:
        try:
            self._lengths[id(iterator)] = len(loader)
        except TypeError:  # an iterable data set does not know
            return
        while len(self._lengths) > 8:
            self._lengths.pop(next(iter(self._lengths)))

    def _see_batch(self, iterator: Any, _batch: Any) -> None:
        self._newest = self._lengths.get(id(iterator), 0)
        self._fetched += torch.is_grad_enabled()

    def _see_scaler(self, _scaler: Any, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        if begins:
            self._tried.add(optimizer)

    def _see_stepping(self, optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        is_first = optimizer not in self._tried
        if is_first:
            self._tried.add(optimizer)
        for each in self._followed.values():
            scheduler = each.ref()
            if scheduler is None or getattr(scheduler, "optimizer", None) is not optimizer:
                continue
            each.optimizer_steps += 1
            each.length = max(each.length, self._newest)
            # Several steps in a row before the training put a schedule where an earlier run had left it.
            if is_first and each.before_first == 1:
                self.recorder.note(
                    "early-schedule",
                    {
                        "scheduler": type(scheduler).__name__,
                        **self.events.know(optimizer).tell(),
                        "source": each.source,
                    },
                )

    # ---------------------------------------------------------------- what it means

    def _see_step(self, scheduler: Any, has_arguments: bool) -> None:
        each = self._find(scheduler)
        each.steps += 1
        each.takes_arguments = each.takes_arguments or has_arguments
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None:
            return
        if each.steps == 1:
            each.source = find_line()
            each.batches = self._fetched
        # Torch notes by itself that an optimizer has stepped; this may have rested.
        if optimizer not in self._tried and not getattr(optimizer, "_opt_called", False):
            each.before_first += 1
        if not each.is_done:
            self._judge_unit(each, scheduler, optimizer)

    def _judge_unit(self, each: _Followed, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        """A schedule that is counted in epochs and stepped with every batch is over long before the epoch is."""
        rate = max(group["lr"] for group in optimizer.param_groups)
        each.highest = max(each.highest, float(rate), *map(float, getattr(scheduler, "base_lrs", [0.0])))
        if each.steps < _FEWEST_STEPS or not each.length:
            return
        if each.steps == _FEWEST_STEPS and each.optimizer_steps > _MOST_STEPS:
            each.is_done = True
        if each.takes_arguments or type(scheduler).__name__ in _MEANT_FOR_STEPS:
            each.is_done = True
        if each.is_done:
            return
        # With accumulation an epoch has fewer steps than batches.
        share = max(1, round((self._fetched - each.batches) / max(each.steps - 1, 1)))
        half = each.length / share / 2
        period = _find_period(scheduler, half)
        is_over = each.steps <= half and rate <= 0.1 * each.highest
        if period is not None or is_over:
            self._tell_unit(each, scheduler, period if period is not None else each.steps, share)
        each.is_done = each.is_done or each.steps > half

    def _tell_unit(self, each: _Followed, scheduler: Any, period: int, share: int) -> None:
        each.is_done = True
        self.recorder.note(
            "schedule-per-batch",
            {
                "scheduler": type(scheduler).__name__,
                "schedule_steps": each.steps,
                "optimizer_steps": each.optimizer_steps,
                "period": period,
                "steps_per_epoch": each.length // share,
                "source": each.source,
            },
        )

    def _find(self, scheduler: Any) -> _Followed:
        key = id(scheduler)
        found = self._followed.get(key)
        if found is None:
            table = self._followed
            found = table[key] = _Followed(scheduler, lambda _: table.pop(key, None))
        return found


def _find_period(scheduler: Any, half: float) -> int | None:
    """Return the steps after which a schedule has run its course or lost much of its rate, if within half an epoch."""
    name, gamma = type(scheduler).__name__, float(getattr(scheduler, "gamma", 1.0) or 1.0)
    if name in ("CosineAnnealingLR", "CosineAnnealingWarmRestarts", "PolynomialLR"):
        period = next(
            (
                getattr(scheduler, each)
                for each in ("T_max", "T_0", "total_iters")
                if hasattr(scheduler, each)
            ),
            0,
        )
        return int(period) if 0 < period <= half else None
    if name == "StepLR":
        falls = half // max(scheduler.step_size, 1)
        return int(scheduler.step_size) if falls >= 1 and gamma**falls < 0.7 else None
    if name == "MultiStepLR":
        places = list(scheduler.milestones.elements())
        is_short = bool(places) and max(places) <= half and gamma ** len(places) < 0.7
        return int(max(places)) if is_short else None
    if name == "ExponentialLR":
        return math.ceil(math.log(0.1) / math.log(gamma)) if 0 < gamma < 1 and gamma**half < 0.1 else None
    return None
