"""The state of one recording: the current step, its rows and numbers, and where they go when it ends."""

from __future__ import annotations

import os
from math import inf
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.assemble import DROPPED, KIND_SHIFT, SITE_SHIFT, Latest, Layout
from clew.capture.beat import Latch
from clew.capture.clock import CLEW, StepClock, make_clock
from clew.capture.guard import Guard
from clew.capture.outlet import Outlet
from clew.capture.owner import Owner
from clew.capture.provenance import read_rank
from clew.capture.schedule import Schedule
from clew.capture.sites import SiteTable
from clew.capture.torch.flight import Flight, RootCall
from clew.capture.torch.leaves import has_meta
from clew.capture.torch.listeners import Listeners
from clew.capture.torch.memory import read_memory
from clew.capture.torch.registry import Registry
from clew.capture.torch.unheard import has_dispatch_mode
from clew.errors import UnsupportedTensor
from clew.model.record import Scalar, StepRecord, new_tuple
from clew.model.schema import KIND_INDEX
from clew.stats.readable import is_about_meta, undisturbed, unheard
from clew.stats.rows import KERNEL, CutRows, Rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.draft import Parts
    from clew.capture.settings import Settings
    from clew.model.record import Batch, Stretch
    from clew.model.sink import Sink
    from clew.stats._kernel import Tray

_STEPS_AFTER_FINDING: Final = 3
_MOST_BAD_STEPS: Final = 10
_MEMORY_SECONDS: Final = 0.1
_LONGEST_BACKLOG: Final = 128
_BACKLOG_BYTES: Final = 16 << 20
"""So many steps may wait, and recorded ones only as long as their rows take no more memory than this."""
_FIRST_STEPS: Final = 16
_SELDOM: Final = 64
_BACKLOG_SECONDS: Final = 0.5
_SAVE_SECONDS: Final = 1.0

OTHER_THREADS: Final = "several threads train at once; the first one is recorded, the others are left alone"

KIND_OUTPUT: Final = KIND_INDEX["output"] << KIND_SHIFT
KIND_INPUT: Final = KIND_INDEX["input"] << KIND_SHIFT
KIND_GRAD_OUTPUT: Final = KIND_INDEX["grad_output"] << KIND_SHIFT
KIND_PARAM: Final = KIND_INDEX["param"] << KIND_SHIFT
KIND_GRAD: Final = KIND_INDEX["grad"] << KIND_SHIFT
KIND_UPDATE: Final = KIND_INDEX["update"] << KIND_SHIFT
KIND_BUFFER: Final = KIND_INDEX["buffer"] << KIND_SHIFT
KIND_STATE: Final = KIND_INDEX["state"] << KIND_SHIFT
KIND_LOSS: Final = KIND_INDEX["loss"] << KIND_SHIFT
KIND_BATCH: Final = KIND_INDEX["batch"] << KIND_SHIFT


