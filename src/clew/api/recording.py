"""One recording put together: provenance, run folder, capture session, status line and closing words."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clew.api.acting import choose_action
from clew.api.folder import choose_folder, close_meeting, give_back
from clew.capture import current, provenance
from clew.capture.seeds import SeedWatch
from clew.errors import ClewError
from clew.model.record import SEED_AT_START

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.api.doctor import LiveDoctor
    from clew.api.explaining import Explaining
    from clew.api.stopping import Stopping
    from clew.capture.crash import CrashWatch
    from clew.capture.ending import Ending
    from clew.capture.settings import Settings
    from clew.capture.torch.crash_worker import WorkerStacks
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.session import TorchSession
    from clew.capture.torch.snapshot import SnapshotLens
    from clew.doctor.watchpoint import Watcher
    from clew.model.finding import Finding
    from clew.model.record import RunInfo, StepRecord, Stretch
    from clew.replay.stops import Stops
    from clew.store.notes import NoteFile
    from clew.store.writer import Writer


_MOST_UNSEEN: Final = 4
"""Sites that are named of those that were not seen for one and the same reason."""


class Recording:
    """Owns a run from its folder to its last word. Heavy parts load with ``start``, when torch is there."""

    def __init__(
        self,
        settings: Settings,
        *,
        command: list[str],
        title: str,
        is_script: bool = False,
        is_module: bool = False,
        watch: int = 0,
        obstacle: str = "",
        on_hit: Callable[[Finding], None] | None = None,
        stops: Stops | None = None,
    ) -> None:
        self.settings = settings
        self._is_script = is_script
        self._is_module = is_module
        self._watch, self._obstacle = watch, obstacle
        self._command = command
        self._cwd = str(Path.cwd())
        self._watcher = self._make_watcher()
        self._stops = stops
        self._stopping: Stopping | None = None
        self._on_hit = on_hit or choose_action(settings, lambda: self.session.recorder)
        self._shown = choose_folder(settings.out, settings.name, title)
        # The script may change its working directory, and forked copies of it come through here, too.
        self.folder = self._shown.absolute()
        self._pid = os.getpid()
        self.seeds = SeedWatch()
        """Sees the seeds that the script sets."""
        self._progress: Any = None
        self._info: RunInfo | None = None
        self._writer: Writer | None = None
        self._session: TorchSession | None = None
        self._doctor: LiveDoctor | None = None
        self._status: Any = None
        self._crash: CrashWatch | None = None
        self._worker_stacks: WorkerStacks | None = None
        self._ending: Ending | None = None
        self._end_word = ""
        self.card: dict[str, Any] | None = None
        """What is known of the exception that ended the training."""
        self._snapshots: SnapshotLens | None = None
        self._explaining: Explaining | None = None

    @property
    def session(self) -> TorchSession:
        """The capture session; there is none before ``start``."""
        if self._session is None:
            raise ClewError("the recording has not started", next_step="use it inside its with block")
        return self._session

    @property
    def step(self) -> int:
        """The step that is going on, or was; 0 where nothing has been watched."""
        return self._session.step if self._session is not None else 0

    def start(self, *, models: Any = (), optimizers: Any = ()) -> None:
        """Open the run folder and begin to watch; where that fails, nothing stays switched on."""
        try:
            self._begin(models, optimizers)
        except BaseException:
            self._give_up()
            raise

    def _begin(self, models: Any, optimizers: Any) -> None:
        import torch

        from clew.api.explaining import Explaining
        from clew.api.progress import Progress
        from clew.api.snapshotting import keep_snapshots
        from clew.capture.crash import CrashWatch
        from clew.capture.ending import Ending
        from clew.capture.torch.crash_worker import WorkerStacks
        from clew.capture.torch.first_step import FirstStep
        from clew.capture.torch.session import TorchSession
        from clew.model.sink import Tee
        from clew.store.notes import NoteFile
        from clew.store.writer import Writer

        settings = {key: value for key, value in asdict(self.settings).items() if value is not None}
        info = provenance.collect(self.folder.name, self._command, settings)
        self._info = replace(
            info,
            cwd=self._cwd,
            is_script=self._is_script,
            is_module=self._is_module,
            watch=self._watch,
            obstacle=self._obstacle,
            torch=torch.__version__,
            seeds={SEED_AT_START: torch.initial_seed()},
        )
        self.seeds.start()
        self._info.hardware["threads"] = torch.get_num_threads()
        self._status = self._make_status()
        self._progress = Progress()
        self._writer = Writer(
            self.folder, self._info, quota_bytes=self.settings.quota_bytes, notice=self._tell_trouble
        )
        self._crash = CrashWatch(
            self._writer.rank_folder, hang_seconds=self.settings.hang_seconds, tell=self.tell
        )
        self._crash.start()
        self._worker_stacks = WorkerStacks(self._crash)
        self._worker_stacks.start()
        notes = NoteFile(self._writer.rank_folder, quota_bytes=self.settings.quota_bytes)
        self._doctor = self._make_doctor(notes) if self.settings.doctor or self._watcher else None
        self._session = TorchSession(
            self.settings,
            self._writer if self._doctor is None else Tee(self._writer, self._doctor),
            tell=self.tell,
            on_step=self._after_step,
            models=models,
            optimizers=optimizers,
            annex=self._doctor or notes,
            on_hit=self._on_hit,
        )
        self._writer.before_flush = self._session.recorder.hand_over_if_free
        self._writer.on_stop = functools.partial(self._stop_others, notes)
        if self._doctor is not None:
            self._doctor.guard = self._session.recorder.guard
            self._doctor.on_hit = self._session.policy.take_hit if self.settings.on_hit != "log" else None
        self._explaining = Explaining(
            self._session.recorder, self._writer.rank_folder, tell=self.tell if self._is_script else None
        )
        self._snapshots = keep_snapshots(
            self._session, self._writer.rank_folder, self.settings, tell=self.tell
        )
        self._session.recorder.spent_elsewhere = self._add_up_threads
        self._session.add_lens(FirstStep(self._session.recorder, self._take_seeds))
        self._session.start()
        self._stopping = self._make_stopping()
        self._stopping.start()
        self._ending = Ending(self._save, self._leave, tell=self._tell_end)
        self._ending.start()

    def _take_seeds(self) -> None:
        """The first step is under way, or there was none: what is seeded by now are the seeds of the run."""
        if self.seeds.is_over or self._info is None or self._writer is None:
            return
        import torch

        self.seeds.is_over = True
        seed, found = torch.initial_seed(), dict(self._info.seeds)
        # Before clew.watch the script may have seeded torch; a script under clew run cannot have.
        if seed != found[SEED_AT_START] or not self._is_script:
            found["torch"] = seed
        self._info.seeds = {**found, **self.seeds.found}
        self._writer.update_info(self._info)

    def _stop_others(self, notes: NoteFile, reason: str) -> None:
        """The record has no more room: whatever else is kept beside it stops growing, too."""
        notes.stop(reason)
        if self._snapshots is not None:
            self._snapshots.writer.stop("the recording has ended")
            self._snapshots.off = self._snapshots.off or "taken until the recording ended"

    def _add_up_threads(self) -> float:
        """Return the seconds that clew's own threads have taken."""
        writers = (self._writer, self._snapshots.writer if self._snapshots is not None else None)
        return sum(writer.cpu_seconds for writer in writers if writer is not None)

    def _give_up(self) -> None:
        """Leave everything as it was found: the recording could not begin."""
        started = (self._worker_stacks, self._crash, self._stopping)
        for thing in started:
            if thing is not None:
                with contextlib.suppress(Exception):
                    thing.stop()
        if self._session is not None:
            self._session.abandon()
            current.pop(self._session)
        self.seeds.stop()
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close("died")
        self._session = self._writer = self._crash = self._worker_stacks = self._stopping = None

    def _make_stopping(self) -> Stopping:
        from clew.api.stopping import Stopping
        from clew.replay.stops import Stops

        assert self._writer is not None  # start() has made it
        return Stopping(
            self.session.recorder,
            self._writer.rank_folder,
            self._stops or Stops(),
            tell=self.tell,
            crash=self._crash,
        )

    def _make_doctor(self, notes: NoteFile) -> LiveDoctor:
        from clew.api.doctor import LiveDoctor

        assert self._writer is not None  # start() has made both
        assert self._info is not None
        return LiveDoctor(
            self._writer.rank_folder,
            info=self._info,
            tell=self.tell,
            notes=notes,
            rules=None if self.settings.doctor else (),
            watcher=self._watcher,
        )

    def _make_watcher(self) -> Watcher | None:
        """Read the watchpoints before anything else happens: a wrong one is told, not recorded."""
        if not self.settings.watch:
            return None
        from clew.doctor.watchpoint import Watcher

        return Watcher(self.settings.watch)

    def tell(self, text: str) -> None:
        """Say something to the person who trains, on standard error."""
        if self._status is not None:
            self._status.message(text)
        else:
            print(text, file=sys.stderr)

    def _tell_trouble(self, text: str) -> None:
        self.tell("\n".join(f"clew: {line}" for line in text.splitlines()))

    def finish(self, state: str, *, exit_code: int | None = None, error: BaseException | None = None) -> None:
        """Stop watching, close the run and say where it is; a fault here is told and goes no further."""
        if os.getpid() != self._pid:
            return
        watchers = (self._ending, self._stopping, self._worker_stacks, self._crash)
        self._attempt(
            lambda: close_meeting(self.folder), *(each.stop for each in watchers if each is not None)
        )
        if self._session is None or self._writer is None or self._info is None:
            self._finish_unstarted()
            return
        try:
            if error is not None:
                self._tell_exception(error)
        except Exception as fault:  # noqa: BLE001 - the user's exception is what counts
            self._session.recorder.guard.fault(fault, "exception", step=self._session.step)
        was_quit = self._stopping is not None and self._stopping.breaker.was_quit
        session, doctor, explaining = self._session, self._doctor, self._explaining
        self._attempt(
            lambda: session.finish(was_cut_off=error is not None or was_quit),
            self._take_seeds,
            self.seeds.stop,
            lambda: self._snapshots.close() if self._snapshots is not None else None,
            lambda: doctor.close(state, exit_code) if doctor is not None else None,
            lambda: self._note_end(error),
            lambda: self._writer.close(state, exit_code) if self._writer is not None else None,
            lambda: self._status.close() if self._status is not None else None,
            lambda: explaining.explain_later(self.folder) if explaining is not None else None,
            self._say_goodbye,
        )

    def _save(self, end: str) -> Callable[[], None]:
        """Write what there is: something ends the process past Python's own end. Return what takes that back."""
        assert self._writer is not None  # start() has made both
        assert self._info is not None
        writer, info, before = self._writer, self._info, replace(self._info)
        self.session.recorder.save()
        writer.flush()
        info.notes, info.ended = [*self._closing_notes(None), f"ended by {end}"], provenance.now()
        writer.update_info(info)
        writer.flush()

        def take_back() -> None:
            info.notes, info.ended = before.notes, before.ended
            writer.update_info(info)

        return take_back

    def _tell_end(self, end: str) -> None:
        if self._is_script:
            self.tell(f"clew: {end} ends the script; recorded: {self._shown}")

    def finish_at_exit(self) -> None:
        """End what the program never ended itself: Python is about to, perhaps because of an exception."""
        self._end_word = "the end of the program: the with block of clew.watch was never left"
        error = getattr(sys, "last_value", None)
        self.finish("complete" if error is None else "died", error=error)

    def _leave(self, end: str, exit_code: int) -> None:
        """Do what is done at the end: the script leaves past Python's own, perhaps because of an exception."""
        self._end_word = end
        error = sys.exc_info()[1] if exit_code else None
        state = "complete" if self._is_script and error is None else "died"
        self.finish(state, exit_code=exit_code, error=error)

    def _attempt(self, *actions: Callable[[], object]) -> None:
        """Do what is to be done at the end, one thing after the other, whatever becomes of each."""
        for action in actions:
            try:
                action()
            except Exception as fault:  # noqa: BLE001 - the script's exit code is what counts
                self.tell(f"clew: the run could not be closed properly: {fault}")

    def _note_end(self, error: BaseException | None) -> None:
        assert self._info is not None  # start() has made both
        assert self._writer is not None
        self._writer.flush()  # what is on record is part of the notes
        self._info.notes = self._closing_notes(error)
        self._info.trained_steps = self.session.recorder.ended
        self._info.ended = provenance.now()
        self._writer.update_info(self._info)

    # ---------------------------------------------------------------- words

    def _tell_exception(self, error: BaseException) -> None:
        """Say what is known of the exception that ended the training, and keep it."""
        from clew.api.failing import tell_exception

        assert self._writer is not None  # start() has made it
        recorder = self.session.recorder
        tell = self.tell if self._is_script else None
        self.card = tell_exception(error, recorder, self._writer.rank_folder, tell=tell)
        recorder.ask(recorder.on_error, error)

    def _make_status(self) -> Any:
        from clew.render.status import StatusLine

        # Ranks share a terminal: one of them shows the line.
        is_wanted = self.settings.status and self._is_script and provenance.read_rank() == 0
        return StatusLine(sys.stderr, enabled=is_wanted, follows=self._is_script)

    def _after_step(self, recorder: Recorder, record: StepRecord | Stretch) -> None:
        self._progress.take(recorder, record)
        if self._crash is not None:
            self._crash.end_step()
        if self._status is not None and self._status.is_due:
            self._status.update(**self._progress.shown())

    def _closing_notes(self, error: BaseException | None) -> list[str]:
        recorder = self.session.recorder
        schedule = recorder.schedule
        notes = _tell_unseen(recorder.unseen)
        notes += recorder.sites.tell_unmatched() + self.session.policy.tell_all()
        is_short = self._writer is not None and bool(self._writer.stopped)  # which is told for itself
        notes += self._snapshots.describe() if self._snapshots is not None and not is_short else []
        if schedule.thinned and not is_short:
            full, why = self._count_full()
            total = schedule.recorded + schedule.thinned
            notes += [f"thinned: {full} of {total} steps recorded in full ({why})"] if full else []
        if self._end_word:
            notes.append(f"ended by {self._end_word}")
        if error is not None:
            from clew.replay.exception_hint import read_message

            message = read_message(error)
            notes.append(f"ended by {type(error).__name__}" + (f": {message}" if message else ""))
        return notes

    def _tell_stop(self) -> list[str]:
        """Say why the record is shorter than the training, if it is."""
        reason = (self._writer.stopped or self._writer.limited) if self._writer is not None else ""
        return [f"recording stopped early: {reason}"] if reason else []

    def _count_full(self) -> tuple[int, str]:
        """Return how many steps were recorded in full, and what decided that."""
        schedule, writer = self.session.recorder.schedule, self._writer
        if writer is not None and (writer.limited or writer.stopped):
            return writer.summary.full, "quota"
        how = f"budget {self.settings.budget:.0%}" if schedule.every is None else f"every {schedule.every}"
        return min(self._progress.measured, self.session.recorder.ended), how

    def _say_goodbye(self) -> None:
        if not self._is_script:
            return
        from clew.render.summary import format_summary
        from clew.store.layout import folder_bytes
        from clew.views.diagnosis_page import summarise

        recorder = self.session.recorder
        diagnosis = self._doctor.diagnosis if self._doctor is not None else None
        words = format_summary(
            self._shown,
            steps=recorder.ended,
            rest=recorder.rest,
            kept_steps=self._writer.summary.steps
            if self._writer is not None and self._writer.stopped
            else None,
            recorded_steps=self._count_full()[0],
            loss=recorder.last_loss,
            worst_site=self._progress.worst,
            cost_share=self._progress.cost_share,
            size_bytes=folder_bytes(self.folder),
            faults=recorder.guard.total,
            remarks=[*self._tell_stop(), *recorder.sites.tell_unmatched(), *self.session.policy.tell_all()],
            findings=summarise(diagnosis.findings) if diagnosis is not None else (),
        )
        self.tell(words)

    def _finish_unstarted(self) -> None:
        self.seeds.stop()
        give_back(self.folder)
        if self._is_script and "torch" not in sys.modules:
            self.tell("clew: the script never imported torch; nothing was recorded")


def _tell_unseen(unseen: dict[str, str]) -> list[str]:
    """Return a note for each reason: the layers of a model may all be of a kind that cannot be seen."""
    sites: dict[str, list[str]] = {}
    for site, why in unseen.items():
        sites.setdefault(why, []).append(site)
    notes = []
    for why, names in sites.items():
        more = [f"{len(names) - _MOST_UNSEEN} more"] if len(names) > _MOST_UNSEEN else []
        notes.append(f"not seen: {', '.join([*names[:_MOST_UNSEEN], *more])}: {why}")
    return notes
