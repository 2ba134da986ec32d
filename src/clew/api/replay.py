"""A recorded step executed again by the user's own script, and how well that equals the recording."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from clew.api.execution import Plan, try_plan
from clew.api.world import find_obstacle
from clew.errors import UsageError
from clew.replay.exactness import read_recorded
from clew.store.layout import rank_folder
from clew.store.snapshots import list_batches, list_snapshots, list_unfinished

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clew.query import Run
    from clew.replay.stage import Around
    from clew.store.snapshots import StoredSnapshot

WAYS: Final = ("snapshot", "start", "calls")
_FAR: Final = 100
"""Steps that are worth executing only to see whether the execution equals the recording."""


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
    if rank not in run.ranks:
        raise UsageError(
            f"the run has no rank {rank}",
            where=str(run.path),
            next_step=f"it has {', '.join(map(str, run.ranks))}",
        )
    recorded = read_recorded(run, step, rank=rank)
    reasons: list[str] = []
    plans = _make_plans(run, step, rank=rank, ways=ways, reasons=reasons, full=recorded.full_steps)
    for number, plan in enumerate(plans):
        is_last = number == len(plans) - 1
        answer = try_plan(plan, recorded, around=around, is_last=is_last, is_loud=is_loud)
        if is_last or (answer.get("was_executed") and answer.get("exactness") != "diverged"):
            break
        reasons.append(_say_given_up(answer))
    return _conclude(plan, answer, reasons)


def check_command(run: Run) -> None:
    """Refuse a run whose command is not known well enough to be started again."""
    info = run.info
    if not info.command or not info.cwd or not (info.is_script or info.watch):
        reason = info.obstacle or "it was recorded by an older clew.watch"
        raise UsageError(
            f"a step of this run cannot be executed again: {reason}",
            where=str(run.path),
            next_step="record it with 'clew run train.py', or use clew.explain_nonfinite(step_function)",
        )
    if any("(hidden)" in word for word in info.command):
        raise UsageError(
            "the recorded command had a secret in it, which was not kept",
            where=str(run.path),
            next_step="run the script again under 'clew run' with the same arguments",
        )
    if obstacle := find_obstacle(run):
        raise UsageError(
            "a step of this run cannot be executed again",
            where=str(run.path),
            next_step=f"{obstacle}; clew.explain_nonfinite(step_function) needs one process only",
        )


def _make_plans(
    run: Run, step: int, *, rank: int, ways: Sequence[str], reasons: list[str], full: frozenset[int]
) -> list[Plan]:
    """Return the ways that are open, the best first; ``reasons`` takes why others are not."""
    others = [each for each in run.ranks if each != rank] if run.info.world_size > 1 else []
    plans: list[Plan] = []
    for way in ways:
        if way == "start":
            beside = tuple(Plan(run, step, each, way) for each in others)
            plans.append(Plan(run, step, rank, way, others=beside))
            continue
        snapshots = _list_common(run, [rank, *others])
        if way == "snapshot":
            reasons += _say_unfinished(run, rank, step)
        if others and not snapshots and way == "snapshot":
            reasons.append("the ranks have no snapshot of the same step")
        for snapshot in _choose_snapshots(snapshots, step, full):
            if way == "calls" and snapshot.step < step:
                continue
            plan = _plan_jump(run, step, rank, way=way, at=snapshot.step, reasons=reasons)
            each_other = [
                _plan_jump(run, step, each, way="snapshot", at=snapshot.step, reasons=reasons)
                for each in others
            ]
            beside = tuple(each for each in each_other if each is not None)
            if plan is not None and len(beside) == len(others):
                plans.append(replace(plan, others=beside))
    if not plans:
        raise UsageError(
            f"step {step} cannot be executed again",
            where=str(run.path),
            next_step="; ".join(reasons) or "no snapshot from before it was kept; run the script again",
        )
    return plans


def _say_unfinished(run: Run, rank: int, step: int) -> list[str]:
    """Return a sentence for each snapshot that would have served if the process had lived to finish it."""
    unfinished = list_unfinished(rank_folder(run.path, rank)) if run.state != "recording" else []
    return [
        f"the snapshot of step {each} was not finished when the process ended, so it is left out"
        for each in unfinished
        if each <= step
    ]


def _list_common(run: Run, ranks: list[int]) -> list[StoredSnapshot]:
    """Return the snapshots of the first rank whose step all the ranks have one of."""
    each = [list_snapshots(rank_folder(run.path, rank)) for rank in ranks]
    steps = set.intersection(*({snapshot.step for snapshot in kept} for kept in each))
    return [snapshot for snapshot in each[0] if snapshot.step in steps]


def _plan_jump(run: Run, step: int, rank: int, *, way: str, at: int, reasons: list[str]) -> Plan | None:
    """Return the way of a rank from its snapshot before step ``at``, None where its batches are gone."""
    folder = rank_folder(run.path, rank)
    snapshot = next(each for each in list_snapshots(folder) if each.step == at)
    batches = tuple(list_batches(folder))
    kept = {number for file in batches for number in range(file.first, file.last + 1)}
    missing = set(range(at, step + 1)) - kept
    if missing and (way == "calls" or snapshot.read_state().get("has_loader")):
        if way != "calls":
            reasons.append(f"the batches from step {at} to {step} were not all kept")
        return None
    return Plan(run, step, rank, way, snapshot, batches)


def _choose_snapshots(
    snapshots: list[StoredSnapshot], step: int, full: frozenset[int]
) -> list[StoredSnapshot]:
    """Return the snapshots to try: first one from which steps can be compared on the way, then the nearest.

    One that was taken in the middle of a step, when something went bad, lacks what the loop held when it began; then
    the last one from between two steps is tried as well.
    """
    before = [each for each in snapshots if 0 < each.step <= step]
    nearest = before[-1:]
    telling = [
        each
        for each in before
        if step - each.step <= _FAR and any(each.step <= number < step for number in full)
    ]
    whole = [each for each in before[-2:] if "names" in each.read_state()]
    return list(dict.fromkeys([*telling[-1:], *nearest, *whole[-1:]]))


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


def _conclude(plan: Plan, answer: dict[str, Any], reasons: list[str]) -> Execution:
    known = {key: answer[key] for key in Execution.__dataclass_fields__ if key in answer}
    known["reasons"] = [*reasons, *answer.get("reasons", ())]
    known.setdefault("way", plan.way)
    if not answer:
        known["error"] = "the process that executed the step ended without an answer"
    return Execution(**{**known, "step": plan.step, "rank": plan.rank})
