"""Why a step went wrong: the verdict made while the run went on, or a new one from executing the step again."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Final

from clew.api.replay import WAYS, Execution, execute_again
from clew.errors import UsageError
from clew.store.evidence import write_evidence
from clew.store.layout import list_ranks, rank_folder
from clew.store.verdicts import read_verdicts, write_verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from clew.query import Run
    from clew.replay.rehearsal import Symptom
    from clew.replay.stage import Around, Stage


_MOST_SEARCHED: Final = 200
"""Steps of a run that is executed again and again to find the first bad one."""


def why(run: Run, *, step: int | None = None, rank: int | None = None, rerun: bool = False) -> dict[str, Any]:
    """Return the verdict on a run's bad step, or on a step and a rank of one's choice.

    A verdict made while the run went on is returned as it is. Otherwise the step is executed again, from a snapshot
    before it or from the start of the script, and compared with the recording; ``rerun`` asks for the start of the
    script even when a verdict is there. A cause that is found is kept in the run.
    """
    known = _known_verdict(run.path, step, rank)
    if known is not None and not rerun:
        return known if step is not None and known["found"] else _look_again(run, known)
    wanted = step if step is not None else first_bad_step(run)
    if wanted is None and _has_no_backward(run) and (found := _search(run)) is not None:
        return found
    if wanted is None:
        return _make_empty(run.last_step, _say_nothing_bad(run), is_sound=not _has_no_backward(run))
    if rank is None:
        rank = known["rank"] if known is not None else choose_rank(run, wanted)
    found = explain_again(run, wanted, rank=rank, ways=("start",) if rerun else WAYS)
    return found if step is not None or not found["found"] else _look_again(run, found)


def _has_no_backward(run: Run) -> bool:
    """Return whether a run has steps in which nothing was seen that could be bad: torch.func needs no backward."""
    return run.last_step >= 0 and "loss" not in run.scalars() and run.first_nonfinite() is None


def _search(run: Run) -> dict[str, Any] | None:
    """Return the verdict on the first bad step of a run in which none was seen, by executing some of them again.

    A weight that is bad stays so, hence half of the steps can be left out each time.
    """
    low, high = 0, run.last_step
    if high > _MOST_SEARCHED:
        return None
    try:
        found = explain_again(run, high, ways=("start",))
        while found["found"] and low < high:
            middle = (low + high) // 2
            verdict = explain_again(run, middle, ways=("start",))
            low, high = (low, middle) if verdict["found"] else (middle + 1, high)
            found = verdict if verdict["found"] else found
    except UsageError:
        return None
    return found if found["found"] else None


def _say_nothing_bad(run: Run) -> list[str]:
    """Return the sentences for a run in which nothing bad was seen: perhaps there was nothing to look at."""
    if _has_no_backward(run):
        return [
            "nothing in this script calls backward(), so no loss and no gradient was seen: torch.func needs none",
            "name a step, clew why RUN --step N, or put the step into clew.explain_nonfinite(step_function)",
        ]
    return ["nothing in this run was NaN or infinite", f"clew doctor {run.name} looks for other faults"]


def _look_again(run: Run, verdict: dict[str, Any]) -> dict[str, Any]:
    """Execute again what the running process could not tell: the step, or the one before that wrote a bad weight."""
    if not verdict["found"]:
        wanted = verdict["step"]
    elif verdict.get("phase") == "parameter":
        wanted = verdict["step"] - 1
    else:
        return verdict
    if wanted < 0 or verdict.get("is_final"):
        return verdict
    try:
        again = explain_again(run, wanted, rank=verdict["rank"])
    except UsageError:
        return verdict
    if again["found"]:
        return again
    with contextlib.suppress(OSError):  # nothing is found there next time either
        write_verdict(rank_folder(run.path, verdict["rank"]), {**verdict, "is_final": True})
    return verdict


def explain_again(
    run: Run, step: int, *, rank: int = 0, ways: tuple[str, ...] = WAYS, site: str = ""
) -> dict[str, Any]:
    """Execute a step again under the lens and return the verdict; a cause that is found is kept in the run.

    So is what a test of it needs; with ``site``, what a test of that module needs.
    """
    folder = rank_folder(run.path, rank)
    has_data = bool(run.info.settings.get("data", True))
    execution = execute_again(
        run, step, around=make_around(folder if has_data else None, site=site), rank=rank, ways=ways
    )
    if execution.result is None:
        raise UsageError(
            f"step {step} could not be executed again",
            where=" ".join(run.info.command),
            next_step="; ".join([execution.error, *execution.reasons]).strip("; ")
            or "record the run again with 'clew run'",
        )
    verdict = _conclude(execution)
    if verdict["found"]:
        with contextlib.suppress(OSError):  # a run that cannot be written to is still explained
            write_verdict(folder, verdict)
    return verdict


def make_around(evidence_folder: Path | None, *, site: str = "") -> Around:
    """Return what ``execute_again`` calls around a step to have its first bad value explained."""

    def around(stage: Stage) -> Callable[[], Any]:
        from clew.replay.evidence import Evidence, pack
        from clew.replay.verdict import judge

        rehearsal = stage.rehearsal
        evidence = Evidence(rehearsal, flight=stage.recorder.flight, site=site)

        def end(_: Symptom) -> None:
            stage.finish()

        def after() -> dict[str, Any]:
            if not rehearsal.losses:
                rehearsal.take_last_operation()
            verdict = judge(rehearsal, step=stage.step, batch_size=rehearsal.batch_size, way=stage.way)
            if verdict.found and evidence_folder is not None:
                try:
                    stage.recorder.flight.restore()
                    write_evidence(evidence_folder, stage.step, pack(*evidence.build(verdict)))
                except Exception as error:  # noqa: BLE001 - a verdict without a test is better than none
                    verdict.notes.append(f"no test can be made of it: {type(error).__name__}: {error}")
            return verdict.to_json()

        stage.on_symptom = end
        return after

    return around


def _conclude(execution: Execution) -> dict[str, Any]:
    """Return the verdict with what is known of how well the execution equals the recording."""
    verdict: dict[str, Any] = {**execution.result, "rank": execution.rank, "replay": execution.exactness}
    begin = (
        "the start of the script"
        if not execution.from_step
        else f"the snapshot of step {execution.from_step}"
    )
    notes = [f"executed again from {begin}, in a process of its own: {say_exactness(execution)}"]
    if not verdict["found"] and not execution.error:
        notes.append(f"nothing in step {execution.step} was NaN or infinite")
        verdict["notes"] = []
        verdict["is_sound"] = execution.exactness != "diverged"
    if execution.error:
        notes.append(f"the script ended with {execution.error}")
    verdict["notes"] = [*verdict.get("notes", []), *notes, *execution.reasons]
    return verdict


def say_exactness(execution: Execution) -> str:
    """Return in words how an execution compares with the recording."""
    losses, hashes = execution.compared.get("losses", 0), execution.compared.get("hashes", 0)
    if execution.exactness == "identical":
        return f"identical to the recording ({hashes} tensors and {losses} losses compared)"
    if execution.exactness == "close":
        if execution.diverged_at:
            return f"equal to 1e-6, first different at {execution.diverged_at}"
        return f"its {losses} losses equal the recording; no tensors of these steps were recorded"
    if execution.exactness == "diverged":
        return f"it diverged from the recording at {execution.diverged_at}, so take the verdict with care"
    return "nothing of these steps was recorded that it could be compared with"


def _make_empty(step: int, notes: list[str], *, is_sound: bool) -> dict[str, Any]:
    return {
        "found": False, "is_sound": is_sound, "step": step, "rank": 0, "phase": "", "op": "", "site": "",
        "source": {"file": "", "line": 0, "text": ""}, "elements": [], "sample": None, "chain": [],
        "replay": "none", "hint": "", "notes": notes,
    }  # fmt: skip


def _known_verdict(folder: Path, step: int | None, only: int | None) -> dict[str, Any] | None:
    """Return the verdict of the first bad step; of several ranks, that of the one that has found a cause."""
    known = [
        {**verdict, "rank": rank}
        for rank in (list_ranks(folder) if folder.is_dir() else ())
        for verdict in read_verdicts(rank_folder(folder, rank))
        if (step is None or verdict["step"] == step) and (only is None or rank == only)
    ]
    # A bad value of one rank reaches the others with the average of the gradients, in the same step.
    return min(known, key=lambda verdict: (verdict["step"], not verdict["found"]), default=None)


def choose_rank(run: Run, step: int) -> int:
    """Return the rank to look at where none is named: the first one whose own loss is bad in that step."""
    for rank in run.ranks if run.info.world_size > 1 else ():
        for series in run.scalars("loss", rank=rank).values():
            values = series.values[series.steps == step]
            if not all(map(math.isfinite, values.tolist())):
                return rank
    return min(run.ranks, default=0)


def first_bad_step(run: Run) -> int | None:
    """Return the first step with a NaN or an infinity in a tensor or in the loss, or None."""
    first = run.first_nonfinite()
    steps = [int(first["step"])] if first is not None else []
    losses = run.scalars().get("loss")
    if losses is not None:
        bad = [int(s) for s, v in zip(losses.steps, losses.values, strict=True) if not math.isfinite(v)]
        steps += bad[:1]
    return min(steps, default=None)
