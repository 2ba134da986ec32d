"""The probes that look at the loop itself, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

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
    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.saved import SavedRegions


class Lens(Protocol):
    """Something that looks while a recording goes on."""

    def install(self, patches: Patches) -> None:
        """Begin to look; ``patches`` takes everything back."""


def make_loop_probes(recorder: Recorder, optimizers: OptimizerLens, saved: SavedRegions) -> tuple[Lens, ...]:
    """Return the probes of the loop, in the order they are switched on."""
    events = LoopEvents(recorder)
    modes = ModeProbe(recorder, events)
    return (
        events,
        GradientProbe(recorder, events),
        CoverageProbe(recorder, events, optimizers),
        LossProbe(recorder, saved, optimizers),
        modes,
        CallProbe(recorder, events, modes),
        DataProbe(recorder, events, saved),
        OverlapProbe(recorder, events),
        WorkerProbe(recorder, events),
        ScheduleProbe(recorder, events),
        RepeatProbe(recorder, events),
        PrecisionProbe(recorder, events),
        WeightProbe(recorder, events, optimizers),
        CheckpointProbe(recorder, events),
        AgainProbe(recorder, events, saved),
        ErrorProbe(recorder),
    )
