"""The rehearsal before a long run: every check in a copy of the process, so that nothing of it remains."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from clew.model.preflight import Check, Preflight
from clew.replay.fork import run_forked
from clew.replay.preflight_data import check_labels, check_workers
from clew.replay.preflight_learning import (
    check_evaluation,
    check_gradients,
    check_initial_loss,
    check_one_batch,
    check_overfit,
)
from clew.replay.preflight_repeat import REPEATS, check_cost
from clew.replay.preflight_samples import check_batch_size, check_future, check_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from clew.replay.preflight_subject import Subject

_PATIENCE_SECONDS: Final = 45.0

CHECKS: Final[dict[str, Callable[[Subject], Check]]] = {
    "one-batch": check_one_batch,
    "initial-loss": check_initial_loss,
    "gradients": check_gradients,
    "overfit": check_overfit,
    "train-eval": check_evaluation,
    "samples": check_samples,
    "batch-size": check_batch_size,
    "future": check_future,
    "labels": check_labels,
    "workers": check_workers,
    **REPEATS,
    "cost": check_cost,
}
"""Every check by its name, in the order of the report."""


def rehearse(
    subject: Subject,
    *,
    names: Collection[str],
    on_check: Callable[[str, int, int], None] | None = None,
) -> Preflight:
    """Make the checks with these names and return what they found; ``on_check`` is told of each before it begins."""
    started = time.monotonic()
    results: list[Check] = []
    chosen = [name for name in CHECKS if name in names]
    for position, name in enumerate(chosen):
        if on_check is not None:
            on_check(name, position, len(chosen))
        results.append(_make(name, subject))
        if name == "one-batch" and results[-1].status == "failed":
            why = "one batch does not go through"
            results += [Check(other, "not checked", why) for other in chosen[position + 1 :]]
            break
    return Preflight(tuple(results), round(time.monotonic() - started, 2), subject.way)


def _make(name: str, subject: Subject) -> Check:
    if name in REPEATS:
        return CHECKS[name](subject)
    answer = run_forked(lambda: CHECKS[name](subject).to_json(), seconds=_PATIENCE_SECONDS)
    if not answer.trouble:
        return Check(**answer.value)
    if name == "one-batch":
        return Check(
            name, "failed", answer.trouble, "mend this first; the other checks need a step that runs"
        )
    return Check(name, "not checked", f"the check broke off: {answer.trouble.splitlines()[0]}")
