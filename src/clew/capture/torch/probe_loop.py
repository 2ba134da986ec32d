"""The probes that look at the loop itself, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from clew.capture.torch.probe_again import AgainProbe
from clew.capture.torch.probe_calls import CallProbe
from clew.capture.torch.probe_checkpoint import CheckpointProbe
from clew.capture.torch.probe_coverage import CoverageProbe
from clew.capture.torch.probe_data import DataProbe
from clew.capture.torch.probe_error import ErrorProbe
from clew.capture.torch.probe_events import LoopEvents
from clew.capture.torch.probe_gradients import GradientProbe
from clew.capture.torch.probe_loss import LossProbe
from clew.capture.torch.probe_modes import ModeProbe
from clew.capture.torch.probe_overlap import OverlapProbe
from clew.capture.torch.probe_precision import PrecisionProbe
from clew.capture.torch.probe_repeats import RepeatProbe
from clew.capture.torch.probe_schedule import ScheduleProbe
from clew.capture.torch.probe_weights import WeightProbe
from clew.capture.torch.probe_workers import WorkerProbe

if TYPE_CHECKING:
    import torch

    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.saved import SavedRegions


_LOOP_STEPS: Final = 300
"""Steps after which the structure of a loop has been seen."""


class Lens(Protocol):
    """Something that looks while a recording goes on."""

    def install(self, patches: Patches) -> None:
        """Begin to look; ``patches`` takes everything back."""


class Rest:
    """Lets the probes of a loop's structure rest once they have seen enough of it: it does not change later."""

    def __init__(self, recorder: Recorder, events: LoopEvents, probes: tuple[Lens, ...]) -> None:
        self.recorder = recorder
        self.events = events
        self._probes = probes
        self._patches: Patches | None = None

    def install(self, patches: Patches) -> None:
        """Begin to count."""
        self._patches = patches
        patches.listen(self.events.on_stepped, self._see_stepped)

    def _see_stepped(self, _optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        if self.recorder.step >= _LOOP_STEPS and self._patches is not None:
            self._patches.hush((*self._probes, self))


def make_loop_probes(recorder: Recorder, optimizers: OptimizerLens, saved: SavedRegions) -> tuple[Lens, ...]:
    """Return the probes of the loop, in the order they are switched on."""
    events = LoopEvents(recorder)
    modes = ModeProbe(recorder, events)
    structure: tuple[Lens, ...] = (
        GradientProbe(recorder, events),
        LossProbe(recorder, saved, optimizers),
        CallProbe(recorder, events, modes),
        DataProbe(recorder, events, saved),
        WorkerProbe(recorder, events),
        RepeatProbe(recorder, events),
        PrecisionProbe(recorder, events),
        WeightProbe(recorder, events, optimizers),
    )
    return (
        events,
        modes,
        *structure,
        Rest(recorder, events, structure),
        CoverageProbe(recorder, events, optimizers),
        OverlapProbe(recorder, events),
        ScheduleProbe(recorder, events),
        CheckpointProbe(recorder, events),
        AgainProbe(recorder, events, saved),
        ErrorProbe(recorder),
    )
