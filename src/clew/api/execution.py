"""One way to a step: the user's script in a copy of this process, from its start or from a snapshot."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from clew.api.world import FAILED, World
from clew.model.record import SEED_AT_START
from clew.replay.exactness import COMPARED_KINDS, Recorded
from clew.replay.process import Child, run_in_child
from clew.replay.turns import compile_with_turns, follow_imports

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.api.script import Outcome
    from clew.capture.torch.session import TorchSession
    from clew.query import Run
    from clew.replay.stage import Around, Stage
    from clew.store.snapshots import StoredBatches, StoredSnapshot

_LAUNCHER: Final = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC", "CLEW_")


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to come to a step."""

    run: Run
    step: int
    rank: int
    way: str
    snapshot: StoredSnapshot | None = None
    batches: tuple[StoredBatches, ...] = ()
    others: tuple[Plan, ...] = ()
    """What the other ranks do in the meantime."""


def try_plan(
    plan: Plan, recorded: Recorded, *, around: Around | None, is_last: bool, is_loud: bool
) -> dict[str, Any]:
    """Execute the plan in a copy of this process, with copies for the other ranks, and return its answer."""
    if "torch" in sys.modules:
        from clew.replay.fork import rest_openmp

        rest_openmp()
    with World(len(plan.others) + 1) as world:
        for other in plan.others:
            world.start(other.rank, partial(_follow, plan=other, world=world))
        make_stage = partial(
            _set_stage, plan, recorded, around=around, is_last=is_last, is_loud=is_loud, world=world
        )
        return run_in_child(
            partial(_act, plan=plan, world=world, make_stage=make_stage),
            is_loud=is_loud,
            find_failed=world.find_failed if plan.others else None,
        )


def _follow(child: Child, *, plan: Plan, world: World) -> None:
    """Be a rank that nobody looks at: come to where the others are, and train with them."""
    unseen = replace(plan, step=sys.maxsize)
    make_stage = partial(_set_stage, unseen, Recorded({}, {}), around=None, is_last=True, is_loud=False)
    error = _act(child, plan=plan, world=world, make_stage=make_stage, answers=False)
    os._exit(FAILED if error else 0)


def _act(
    child: Child, *, plan: Plan, world: World, make_stage: Callable[..., Stage], answers: bool = True
) -> str:
    """Run the script; a stage answers where its step ends. Return how the script failed."""
    stages: list[Stage] = []

    def begin(models: Any = (), optimizers: Any = ()) -> TorchSession:
        stages.append(make_stage(child, models=models, optimizers=optimizers))
        return stages[0].session

    def end(error: str = "") -> None:
        if answers and stages:
            stages[0].end(error)

    os.environ.update(world.describe(plan.rank))
    outcome = _run_script(plan, begin, end)
    error = f"{type(outcome.error).__name__}: {outcome.error}" if outcome.error is not None else ""
    end(error)
    if answers:
        never = "came to its clew.watch" if plan.run.info.watch else "imported torch"
        child.answer({"error": error or f"the script never {never}", "way": plan.way})
    return error


def _run_script(plan: Plan, begin: Callable[..., TorchSession], end: Callable[[str], None]) -> Outcome:
    """Run the recorded command in this process, which is a copy made for it."""
    from clew.api.import_hook import call_after_import
    from clew.api.repeated import Again
    from clew.api.script import execute, load_module, load_script

    run, info = plan.run, plan.run.info
    os.chdir(info.cwd)
    _set_environment(run)
    target, *argv = info.command
    program = load_module(target) if info.is_module else load_script(target)
    file = str(program.main.get("__file__"))
    if plan.snapshot is not None:
        follow_imports()
        if file.endswith(".py"):
            program = program._replace(load=partial(compile_with_turns, file))
    # In a script of clew run every clew.watch stays silent; in any other the recorded one begins the execution.
    Again(info.watch, run.path, begin, end).install()
    if not info.watch:
        call_after_import("torch", lambda: _start(begin))
    return execute(program, argv)


def _start(begin: Callable[..., TorchSession]) -> None:
    begin()


def _set_environment(run: Run) -> None:
    """Give the script the variables it was recorded with; a launcher's are not ours to repeat."""
    for key, value in run.info.environment.items():
        if not key.startswith(_LAUNCHER):
            os.environ[key] = value


def _set_stage(
    plan: Plan,
    recorded: Recorded,
    child: Child,
    *,
    around: Around | None,
    is_last: bool,
    is_loud: bool,
    models: Any = (),
    optimizers: Any = (),
    world: World | None = None,
) -> Stage:
    import torch

    from clew.capture.torch.patches import Patches
    from clew.replay.restore import Jump
    from clew.replay.stage import Stage

    info = plan.run.info
    threads = info.hardware.get("threads")
    if isinstance(threads, int) and threads > 0 and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    seed = info.seeds.get(SEED_AT_START, info.seeds.get("torch"))
    is_unseeded = isinstance(seed, int) and torch.initial_seed() != seed
    if is_unseeded:
        torch.manual_seed(seed)
    session = _make_session(info.settings, models, optimizers)
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
        release=world.end if world is not None else None,
    )
    if info.watch and not jump and is_unseeded:
        stage.reasons.append("the script does not seed torch before clew.watch, so its weights are others")
    stage.attach()
    return stage


def _make_session(recorded: dict[str, Any], models: Any, optimizers: Any) -> TorchSession:
    """Return a session that names things as the recorded one did and writes nothing."""
    from clew.capture.settings import Settings
    from clew.capture.torch.session import TorchSession

    kinds = tuple(kind for kind in recorded.get("kinds", COMPARED_KINDS) if kind in (*COMPARED_KINDS, "loss"))
    sites = tuple(recorded.get("sites", ("*",)))
    settings = Settings(every=1, kinds=kinds, sites=sites, histograms=False, status=False, doctor=False)
    return TorchSession(settings, _Nowhere(), tell=lambda _: None, models=models, optimizers=optimizers)


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
