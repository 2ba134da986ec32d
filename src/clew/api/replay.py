"""A recorded step executed again by the user's own script, and how well that equals the recording."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from clew.errors import UsageError
from clew.replay.exactness import COMPARED_KINDS, Recorded, read_recorded
from clew.replay.process import Child, run_in_child
from clew.store.layout import rank_folder
from clew.store.snapshots import list_batches, list_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clew.api.script import Outcome
    from clew.capture.torch.session import TorchSession
    from clew.query import Run
    from clew.replay.stage import Around, Stage
    from clew.store.snapshots import StoredBatches, StoredSnapshot

WAYS: Final = ("snapshot", "start", "calls")
_FAR: Final = 100
"""Steps that are worth executing only to see whether the execution equals the recording."""

_LAUNCHER: Final = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC", "CLEW_")


@dataclass(frozen=True, slots=True)
class Execution:
    """How a step was executed again.

    ``exactness``: ``identical``, ``close`` (equal to 1e-6, or nothing but losses to compare), ``diverged`` or ``none``;
    ``diverged_at`` is the first place that differed. ``way``: ``snapshot``, ``start`` or ``calls``. ``reasons``: what
    may make it differ, and which ways were given up. ``result`` is what ``around`` gave back.
    """

    step: int
    rank: int = 0
    exactness: str = "none"
    diverged_at: str = ""
    way: str = ""
    from_step: int = 0
    was_executed: bool = False
    compared: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    result: Any = None
    error: str = ""


def execute_again(
    run: Run,
    step: int,
    *,
    around: Around | None = None,
    rank: int = 0,
    ways: Sequence[str] = WAYS,
    is_loud: bool = False,
) -> Execution:
    """Execute a recorded step again and compare it with the recording.

    The user's own script runs in a copy of this process, with the command it was recorded with; nothing in the run
    folder is executed. ``around`` is called with a ``Stage`` where the step begins; the function it returns is called
    at the end of the step, and what that returns must fit JSON. Ways are tried in order until one does not diverge.
    """
    check_command(run)
    if step < 0 or step > run.last_step + 1:
        raise UsageError(
            f"the run has no step {step}",
            where=str(run.path),
            next_step=f"its steps are 0 to {run.last_step}",
        )
    recorded = read_recorded(run, step, rank=rank)
    reasons: list[str] = []
    plans = _make_plans(run, step, rank=rank, ways=ways, reasons=reasons, full=recorded.full_steps)
    for number, plan in enumerate(plans):
        is_last = number == len(plans) - 1
        answer = _try(plan, recorded, around=around, is_last=is_last, is_loud=is_loud)
        if is_last or (answer.get("was_executed") and answer.get("exactness") != "diverged"):
            break
        reasons.append(_say_given_up(answer))
    return _conclude(plan, answer, reasons)


def check_command(run: Run) -> None:
    """Refuse a run whose command is not known well enough to be started again."""
    info = run.info
    if not info.command or not info.cwd or not info.is_script:
        raise UsageError(
            "this run was not started by 'clew run', so its step cannot be executed again",
            where=str(run.path),
            next_step="record it with 'clew run train.py', or use clew.explain_nonfinite(step_function)",
        )
    if any("(hidden)" in word for word in info.command):
        raise UsageError(
            "the recorded command had a secret in it, which was not kept",
            where=str(run.path),
            next_step="run the script again under 'clew run' with the same arguments",
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """One way to come to a step."""

    run: Run
    step: int
    rank: int
    way: str
    snapshot: StoredSnapshot | None = None
    batches: tuple[StoredBatches, ...] = ()


def _make_plans(
    run: Run, step: int, *, rank: int, ways: Sequence[str], reasons: list[str], full: frozenset[int]
) -> list[_Plan]:
    """Return the ways that are open, the best first; ``reasons`` takes why others are not."""
    folder = rank_folder(run.path, rank)
    batches = tuple(list_batches(folder))
    kept = {number for file in batches for number in range(file.first, file.last + 1)}
    plans: list[_Plan] = []
    for way in ways:
        if way == "start":
            plans.append(_Plan(run, step, rank, way))
            continue
        for snapshot in _choose_snapshots(list_snapshots(folder), step, full):
            missing = set(range(snapshot.step, step + 1)) - kept
            if way == "calls" and (snapshot.step < step or missing):
                continue
            if missing and snapshot.read_state().get("has_loader"):
                reasons.append(f"the batches from step {snapshot.step} to {step} were not all kept")
                continue
            plans.append(_Plan(run, step, rank, way, snapshot, batches))
    if not plans:
        raise UsageError(
            f"step {step} cannot be executed again",
            where=str(run.path),
            next_step="; ".join(reasons) or "no snapshot from before it was kept; run the script again",
        )
    return plans


def _choose_snapshots(
    snapshots: list[StoredSnapshot], step: int, full: frozenset[int]
) -> list[StoredSnapshot]:
    """Return the snapshots to try: first one from which steps can be compared on the way, then the nearest."""
    before = [each for each in snapshots if 0 < each.step <= step]
    nearest = before[-1:]
    telling = [
        each
        for each in before
        if step - each.step <= _FAR and any(each.step <= number < step for number in full)
    ]
    return list(dict.fromkeys([*telling[-1:], *nearest]))


def _say_given_up(answer: dict[str, Any]) -> str:
    way = {"snapshot": "from the snapshot", "start": "from the start", "calls": "the root calls alone"}
    reason = answer.get("error") or f"diverged at {answer.get('diverged_at') or 'an unknown place'}"
    said = "; ".join([reason, *_explain_difference(reason), *answer.get("reasons", ())])
    return f"{way.get(answer.get('way', ''), 'one way')}: {said}"


def _explain_difference(reason: str) -> list[str]:
    """Return what usually makes an execution differ there; a snapshot holds what torch and clew know of."""
    if "(batch)" in reason:
        return ["the script keeps what it gives the model in variables of its own: an index, a hidden state"]
    if "diverged" in reason:
        return ["something outside the model decides: a counter in the loop, time, a generator of its own"]
    return []


def _conclude(plan: _Plan, answer: dict[str, Any], reasons: list[str]) -> Execution:
    known = {key: answer[key] for key in Execution.__dataclass_fields__ if key in answer}
    known["reasons"] = [*reasons, *answer.get("reasons", ())]
    known.setdefault("way", plan.way)
    if not answer:
        known["error"] = "the process that executed the step ended without an answer"
    return Execution(**{**known, "step": plan.step, "rank": plan.rank})


def _try(
    plan: _Plan, recorded: Recorded, *, around: Around | None, is_last: bool, is_loud: bool
) -> dict[str, Any]:
    if "torch" in sys.modules:
        from clew.replay.fork import rest_openmp

        rest_openmp()

    def act(child: Child) -> None:
        stages: list[Stage] = []

        def begin() -> None:
            stages.append(_set_stage(plan, recorded, child, around=around, is_last=is_last, is_loud=is_loud))

        outcome = _run_script(plan.run, begin)
        error = f"{type(outcome.error).__name__}: {outcome.error}" if outcome.error is not None else ""
        if not stages:
            child.answer({"error": error or "the script never imported torch", "way": plan.way})
        stages[0].end(error)

    return run_in_child(act, is_loud=is_loud)


def _run_script(run: Run, begin: Callable[[], None]) -> Outcome:
    """Run the recorded command in this process, which is a copy made for it."""
    from clew.api.import_hook import call_after_import
    from clew.api.script import execute, load_module, load_script

    info = run.info
    os.chdir(info.cwd)
    _set_environment(run)
    target, *argv = info.command
    program = load_module(target) if info.is_module else load_script(target)
    call_after_import("torch", begin)
    return execute(program, argv)


def _set_environment(run: Run) -> None:
    """Give the script the variables it was recorded with; a launcher's are not ours to repeat."""
    for key, value in run.info.environment.items():
        if not key.startswith(_LAUNCHER):
            os.environ[key] = value


