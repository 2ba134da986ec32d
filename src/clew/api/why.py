"""Why a step went wrong: the verdict made while the run went on, or a new one from running the script again."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clew.errors import UsageError
from clew.store.layout import list_ranks, rank_folder
from clew.store.verdicts import read_verdicts

if TYPE_CHECKING:
    from clew.query import Run


def why(run: Run, *, step: int | None = None, rerun: bool = False) -> dict[str, Any]:
    """Return the verdict on a run's bad step, or on a step of one's choice.

    A verdict made while the run went on is returned as it is. Otherwise the script is run again, up to that step,
    with the command it was recorded with; ``rerun`` asks for that even when a verdict is there.
    """
    known = _known_verdict(run.path, step)
    if known is not None and not rerun:
        return known
    wanted = step if step is not None else first_bad_step(run)
    if wanted is None:
        return {
            "found": False, "step": run.last_step, "rank": 0, "phase": "", "op": "", "site": "",
            "source": {"file": "", "line": 0, "text": ""}, "elements": [], "sample": None, "chain": [],
            "replay": "none", "hint": "", "notes": ["nothing in this run was NaN or infinite"],
        }  # fmt: skip
    return _run_again(run, wanted)


def _known_verdict(folder: Path, step: int | None) -> dict[str, Any] | None:
    for rank in list_ranks(folder) if folder.is_dir() else ():
        for verdict in read_verdicts(rank_folder(folder, rank)):
            if step is None or verdict["step"] == step:
                return {**verdict, "rank": rank}
    return None


def first_bad_step(run: Run) -> int | None:
    first = run.first_nonfinite()
    steps = [int(first["step"])] if first is not None else []
    losses = run.scalars().get("loss")
    if losses is not None:
        bad = [int(s) for s, v in zip(losses.steps, losses.values, strict=True) if not math.isfinite(v)]
        steps += bad[:1]
    return min(steps, default=None)


def _run_again(run: Run, step: int) -> dict[str, Any]:
    """Run the recorded command again with the lens set for one step; what it records is thrown away."""
    command, info = list(run.info.command), run.info
    if not command or not info.cwd or not info.is_script:
        raise UsageError(
            "this run was not started by 'clew run', so its step cannot be executed again",
            where=str(run.path),
            next_step="record it with 'clew run train.py', or use clew.explain_nonfinite(step_function)",
        )
    if any("(hidden)" in word for word in command):
        raise UsageError(
            "the recorded command had a secret in it, which was not kept",
            where=str(run.path),
            next_step="run the script again under 'clew run' with the same arguments",
        )
    from clew.api.explaining import EXPLAIN_STEP

    with tempfile.TemporaryDirectory(prefix="clew-why-") as folder:
        words = ["-m", command[0]] if info.is_module else [command[0]]
        start = [sys.executable, "-m", "clew", "run", "--out", folder, "--name", "again", "--no-status"]
        environment = {**os.environ, EXPLAIN_STEP: str(step)}
        done = subprocess.run(
            [*start, "--", *words, *command[1:]],
            cwd=info.cwd,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        verdict = _known_verdict(Path(folder) / "again", None)
    if verdict is None:
        tail = done.stderr.strip().splitlines()[-3:]
        raise UsageError(
            f"running the script again did not come to a bad value at step {step}",
            where=" ".join(command),
            next_step="; ".join(tail) or "record the run again with 'clew run'",
        )
    verdict["notes"] = [*verdict.get("notes", []), "made by running the script again from its beginning"]
    return verdict