class Recorder(Listeners):
    """What the lenses share: is this step due, where does a row go, what happens when the step ends.

    ``serial`` grows with every step and tells counters of an earlier step apart. ``closing`` is set when an
    optimizer has stepped: the step ends with the next event that is not another optimizer's step.
    """

    def __init__(
        self,
        settings: Settings,
        sink: Sink,
        *,
        tell: Callable[[str], None],
        on_step: Callable[[Recorder, StepRecord | Stretch], None] | None = None,
    ) -> None:
        self.settings = settings
        self.sink = sink
        self._outlet = Outlet(sink, on_step)
        self.guard = Guard(tell)
        self.owner = Owner(self._tell_of_threads)
        self.schedule = Schedule(
            every=settings.every, budget=settings.budget, warmup_steps=settings.warmup_steps
        )
        self.sites = SiteTable(settings.sites)
        self.registry = Registry(self.sites)
        self.clock = make_clock()
        self.rows = Rows(hashes=settings.hashes, hists=settings.histograms)
        self.wants = {kind: kind in settings.kinds for kind in KIND_INDEX}
        self.lock = Latch()
        self.tray = self._make_tray()
        self.measure = self.measure_slowly if self.tray is None else self.tray.measure
        """Measures a tensor into the next row, given its site and tag; returns the row, -1 where it cannot be seen."""
        self.asleep = True
        self.step = 0
        self.ended = 0
        """How many steps have come to their end; what came after the last one is in the record and not counted."""
        self.was_cut_off = False
        self.rest = ""
        """What was recorded after the last step, when that is over: an ``evaluation``, or a ``step`` without an end."""
        self.serial = 0
        self.due = self.schedule.is_due(0)
        self.probing = True
        """Whether the probes look at this step: at the start of a run, and now and then later."""
        self.closing = False
        self.in_backward = 0
        self.unseen: dict[str, str] = {}
        self.flight = Flight(self)
        self.rank = read_rank()
        self.on_bad: Callable[[str, str], None] | None = None
        """Called with what is bad (loss, gradient, parameter) and its name, while the step can still be repeated."""
        self.note: Callable[[str, dict[str, Any]], None] = lambda _kind, _data: None
        """Takes something that happened in this step, as data that fits JSON; probes speak through it."""
        self.make_room_for_listeners()
        self._make_room_for_numbers()
        self.hashes = settings.hashes
        self.hists = settings.histograms
        self._bad_steps = 0
        self._memory_at = 0.0
        self.backlog: list[Parts] = []
        """Of each step what a draft is made of, which takes Python to make."""
        self.longest_backlog = self.most_recorded = _LONGEST_BACKLOG
        self.call_type, self.scalar_type, self.cut_type = RootCall, Scalar, CutRows
        self._handed_over_at = perf_counter()
        self.layout = Layout([], [])
        self.no_rows = (self.layout, None, False)
        self._pid = os.getpid()

    def _make_room_for_gates(self) -> None:
        self.nested = 0
        """How many root calls are going on by the general way, in whatever thread."""
        self.fetching = False
        """Whether a loader is about to give a batch: what it takes from other loaders is none of the training's."""
        self.updating = 0
        """How many steps of optimizers are going on, one inside another."""
        self.resumes = 0
        """The phase that goes on after the step of an optimizer."""
        self.quiet_with = -1
        """With so many optimizers the end of a pass has nothing to tell but that all is well; -1 if it may have."""
        wants = self.wants
        self.wants_loss, self.wants_batch = wants["loss"], wants["batch"]
        self.wants_param, self.wants_grad, self.wants_update = wants["param"], wants["grad"], wants["update"]
        self.wants_after = wants["update"] or wants["buffer"] or wants["state"]
        self.alone_at = -1
        """With so many parameters known, all are held by optimizers; -1 if some may not be."""

    def _make_room_for_numbers(self) -> None:
        self.keys: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.scalars: list[Scalar] = []
        self.waiting: list[tuple[str, torch.Tensor, int]] = []
        self.batches: list[Batch] = []
        self.counts: dict[tuple[int, int], int] = {}
        self.latest = Latest()
        self.latest_rows = self.latest.rows
        self.handles: list[Any] = []
        self.calls: list[RootCall] = []
        """The calls of root modules in this step that have gradients."""
        self.backward_at = -1
        """The serial of the step that had the last backward pass, -1 without any."""
        self.has_begun = False
        """Whether data was asked for or a model called: what came before is the script's start, no part of a step."""
        self.has_output = False
        """Whether a root call has ended and no backward pass has begun since."""
        self.losses = 0
        self.last_loss: float | None = None
        self.lowest_loss = (inf, -2)
        """The lowest loss so far and its step."""
        self.spent_elsewhere: Callable[[], float] = lambda: 0.0
        """Returns the seconds that clew's own threads have taken so far, which the training's clock does not see."""
        self._spent_elsewhere = 0.0
        self._make_room_for_gates()

    # ---------------------------------------------------------------- rows

    def _make_tray(self) -> Tray | None:
        """Return the short way for rows, where the kernel is in use."""
        if KERNEL is None or isinstance(self.clock, StepClock):
            return None
        tray: Tray = KERNEL.Tray(self, self.sites.shapes, self.lock, self.clock)
        rows = self.rows
        rows.on_moved = lambda: tray.aim(rows.capacity, *rows.locate())
        rows.on_moved()
        return tray

    def measure_slowly(self, tensor: torch.Tensor, site: int, tag: int) -> int:
        """Measure any tensor into the next row; the twin of the short way, and where that cannot go on."""
        with self.lock:
            keys = self.keys
            row = len(keys)
            keys.append(site << SITE_SHIFT | tag)
            try:
                self.rows.measure(tensor, row, hash=self.hashes, hist=self.hists)
            except BaseException as error:
                del keys[row:]
                if not isinstance(error, UnsupportedTensor):
                    raise
                self.note_unseen(site, error)
                return -1
            if tensor.is_nested or self.sites.shapes[site] != tensor.shape:
                self.describe(site, tensor)
            return row

    def measure_many(self, tensors: list[torch.Tensor], sites: list[int], tag: int) -> None:
        """Measure several tensors of one kind into consecutive rows."""
        self.measure_keyed(tensors, [site << SITE_SHIFT | tag for site in sites])

    def measure_keyed(self, tensors: list[torch.Tensor], keys: list[int]) -> None:
        """Measure several tensors into consecutive rows, each under its key."""
        if not tensors:
            return
        with self.lock:
            first = len(self.keys)
            left = self.tray.measure_many(tensors, keys) if self.tray is not None else None
            if left or left is None:
                self.measure_rest(tensors, keys, left, first)

    def measure_rest(
        self, tensors: list[torch.Tensor], keys: list[int], left: list[int] | None, first: int
    ) -> None:
        """Measure the tensors at some positions into the rows that they have from the first on; None: all of them."""
        if left is None:
            self._measure_all(tensors, keys)
            return
        for position in left:
            tensor, site, row = tensors[position], keys[position] >> SITE_SHIFT, first + position
            failure = self.rows.try_measure(tensor, row, hash=self.hashes, hist=self.hists)
            if failure is not None:
                self.keys[row] = DROPPED
                self.note_unseen(site, failure)
            if self.sites.shapes[site] != tensor.shape:
                self.describe(site, tensor)

    def _measure_all(self, tensors: list[torch.Tensor], keys: list[int]) -> None:
        first = len(self.keys)
        self.keys += keys
        failures = self.rows.measure_many(tensors, first, hash=self.hashes, hist=self.hists)
        if failures:
            self._drop_failures(first, [key >> SITE_SHIFT for key in keys], failures)
        shapes = self.sites.shapes
        for tensor, key in zip(tensors, keys, strict=True):
            if shapes[key >> SITE_SHIFT] != tensor.shape:
                self.describe(key >> SITE_SHIFT, tensor)

    def measure_updates(self, new: list[torch.Tensor], old: list[torch.Tensor], keys: list[int]) -> None:
        """Measure what a step did to parameters; the old values are overwritten with the new."""
        with self.lock:
            first = len(self.keys)
            self.keys += keys
            failures = self.rows.measure_updates(new, old, first_row=first, hash=self.hashes, hist=self.hists)
            if failures:
                self._drop_failures(first, [key >> SITE_SHIFT for key in keys], failures)

    def _drop_failures(
        self, first: int, sites: list[int], failures: list[tuple[int, UnsupportedTensor]]
    ) -> None:
        """A row that could not be measured stays in the buffer and is left out of the record."""
        for position, reason in failures:
            self.keys[first + position] = DROPPED
            self.note_unseen(sites[position], reason)

    def describe(self, site: int, tensor: torch.Tensor) -> None:
        """Keep the shape and dtype last seen at a site; a nested tensor has no shape."""
        shape = () if tensor.is_nested else tuple(tensor.shape)
        self.sites.describe(site, shape, str(tensor.dtype).removeprefix("torch."))

    def repeat(self, row: int, tensor: torch.Tensor, site: int, *, tag: int) -> int:
        """Give another site the numbers of an earlier row, the very same tensor, and return the earlier row."""
        with self.lock:
            if tensor.is_nested or self.sites.shapes[site] != tensor.shape:
                self.describe(site, tensor)
            self.copies.append((len(self.keys), row))
            self.keys.append(site << SITE_SHIFT | tag)
        return row

    def fault_at_gradient(self, error: Exception, key: int) -> None:
        """Answer for a fault in the short way of a gradient."""
        self.guard.fault(error, f"gradient at {key >> SITE_SHIFT}", step=self.step)

    def note_unseen(self, site: int, reason: UnsupportedTensor) -> None:
        """Keep why a site could not be measured; said in the record, never guessed."""
        self.unseen.setdefault(self.sites[site].name, reason.what)

    def count(self, site: int, tag: int) -> int:
        """Return how often a site had a record of a kind and mode in this step, and count one more."""
        seen = self.counts.get((site, tag), 0)
        self.counts[site, tag] = seen + 1
        return seen

    # ---------------------------------------------------------------- numbers

    def add_scalar(self, name: str, value: float | torch.Tensor, ordinal: int = 0) -> None:
        """Take a number of this step; one that lives on a device is fetched when the step ends."""
        if isinstance(value, torch.Tensor):
            with unheard():
                if not value.is_meta:
                    self.waiting.append((name, value.detach(), ordinal))
        else:
            self.scalars.append(Scalar(name, float(value), ordinal))

    def add_loss(self, value: torch.Tensor) -> None:
        """Take the loss of a backward root from wherever it lies."""
        with undisturbed():
            if value.is_meta:
                return
            if value.is_complex():
                self.unseen.setdefault("loss", "it is a complex number")
                return
            if value.device.type != "cpu":
                self.waiting.append(("loss", value.detach(), self.losses))
                self.losses += 1
                return
            number = value.item()
        self.take_loss(number)

    def take_loss(self, number: float) -> None:
        """Take the loss of a backward root, a number; a bad one makes this and the next steps due."""
        self.scalars.append(new_tuple(Scalar, ("loss", number, self.losses)))
        self.losses += 1
        self.last_loss = number
        if number < self.lowest_loss[0]:
            self.lowest_loss = (number, self.step)
        if number - number != 0.0:  # NaN or infinite
            self.report_bad("loss", "loss")

    def forget_losses(self, kept: int) -> None:
        """Take back all but the first losses of this step: their backward passes have raised."""
        self.scalars = [each for each in self.scalars if each.name != "loss" or each.ordinal < kept]
        self.waiting = [each for each in self.waiting if each[0] != "loss" or each[2] < kept]
        self.losses = kept

    def ask(self, probes: list[Callable[..., None]], *what: Any) -> None:
        """Call probes with what happened; one that fails is told of and never called again.

        Probes follow one loop, in the thread that trains. Where several threads train at once, perhaps one and the
        same model, reading the gradients of all while another's backward writes them would be a race: then nobody
        is asked any more.
        """
        owner = self.owner
        if owner.is_shared or (owner.thread != get_ident() and not owner.is_here()):
            return
        with unheard() if has_dispatch_mode() else torch._C.DisableTorchFunction():
            for probe in probes.copy():
                try:
                    probe(*what)
                except Exception as error:  # noqa: BLE001 - ours to answer for
                    self._excuse(probe, probes, error, what)

    def _excuse(
        self, probe: Any, probes: list[Callable[..., None]], error: Exception, what: tuple[Any, ...]
    ) -> None:
        """Answer for a probe that has failed."""
        if is_about_meta(error) or has_meta(what):
            return  # there is nothing to learn from such a model, and nothing wrong with the probe
        probes.remove(probe)
        self.guard.fault(error, f"probe {getattr(probe, '__qualname__', probe)}", step=self.step)

    def is_off(self) -> bool:
        """Return whether what happens here is not for the record: nothing is, or another thread is the one."""
        return self.asleep or (self.owner.thread != get_ident() and not self.owner.is_here())

    def _tell_of_threads(self) -> None:
        self.unseen.setdefault("other threads", OTHER_THREADS)
        self.guard.tell_once("threads", f"clew: {OTHER_THREADS}")

    def report_bad(self, kind: str, name: str) -> None:
        """Something is not finite that should be: record what follows in full, and have it explained."""
        self._bad_steps += 1
        # A training that stays bad has been seen: recording every further step in full would only cost.
        if self._bad_steps <= _MOST_BAD_STEPS:
            self.force_due()
        self.ask(self.on_trouble, kind, name)
        if self.on_bad is not None:
            self.on_bad(kind, name)

    def force_due(self) -> None:
        """Record the rest of this step and the next ones in full: something was found."""
        self.schedule.force(self.step, steps=_STEPS_AFTER_FINDING)
        self._handed_over_at = 0.0  # nothing waits on the backlog while something is wrong
        self.stay_quiet(0.0)
        self.due = True

    # ---------------------------------------------------------------- steps

    def begin(self) -> None:
        """Let the first step begin here."""
        self.has_begun = True
        self.scalars.append(Scalar("start_seconds", sum(self.clock.split()[:CLEW])))

    def before_event(self) -> None:
        """Called by whatever cannot belong to a step whose optimizer has stepped: that step ends first."""
        if not self.closing or self.end_quietly():
            return
        self.end_step()
        if self.on_end:
            self.ask(self.on_end)
        if self.on_seldom and (self.step <= _FIRST_STEPS or not self.step % _SELDOM):
            self.ask(self.on_seldom)

    def mark_end(self) -> None:
        """An optimizer has stepped: the step ends here unless another optimizer follows at once."""
        self.closing = True
        self.clock.mark()
        before = self.clock.switch(CLEW)
        try:
            self.flight.mark_end()
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self.guard.fault(error, "state of the step", step=self.step)
        self.clock.switch(before)

    def end_step(self, *, partial: bool = False) -> None:
        """Hand the record of the step over and begin the next one.

        What the step left goes on a backlog, which is worked off in one go now and then. Right after a step the caches
        are full of tensors and every line of Python is slow: a hundred steps handed over together cost a fraction of
        what they would cost one by one.
        """
        before = self.clock.switch(CLEW)
        with self.lock:
            now, phases, was_due = perf_counter(), self.clock.split(), self.due
            try:
                if self.waiting or partial or now - self._memory_at > _MEMORY_SECONDS:
                    self._settle_scalars(now, partial=partial)
                rows = self.cut_rows() if self.keys else self.no_rows
                self.backlog.append((self.step, was_due, phases, *rows, self.scalars, self.batches))
            except Exception as error:  # noqa: BLE001 - ours to answer for
                self.fail_at_end(error)
                self.backlog.append((self.step, was_due, phases, *self.no_rows, self.scalars, []))
            self.closing, self.losses, self.calls = False, 0, []
            self.keys, self.copies, self.scalars, self.batches = [], [], [], []
            self.latest.rows.clear()
            if self.counts or self.waiting or self.handles:
                self.counts, self.waiting, self.handles = {}, [], []
            try:
                waited = now - self._handed_over_at > _BACKLOG_SECONDS
                longest = self.most_recorded if was_due else self.longest_backlog
                if self.prompt or waited or len(self.backlog) >= longest:
                    self._work_off()
            finally:
                schedule = self.schedule
                if not partial:
                    schedule.account(self.step, phases[CLEW], sum(phases), was_due)
                    self.ended += 1
                self.step += 1
                self.serial += 1
                self.due = due = schedule.is_due(self.step)
                self.probing = due and schedule.is_probed(self.step)
                self._stay_quiet(now)
        self.clock.switch(before)

    def _stay_quiet(self, now: float) -> None:
        """Let steps pass by the shortest way until something is to be done that goes by time."""
        until = self._handed_over_at + _BACKLOG_SECONDS
        if self.due:
            until = min(until, self._memory_at + _MEMORY_SECONDS)
        self.stay_quiet(until - now)

    def cut_rows(self) -> tuple[Layout, CutRows, bool]:
        """Return the rows of the step, what each is, and whether some are to be merged or left out."""
        if not self.layout.fits(self.keys, self.copies):
            self.layout = Layout(self.keys, self.copies)
            step_bytes = max(len(self.keys), 1) * self.rows.row_bytes
            self.most_recorded = min(max(_BACKLOG_BYTES // step_bytes, 1), _LONGEST_BACKLOG)
        return self.layout, self.rows.cut(len(self.keys)), not self.layout.is_plain

    def _work_off(self) -> None:
        try:
            self.hand_over()
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self.fail_at_end(error)

    def fail_at_end(self, error: Exception) -> None:
        """Answer for a fault at the end of a step."""
        self.guard.fault(error, "end of step", step=self.step)

    def hand_over(self) -> None:
        """Work off the backlog: records to the sink, numbers to whoever shows them."""
        with self.lock:
            self._handed_over_at = perf_counter()
            spent, before = self.spent_elsewhere(), self._spent_elsewhere
            if self.step > self.schedule.warmup_steps:  # what the first steps cost is not counted
                self.schedule.charge(spent - before)
            self._spent_elsewhere = spent
            backlog, self.backlog = self.backlog, []
            changes = self.sites.take_changes()
            if changes:
                self.sink.add_sites(changes)
            self._outlet.give(self, backlog, self.guard.take())

    def hand_over_if_free(self) -> None:
        """Work off the backlog from another thread, unless the training thread is at it: it must not wait."""
        if not self.backlog or not self.lock.acquire(blocking=False):
            return
        try:
            self.hand_over()
        finally:
            self.lock.release()

    def _settle_scalars(self, now: float, *, partial: bool) -> None:
        for name, tensor, ordinal in self.waiting:
            with undisturbed():
                number = float(tensor.double().mean())
            self.scalars.append(Scalar(name, number, ordinal))
            if name == "loss":
                self.last_loss = self.scalars[-1].value
                self.lowest_loss = min(self.lowest_loss, (self.last_loss, self.step))
        if partial:
            self.scalars.append(Scalar("clew.partial", 1.0))
            has_begun = self.losses or (self.was_cut_off and self.calls)
            self.rest = "step" if has_begun else "evaluation"
            self.scalars.append(Scalar("clew.evaluation", float(self.rest == "evaluation")))
        if now - self._memory_at > _MEMORY_SECONDS:
            self._memory_at = now
            self.scalars += [Scalar(name, value) for name, value in read_memory().items()]
            if self.flight.snapshots is not None:
                self.scalars.append(Scalar("memory.kept", float(self.flight.snapshots.kept_bytes)))

    def finish(self) -> None:
        """Hand over what the last step left, also when it did not come to its end.

        What came after the last step, a final evaluation or a step that an exception cut off, has the number of the
        step that would have followed, and is marked: it counts as no step.
        """
        if self.closing:
            self.end_step()
        if self.keys or self.waiting or self.losses:
            self.end_step(partial=True)
        self.hand_over()

    def save(self) -> None:
        """Hand over what there is, from any thread: the process is about to end in the middle of something."""
        if not self.lock.acquire(timeout=_SAVE_SECONDS):
            return
        try:
            if self.closing:
                self.end_step()
            self.hand_over()
        finally:
            self.lock.release()

    def is_child(self) -> bool:
        """Return whether this is a forked copy: nothing in it may write."""
        return os.getpid() != self._pid
