"""``clew preflight``: a script runs until it has made a few steps, is rehearsed in copies, and is stopped."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from clew.api.preflight import check_can_copy, choose_checks
from clew.errors import ClewError
from clew.model.preflight import Check, Preflight
from clew.views.source_line import from_here

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    import torch

    from clew.api.script import Outcome
    from clew.capture.torch.session import TorchSession
    from clew.model.record import RunInfo, Site, StepRecord
    from clew.replay.preflight_losses import LossWatch
    from clew.replay.preflight_subject import Beginning, Subject, WriteGuard
    from clew.replay.reenter import Way

_STEPS: Final = 3
"""Steps that the script makes itself before it is rehearsed."""
_TRIAL_SECONDS: Final = 45.0


class _Rehearsed(SystemExit):
    """Ends the script when the rehearsal is over."""


class _Nowhere:
    """A sink that keeps nothing."""

    def add_sites(self, sites: Iterable[Site]) -> None:
        """Forget sites."""

    def put(self, record: StepRecord) -> None:
        """Forget a step."""

    def update_info(self, info: RunInfo) -> None:
        """Forget provenance."""

    def close(self, state: str, exit_code: int | None = None) -> None:
        """There is nothing to close."""


def preflight_script(
    target: str,
    argv: list[str],
    *,
    module: bool = False,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    on_check: Callable[[str, int, int], None] | None = None,
) -> Preflight:
    """Run a script for a few steps, rehearse its training, and return what was found; what it prints is on stderr."""
    from clew.api.import_hook import call_after_import
    from clew.api.script import execute, load_module, load_script

    names = choose_checks(only, skip)
    program = load_module(target) if module else load_script(target)
    gate = _Gate(names, on_check)
    call_off = call_after_import("torch", gate.open)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            outcome = execute(program, argv)
    finally:
        call_off()
        gate.close()
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    if gate.trouble is not None:
        raise gate.trouble
    return gate.report or _tell_unrehearsed(outcome, gate, names)


def _tell_unrehearsed(outcome: Outcome, gate: _Gate, names: Collection[str]) -> Preflight:
    """Return the report of a script that ended before it could be rehearsed."""
    if outcome.error is not None:
        error = outcome.error
        first = Check("one-batch", "failed", f"{type(error).__name__}: {error}", "mend this first")
    elif not gate.steps:
        first = Check("one-batch", "failed", "the script ended without a step of an optimizer")
    else:
        first = Check("one-batch", "ok", f"the script ended after {gate.steps} steps")
    why = f"the script ended after {gate.steps} of the {_STEPS} steps that are needed"
    rest = [Check(name, "not checked", why) for name in names if name != "one-batch"]
    return Preflight((first, *rest), written=gate.written)


class _Gate:
    """Sits at the optimizer: keeps what the rehearsal needs, and at the last step rehearses and ends the script."""

    def __init__(self, names: list[str], on_check: Callable[[str, int, int], None] | None) -> None:
        self._names = names
        self._on_check = on_check
        self.steps = 0
        self.report: Preflight | None = None
        self.trouble: ClewError | None = None
        self.written: tuple[str, ...] = ()
        self._session: TorchSession | None = None
        self._guard: WriteGuard | None = None
        self._losses: LossWatch | None = None
        self._beginning: Beginning | None = None
        self._patches: Any = None
        self._loaders: dict[int, Any] = {}
        self._loader: Any = None
        self._batches: list[Any] = []
        self._fetched = 0

    def open(self) -> None:
        """Begin to watch: torch has just been imported."""
        from torch.optim import optimizer
        from torch.utils.data import DataLoader

        from clew.capture.settings import Settings
        from clew.capture.torch.patches import Patches
        from clew.capture.torch.session import TorchSession
        from clew.replay.preflight_losses import LossWatch
        from clew.replay.preflight_subject import Beginning, WriteGuard

        settings = Settings(every=1, budget=None, histograms=False, hashes=False, doctor=False)
        self._session = TorchSession(settings, _Nowhere(), tell=lambda _: None)
        self._beginning, self._losses, self._guard = Beginning(), LossWatch(), WriteGuard()
        self._patches = Patches()
        # Before the session: its own hook, after a step, forgets the calls that the step was made of.
        self._patches.on_undo(optimizer.register_optimizer_step_post_hook(self._after_step).remove)
        self._session.start()
        self._patches.on_undo(optimizer.register_optimizer_step_pre_hook(self._before_step).remove)
        self._patches.replace(DataLoader, "__iter__", self._make_iter)
        self._patches.listen(self._session.recorder.on_batch, self._see_batch)
        self._losses.install()
        self._guard.install()

    def close(self) -> None:
        """Leave everything as it was found."""
        if self._session is None:
            return
        assert self._guard is not None  # open() made all of them
        assert self._losses is not None
        self._guard.remove()
        self.written = tuple(map(from_here, filter(_is_kept, list(self._guard.written))))
        self._losses.remove()
        self._patches.undo()
        self._session.finish()
        if self.report is not None:
            self.report = Preflight(self.report.checks, self.report.seconds, self.report.way, self.written)

    # ---------------------------------------------------------------- while the script runs

    def _make_iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __iter__(loader: Any) -> Any:  # noqa: N807
            iterator = original(loader)
            self._loaders[id(iterator)] = loader
            return iterator

        return __iter__

    def _see_batch(self, iterator: Any, batch: Any) -> None:
        self._loader = self._loaders.get(id(iterator))
        self._fetched += 1
        self._batches = [*self._batches[-3:], batch]

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        assert self._beginning is not None  # open() made both
        assert self._session is not None
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not self.steps:
            models = self._models()
            held += [buffer for model in models for buffer in (*model.parameters(), *model.buffers())]
            self._beginning.keep_modes(models)
        self._beginning.keep(held, optimizer)

    def _models(self) -> list[torch.nn.Module]:
        assert self._session is not None  # open() made it
        living = [tree.ref() for tree in self._session.recorder.registry.living_trees()]
        return [model for model in living if model is not None]

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        # The copies step through here, too.
        if self.steps != _STEPS:
            return
        try:
            self._rehearse()
        except ClewError as error:
            self.trouble = error
        assert self._guard is not None  # open() made it
        # What the script still does on its way out must not write: a checkpoint of a rehearsal helps nobody.
        self._guard.mode = "stop"
        raise _Rehearsed(0)

    # ---------------------------------------------------------------- the rehearsal

    def _rehearse(self) -> None:
        from clew.replay.preflight import rehearse
        from clew.replay.reenter import find_ways

        check_can_copy()
        assert self._session is not None  # open() made both
        assert self._guard is not None
        assert self._beginning is not None
        self._guard.mode = "ignore"
        self._beginning.keep_scalers()
        ways = find_ways(self._session.recorder.flight.known_frames)
        reasons, fitting = [], None
        for way in ways:
            fetches: list[bool] = []
            subject = self._make_subject(way, fetches)
            trial = _try(subject, fetches)
            if trial.trouble:
                reasons.append(f"{way.name}: {trial.trouble}")
            elif fitting is None or not trial.fetches:
                fitting = subject
            if fitting is subject and not trial.fetches:
                break  # one that fetches batches comes to the end of its loader in a check of many steps
        if fitting is not None:
            self.report = rehearse(fitting, names=self._names, on_check=self._on_check)
            return
        why = "the step cannot be executed again: " + (
            "; ".join(reasons) or "no loop of the script was found"
        )
        done = Check("one-batch", "ok", f"the script made {self.steps} steps")
        rest = [Check(name, "not checked", why) for name in self._names if name != "one-batch"]
        self.report = Preflight((done, *rest))

    def _make_subject(self, way: Way, fetches: list[bool]) -> Subject:
        from clew.replay.preflight_subject import Subject
        from clew.replay.preflight_total import count_steps
        from clew.replay.reenter import frames_outside_tools

        assert self._session is not None  # open() made all of them
        assert self._losses is not None
        assert self._beginning is not None
        recorder = self._session.recorder
        optimizers = [entry.ref() for entry in self._session.optimizers.entries.values() if entry.steps]
        living = [each for each in optimizers if each is not None]
        flight = recorder.flight
        return Subject(
            models=self._models(),
            optimizers=living or self._optimizers_of_first_step(),
            step=lambda: _with_batch(way, flight.last_batch, fetches),
            roots=list(flight.recorder.calls),
            names={key: entry.name for key, entry in recorder.registry.tensors.items()},
            beginning=self._beginning,
            random=flight.restore,
            way=way.name,
            loader=self._loader,
            batches=self._batches,
            targets=[call.target.detach() for call in self._losses.calls],
            total_steps=self._total(count_steps(frames_outside_tools())),
            guard=self._guard,
        )

    def _optimizers_of_first_step(self) -> list[torch.optim.Optimizer]:
        assert self._session is not None  # open() made it
        known = [entry.ref() for entry in self._session.optimizers.entries.values()]
        return [each for each in known if each is not None]

    def _total(self, turns: int | None) -> int | None:
        """Return steps from turns of the loop: with accumulation a step takes several batches."""
        if turns is None or self._fetched <= self.steps:
            return turns
        return max(1, turns * self.steps // self._fetched)


def _with_batch(way: Way, batch: Any, fetches: list[bool]) -> None:
    """Execute the step; a loop that fetches its batch itself, which is noted, gets the same batch again."""
    from torch.utils.data import dataloader

    kind: Any = dataloader._BaseDataLoaderIter
    original = kind.__next__

    def fetch(_: Any) -> Any:
        fetches.append(True)
        return batch

    if batch is not None:
        kind.__next__ = fetch
    try:
        way.run()
    finally:
        kind.__next__ = original


class _Trial(NamedTuple):
    """What keeps a step from being executed again, nothing when it works, and whether it fetches a batch."""

    trouble: str
    fetches: bool = False


def _try(subject: Subject, fetches: list[bool]) -> _Trial:
    """Execute the step again, in a copy of the process."""
    from clew.replay.fork import run_forked

    def run() -> list[int]:
        subject.rewind()
        seen = subject.run()
        return [len(seen.losses), seen.steps, len(fetches)]

    answer = run_forked(run, seconds=_TRIAL_SECONDS)
    if answer.trouble:
        return _Trial(answer.trouble.splitlines()[0])
    losses, steps, fetched = answer.value
    if losses and steps:
        return _Trial("", fetches=fetched > 0)
    return _Trial(f"it has {losses} backward passes and {steps} optimizer steps")


def _is_kept(path: str) -> bool:
    """Return whether a file that was written is still there, in the working directory or outside of temporary ones."""
    where = Path(path).absolute()
    return where.exists() and (
        where.is_relative_to(Path.cwd()) or not where.is_relative_to(tempfile.gettempdir())
    )
