"""Joins the recorder's report of a bad value with its explanation, the run folder and the user's terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.replay.explain import Explainer
from clew.store.evidence import write_evidence
from clew.store.verdicts import write_verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from clew.capture.torch.recorder import Recorder
    from clew.replay.verdict import Verdict

_NEAR: Final = 200
"""Steps from the start of a script that are worth executing again unasked."""


class Explaining:
    """Has the first bad step of a recording explained: at once by a fork, or by a process after the end."""

    def __init__(self, recorder: Recorder, rank_folder: Path, *, tell: Callable[[str], None] | None) -> None:
        self._recorder = recorder
        self._rank_folder = rank_folder
        self._tell = tell
        self._how = recorder.settings.explain
        self._later: int | None = None
        """The bad step that is left for a process of its own."""
        keep = self._keep if recorder.settings.data else None
        self._explainer = Explainer(recorder, self._publish, keep=keep)
        if self._how != "off":
            recorder.on_bad = self

    def __call__(self, kind: str, name: str) -> None:
        """Explain what went bad, or take note of it for later; a process that uses CUDA cannot be forked."""
        # Not torch.cuda.is_available(), which would touch the driver.
        can_fork = hasattr(os, "fork") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if self._how == "fork" and can_fork:
            self._explainer(kind, name)
        elif self._later is None:
            self._later = self._recorder.step

    def explain_later(self, folder: Path) -> None:
        """Have the step that is left explained from the run folder, now that the run is closed."""
        if self._later is None or self._tell is None:
            return
        command = [sys.executable, "-m", "clew", "why", str(folder), "--step", str(self._later), "--json"]
        if self._how == "fork":
            self._tell(f"clew: executing step {self._later} again in a process of its own")
        else:
            self._tell(f"clew: step {self._later} went bad; executing it again in a process of its own")
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        try:
            verdict = json.loads(done.stdout)
            if verdict["found"] or self._how != "fork":
                self._tell(_lower(verdict))
        except ValueError:
            last = done.stderr.strip().splitlines()[-1:] or ["no answer"]
            self._tell(f"clew: it could not be explained: {last[0]}")

    def _keep(self, step: int, data: bytes) -> None:
        write_evidence(self._rank_folder, step, data)

    def _publish(self, verdict: Verdict) -> None:
        verdict.rank = self._recorder.rank
        if verdict.phase == "parameter" and 0 < verdict.step <= _NEAR:
            self._later = verdict.step - 1  # what wrote the weight is executed again when the run is over
        elif not verdict.found and verdict.step <= _NEAR:
            self._later = (
                verdict.step
            )  # something outside the step decides: it is executed again from before it
        write_verdict(self._rank_folder, verdict.to_json())
        if self._tell is not None:
            self._tell(_lower(verdict.to_json()))


def _lower(verdict: dict[str, Any]) -> str:
    from clew.render.terminal import Screen, lower
    from clew.views.why_page import make_page

    return lower(make_page(verdict), Screen.of(sys.stderr))