def _set_stage(
    plan: _Plan,
    recorded: Recorded,
    child: Child,
    *,
    around: Around | None,
    is_last: bool,
    is_loud: bool,
) -> Stage:
    import torch

    from clew.capture.torch.patches import Patches
    from clew.replay.restore import Jump
    from clew.replay.stage import Stage

    info = plan.run.info
    threads = info.hardware.get("threads")
    if isinstance(threads, int) and threads > 0 and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if isinstance(seed := info.seeds.get("torch"), int) and torch.initial_seed() != seed:
        torch.manual_seed(seed)
    session = _make_session(info.settings)
    jump = None
    if plan.snapshot is not None:
        jump = Jump(plan.snapshot, list(plan.batches), last=plan.step)
        # Below the session, which so sees the recorded batches as it would see the loader's.
        jump.install(Patches())
    session.start()
    stage = Stage(
        session,
        child,
        step=plan.step,
        way=plan.way,
        recorded=recorded,
        around=around,
        is_last=is_last,
        is_loud=is_loud,
        jump=jump,
    )
    stage.attach()
    return stage


def _make_session(recorded: dict[str, Any]) -> TorchSession:
    """Return a session that names things as the recorded one did and writes nothing."""
    from clew.capture.settings import Settings
    from clew.capture.torch.session import TorchSession

    kinds = tuple(kind for kind in recorded.get("kinds", COMPARED_KINDS) if kind in (*COMPARED_KINDS, "loss"))
    sites = tuple(recorded.get("sites", ("*",)))
    settings = Settings(every=1, kinds=kinds, sites=sites, histograms=False, status=False, doctor=False)
    return TorchSession(settings, _Nowhere(), tell=lambda _: None)


class _Nowhere:
    """A sink for records that nobody will read."""

    def add_sites(self, sites: Any) -> None:
        """Take no note of sites."""

    def put(self, record: Any) -> None:
        """Take no note of a record."""

    def update_info(self, info: Any) -> None:
        """Take no note of provenance."""

    def close(self, state: str, exit_code: int | None = None) -> None:
        """Nothing to close."""
