"""The doctor put to work: beside a recording while it goes on, and on a stored run."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from clew.doctor.case import Case
from clew.doctor.engine import Doctor, Looks, fold
from clew.doctor.watchpoint import add_hits
from clew.store.findings import append_findings, write_findings
from clew.store.verdicts import read_verdicts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from clew.capture.guard import Guard
    from clew.doctor.rule import Rule
    from clew.doctor.watchpoint import Watcher
    from clew.model.finding import Diagnosis, Finding
    from clew.model.record import RunInfo, Site, StepRecord, Stretch
    from clew.query import Run
    from clew.store.notes import NoteFile

_SHARE: Final = 0.02
_LATE: Final = 1000
_LATE_SHARE: Final = 0.001
"""Part of the run's time that looking may take; a look that would cost more waits until the run has paid for it. After
so many steps, when little is new any more, it is less."""


def diagnose(run: Run | str | Path, *, watch: str | Iterable[str] = ()) -> Diagnosis:
    """Return what the doctor says about a run: findings with the cause first, what was checked, what was not.

    ``run``: an open run, or its path or name. ``watch``: watchpoints, whose hits come after the rules' findings.
    """
    from clew.api.read import open_run
    from clew.doctor.stored import diagnose as diagnose_stored

    opened = open_run(run) if isinstance(run, (str, Path)) else run
    return diagnose_stored(opened, watch=[watch] if isinstance(watch, str) else watch)


class LiveDoctor:
    """A sink and an annex that feeds a case, lets the rules look now and then, and tells what is new, once."""

    def __init__(
        self,
        rank_folder: Path,
        *,
        info: RunInfo,
        tell: Callable[[str], None],
        notes: NoteFile,
        rules: Sequence[Rule] | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._folder = rank_folder
        self._tell = tell
        self._notes = notes
        self._watcher = watcher
        self.on_hit: Callable[[Finding], None] | None = None
        self.case = Case(rank=info.rank, info=info)
        self.doctor = Doctor(rules, on_fault=self._report_fault)
        self.guard: Guard | None = None
        self.diagnosis: Diagnosis | None = None
        self._told: set[tuple[str, str]] = set()
        self._is_off = False
        self._is_due = False
        self._looks = Looks()
        self._waiting: deque[dict[str, Any]] = deque()
        self._unwritten: deque[dict[str, Any]] = deque()
        self._started = perf_counter()
        self._looking = self._last_look = self._looked_at = 0.0
        self._was_alarmed = False

    # ---------------------------------------------------------------- what comes in

    def add_sites(self, sites: Iterable[Site]) -> None:
        """Take new sites."""
        self.case.add_sites(sites)

    def put(self, record: StepRecord) -> None:
        """Take a step, and look when it is time; a fault in here ends the doctor, never the training."""
        try:
            self._take_notes(record.step)
            if self._is_off:
                return
            self.case.add(record)
            if self._watcher is not None:
                self._watch(self._watcher, record)
            self._is_due = self._looks.is_due(self.case, record) or self._is_due
            self._look_if_due()
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._switch_off(error)

    @property
    def takes_stretches(self) -> bool:
        """Whether many steps can come at once: nobody watches each of them."""
        return self._watcher is None

    def put_stretch(self, stretch: Stretch) -> None:
        """Take steps in a row, and look when it is time."""
        try:
            for piece in self._looks.cut(self.case, stretch):
                self._take_notes(piece.last)
                if self._is_off:
                    return
                self.case.add_stretch(piece)
                self._is_due = self._looks.is_due_after(self.case, piece) or self._is_due
                self._look_if_due()
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._switch_off(error)

    def _look_if_due(self) -> None:
        if self._is_due and self._may_look():
            self._unwritten.append({"step": self.case.step, "kind": "look"})
            self._look()

    def update_info(self, info: RunInfo) -> None:
        """Take newer provenance."""
        self.case.info = info

    def close(self, state: str, exit_code: int | None = None) -> None:  # noqa: ARG002 - the sink's form
        """Look a last time, tell what is new, and keep the findings in their final order."""
        try:
            self._take_notes(math.inf)
            if self._is_off:
                return
            self.case.ended = True
            self.case.died = state == "died"
            self._look()
            self.diagnosis = self.doctor.diagnose()
            if self._watcher is not None:
                self.diagnosis = add_hits(self.diagnosis, [self._watcher])
            if self.diagnosis.findings or self._told:
                write_findings(self._folder, [each.to_json() for each in self.diagnosis.findings])
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._switch_off(error)

    def add_note(self, step: int, kind: str, data: dict[str, Any]) -> None:
        """Take a note; it is kept in the run, and goes into the case."""
        # Steps are handed over later, several at a time: a note waits for the record of its step.
        note = {"step": step, "kind": kind, **data}
        self._unwritten.append(note)
        self._waiting.append(note)

    def _take_notes(self, step: float) -> None:
        # Records may come from the writer's thread while the training adds notes: take what is there, one by one.
        # The first step is slow enough: its notes are written with those of the next.
        if step > 0 and self._unwritten:
            unwritten = [self._unwritten.popleft() for _ in range(len(self._unwritten))]
            self._notes.add_notes(unwritten)
        while self._waiting and self._waiting[0]["step"] <= step:
            self.case.add_note(self._waiting.popleft())

    def add_media(self, step: int, name: str, data: bytes, suffix: str) -> None:
        """Keep a file in the run."""
        self._notes.add_media(step, name, data, suffix)

    # ---------------------------------------------------------------- watchpoints

    def _watch(self, watcher: Watcher, record: StepRecord) -> None:
        """Judge the watchpoints; tell the first hit of each site, and do what was asked for."""
        for hit in watcher.see(self.case, record):
            finding = watcher.make_finding(hit)
            self._tell(f"clew: {finding.rule} hit at step {finding.step}: {finding.title}")
            if self.on_hit is not None:
                self.on_hit(finding)

    # ---------------------------------------------------------------- looking

    def _may_look(self) -> bool:
        """Return whether the run has paid for another look; the first bad value is not left to wait."""
        if self._looks.was_alarmed and not self._was_alarmed:
            self._was_alarmed = True
            return True
        now = perf_counter()
        if self.case.steps > _LATE and now - self._looked_at < self._last_look / _LATE_SHARE:
            return False
        return self._looking + self._last_look <= _SHARE * (now - self._started)

    def _look(self) -> None:
        started = perf_counter()
        self._is_due = False
        self.case.verdicts = read_verdicts(self._folder)
        fresh = self.doctor.look(self.case)
        self._looked_at = perf_counter()
        self._last_look = self._looked_at - started
        self._looking += self._last_look
        if fresh:
            self._publish(fresh)

    def _publish(self, fresh: list[Finding]) -> None:
        """Keep what is new; tell the causes, and of known causes not the consequences."""
        append_findings(self._folder, [each.to_json() for each in fresh])
        from clew.views.diagnosis_page import say_finding

        for cause in fold(self.doctor.findings, self.doctor.rules):
            key = (cause.id, cause.site)
            if key not in self._told and cause.severity != "info":
                self._told.add(key)
                self._tell(say_finding(cause))

    # ---------------------------------------------------------------- faults of our own

    def _report_fault(self, rule: Rule, error: Exception) -> None:
        if self.guard is not None:
            self.guard.fault(error, f"rule {rule.id} {rule.name}", step=self.case.step)

    def _switch_off(self, error: Exception) -> None:
        self._is_off = True
        if self.guard is not None:
            self.guard.fault(error, "doctor", step=self.case.step)
