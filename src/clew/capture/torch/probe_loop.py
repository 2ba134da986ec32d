"""The probes that look at the loop itself, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from clew.capture.torch.probe_again import AgainProbe
from clew.capture.torch.probe_ascent import AscentProbe
from clew.capture.torch.probe_calls import CallProbe
from clew.capture.torch.probe_checkpoint import CheckpointProbe
from clew.capture.torch.probe_coverage import CoverageProbe
from clew.capture.torch.probe_data import DataProbe
from clew.capture.torch.probe_discarded import DiscardProbe
from clew.capture.torch.probe_error import ErrorProbe
from clew.capture.torch.probe_evaluation import EvaluationProbe
from clew.capture.torch.probe_events import LoopEvents
from clew.capture.torch.probe_given import GivenProbe
from clew.capture.torch.probe_gradients import GradientProbe
from clew.capture.torch.probe_loss import LossProbe
from clew.capture.torch.probe_modes import ModeProbe
from clew.capture.torch.probe_overlap import OverlapProbe
from clew.capture.torch.probe_precision import PrecisionProbe
from clew.capture.torch.probe_raw import RawProbe
from clew.capture.torch.probe_repeats import RepeatProbe
from clew.capture.torch.probe_rest import Rest
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
    events = LoopEvents(recorder, optimizers)
    modes = ModeProbe(recorder, events)
    structure: tuple[Lens, ...] = (
        GradientProbe(recorder, events),
        DiscardProbe(recorder, events),
        LossProbe(recorder, saved, optimizers),
        CallProbe(recorder, events, modes),
        DataProbe(recorder, events, saved),
        WorkerProbe(recorder, events),
        RepeatProbe(recorder, events),
        PrecisionProbe(recorder, events),
        WeightProbe(recorder, events, optimizers),
        RawProbe(recorder, events, optimizers),
        GivenProbe(recorder),
    )
    others: tuple[Lens, ...] = (
        modes,
        EvaluationProbe(recorder),
        CoverageProbe(recorder, events, optimizers),
        OverlapProbe(recorder, events),
        ScheduleProbe(recorder, events),
        CheckpointProbe(recorder, events),
    )
    return (
        events,
        *others,
        *structure,
        AgainProbe(recorder, events, saved),
        AscentProbe(recorder, events, optimizers),
        ErrorProbe(recorder),
        Rest(recorder, events, optimizers, structure=structure, others=others),
    )
