"""One recording of a PyTorch training: the lenses put together, switched on and off as one."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from clew.capture import current
from clew.capture.torch.backward import BackwardLens
from clew.capture.torch.batches import BatchLens
from clew.capture.torch.forward import ForwardLens
from clew.capture.torch.logged import read_numbers
from clew.capture.torch.optimizers import OptimizerLens
from clew.capture.torch.patches import Patches
from clew.capture.torch.policy import Policy
from clew.capture.torch.probe_loop import Lens, make_loop_probes
from clew.capture.torch.probe_objective import ObjectiveProbe
from clew.capture.torch.probe_stats import StatsProbe
from clew.capture.torch.recorder import Recorder
from clew.capture.torch.roots import Roots
from clew.capture.torch.saved import SavedRegions
from clew.capture.torch.scaling import ScalingLens
from clew.capture.torch.uncompiled import Uncompiled
from clew.model.scalar import name_logged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from clew.capture.settings import Settings
    from clew.model.finding import Finding
    from clew.model.record import StepRecord, Stretch
    from clew.model.sink import Annex, Sink

_living: weakref.WeakSet[TorchSession] = weakref.WeakSet()


class TorchSession:
    """Watches the models it is given, or every model that is called; nothing of it remains after ``finish``."""

    def __init__(
        self,
        settings: Settings,
        sink: Sink,
        *,
        tell: Callable[[str], None],
        on_step: Callable[[Recorder, StepRecord | Stretch], None] | None = None,
        models: Iterable[tuple[str, torch.nn.Module]] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
        annex: Annex | None = None,
        on_hit: Callable[[Finding], None] | None = None,
    ) -> None:
        self._annex = annex
        self._tell = tell
        self._renamed: set[str] = set()
        self.recorder = Recorder(settings, sink, tell=tell, on_step=on_step)
        self.recorder.note = self.note
        self.optimizers = OptimizerLens(self.recorder)
        batches = BatchLens(self.recorder)
        self._roots = roots = batches.roots = Roots(self.recorder, self.optimizers, batches)
        self.optimizers.discover = roots.discover_holders
        saved = SavedRegions(self.recorder)
        self._lenses: tuple[Lens, ...] = (
            self.optimizers,
            ForwardLens(self.recorder, roots),
            BackwardLens(self.recorder, roots, self.optimizers),
            ScalingLens(self.recorder, self.optimizers),
            batches,
            saved,
            Uncompiled(self.recorder),
            StatsProbe(self.recorder),
            ObjectiveProbe(self.recorder, saved),
            *make_loop_probes(self.recorder, self.optimizers, saved),
        )
        self.policy = Policy(self.recorder, self.optimizers, settings=settings, tell=tell, act=on_hit)
        if self.policy.is_wanted:
            self._lenses = (*self._lenses, self.policy)
        self._patches = Patches()
        given = list(models)
        if given:
            roots.watch(given)
        for optimizer in optimizers:
            self.optimizers.add(optimizer)
        self.optimizers.find_existing()

    @property
    def step(self) -> int:
        """The step that is going on, counted from 0."""
        return self.recorder.step

    def add_lens(self, lens: Lens) -> None:
        """Take another lens, which goes on and off with the others; before ``start`` only."""
        self._lenses = (*self._lenses, lens)

    @property
    def is_watching(self) -> bool:
        """Whether the lenses are on."""
        return not self.recorder.asleep

    def start(self) -> None:
        """Switch the lenses on, or none of them where one fails."""
        self.recorder.rows.threads = torch.get_num_threads()
        for other in list(_living):
            if other is not self:
                other._patches.uncover()  # what stands on top of its gates would hide them from the compiler
        try:
            for lens in self._lenses:
                lens.install(self._patches)
            self.recorder.clock.restart()
            self.recorder.flight.mark_start()
        except BaseException:
            self._patches.undo()
            raise
        self.recorder.asleep = False
        current.push(self)
        _living.add(self)

    def pause(self) -> None:
        """Switch the lenses off; the step that was going on ends if its optimizer has stepped."""
        if self.recorder.asleep:
            return
        self.recorder.before_event()
        self.recorder.hand_over()
        self._switch_off()

    def resume(self) -> None:
        """Switch the lenses on again after ``pause``."""
        if self.recorder.asleep:
            self.start()

    def finish(self, *, was_cut_off: bool = False) -> None:
        """Hand over the last step, which an exception may have cut off, and leave torch as it was found."""
        self.recorder.was_cut_off = was_cut_off
        if not self.recorder.asleep:
            if not self.recorder.closing:
                self._roots.end_last_step()
            self._switch_off()
        self.recorder.finish()
        self.policy.act_last()

    def end_manual_step(self) -> None:
        """End the step of a loop that has written its weights by hand: the next one is about to begin."""
        self._roots.end_manual_step()

    def abandon(self) -> None:
        """Leave torch as it was found and write nothing: this is a forked copy of the process."""
        self._patches.undo()
        self.recorder.asleep = True

    def log(self, **numbers: Any) -> None:
        """Take numbers of this step, by name; one whose name is clew's own is kept as ``log.NAME``, which is told."""
        found = read_numbers(numbers)
        renamed = [name for name in found if name_logged(name) != name and name not in self._renamed]
        if renamed:
            self._renamed.update(renamed)
            listed = ", ".join(f"{name} as {name_logged(name)}" for name in renamed)
            self._tell(f"clew: run.log keeps {listed}: clew records numbers of its own by that name")
        for name, value in found.items():
            self.recorder.add_scalar(name_logged(name), value)

    def _switch_off(self) -> None:
        self.recorder.asleep = True
        current.pop(self)
        for handle in self.recorder.handles:
            handle.remove()
        self.recorder.handles = []
        self._patches.undo()

    def note(self, kind: str, data: dict[str, Any]) -> None:
        """Take something that happened in this step, as data that fits JSON."""
        if self._annex is not None:
            self._annex.add_note(self.step, kind, data)

    def add_media(self, name: str, data: bytes, suffix: str) -> None:
        """Take a picture or another file of this step."""
        if self._annex is not None:
            self._annex.add_media(self.step, name, data, suffix)


def _abandon_all() -> None:
    for session in list(_living):
        session.abandon()


if hasattr(os, "register_at_fork"):
    # A loader's worker is a copy of this process, patches included: it must neither record nor write.
    os.register_at_fork(after_in_child=_abandon_all)
