"""Joins the recorder's report of a bad value with its explanation, the run folder and the user's terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from clew.replay.explain import Explainer
from clew.store.evidence import write_evidence
from clew.store.verdicts import write_verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from clew.capture.torch.recorder import Recorder
    from clew.replay.verdict import Verdict

EXPLAIN_STEP: Final = "_CLEW_EXPLAIN_STEP"
"""Names the step that ``clew why`` wants to have explained when it runs a script again."""


def explain_bad_steps(recorder: Recorder, rank_folder: Path, *, tell: Callable[[str], None] | None) -> None:
    """Have the first bad step of a recording explained, kept in the run and, if wanted, told at once."""

    settings = recorder.settings
    if settings.explain != "fork" and EXPLAIN_STEP not in os.environ:
        return

    def publish(verdict: Verdict) -> None:
        verdict.rank = recorder.rank
        write_verdict(rank_folder, verdict.to_json())
        if tell is not None:
            tell(_lower(verdict))

    wanted = os.environ.get(EXPLAIN_STEP, "")
    recorder.on_bad = Explainer(
        recorder,
        publish,
        from_step=int(wanted) if wanted.isdigit() else 0,
        keep=(lambda step, data: write_evidence(rank_folder, step, data)) if settings.data else None,
    )


def _lower(verdict: Verdict) -> str:
    from clew.render.terminal import Screen, lower
    from clew.views.why_page import make_page

    return lower(make_page(verdict.to_json()), Screen.of(sys.stderr))
