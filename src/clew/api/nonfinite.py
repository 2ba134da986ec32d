"""Looking for the first NaN or infinity without a recording: around one's own code, or in one function."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from clew.errors import UsageError
from clew.model.glob import split_patterns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from clew.replay.tracer import Tracer
    from clew.replay.verdict import Verdict


def trace_nonfinite(
    *,
    deferred: bool = False,
    raises: bool = True,
    allow: str | Iterable[str] = (),
    allow_ops: str | Iterable[str] = (),
) -> Tracer:
    """Return a context manager that watches every operation, forward, backward and in the optimizer.

    The first operation that makes a NaN or an infinity out of finite numbers raises ``NonFiniteError`` at once; with
    ``deferred`` the block goes on until a loss, gradient or weight is bad, and only what led there is blamed. With
    ``raises=False`` nothing is raised and ``findings`` fills up. ``allow`` are patterns of sites, ``allow_ops`` names
    of operations that may.
    """
    from clew.replay.tracer import Tracer

    return Tracer(deferred=deferred, raises=raises, sites=_texts(allow), ops=_texts(allow_ops))


def explain_nonfinite(function: Callable[[], Any], *, in_process: bool | None = None) -> Verdict:
    """Call a function under the lens and return what made the first NaN or infinity in it.

    The function does what goes wrong: forward, backward, optimizer step. It runs in a copy of the process, so nothing
    it does remains; where there can be no copy, or with ``in_process``, weights, buffers, gradients, optimizers and
    random states are put back instead.
    """
    if not callable(function):
        raise UsageError(
            f"expected a function without arguments, got a {type(function).__name__}",
            where="clew.explain_nonfinite(function)",
            next_step="write clew.explain_nonfinite(lambda: loss_of(model, batch).backward())",
        )
    from clew.capture import current
    from clew.replay.explain import run_in_copy

    session = current.active()
    step = session.step if session is not None else 0
    if in_process if in_process is not None else not _can_copy():
        return _explain(function, step, in_process=True)
    return run_in_copy(lambda: _explain(function, step, in_process=False), step=step)


def _explain(function: Callable[[], Any], step: int, *, in_process: bool) -> Verdict:
    from clew.capture.sites import SiteTable
    from clew.capture.torch.registry import Registry
    from clew.replay.rehearsal import Rehearsal
    from clew.replay.untouched import untouched
    from clew.replay.verdict import judge

    rehearsal = Rehearsal(Registry(SiteTable(("*",))), adopts=True)
    with untouched(rehearsal.lens) if in_process else contextlib.nullcontext():
        rehearsal.run(function)
        verdict = judge(rehearsal, step=step, batch_size=rehearsal.batch_size, way="function")
    if not verdict.found:
        error = rehearsal.error
        verdict.notes = [
            "nothing was NaN or infinite" if error is None else f"it raised {type(error).__name__}: {error}"
        ]
    return verdict


def _can_copy() -> bool:
    import torch

    return hasattr(os, "fork") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _texts(value: str | Iterable[str]) -> tuple[str, ...]:
    return split_patterns(value) if isinstance(value, str) else tuple(value)
