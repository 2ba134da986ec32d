"""The op lens over a stretch of one's own code: the first bad operation raises, or is kept as a finding."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from torch.optim.optimizer import register_optimizer_step_post_hook

from clew.capture import current
from clew.capture.sites import SiteTable
from clew.capture.torch.registry import Registry
from clew.errors import NonFiniteError
from clew.model.glob import compile_globs
from clew.replay.rehearsal import Rehearsal, Symptom
from clew.replay.verdict import Verdict, judge
from clew.replay.words import say

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from clew.replay.lens import Event, OpLens

_MOST_FINDINGS: Final = 20


class Allowance:
    """What may be NaN or infinite: operations by name, sites by pattern, and whatever is computed from them alone."""

    def __init__(self, lens: OpLens, sites: tuple[str, ...], ops: tuple[str, ...]) -> None:
        self._events = lens.events
        self._fits: Callable[[str], bool] = compile_globs(sites) if sites else lambda _: False
        self._ops = {op.rstrip("_") for op in ops}
        self._allowed: set[int] = set()

    def __call__(self, event: Event) -> bool:
        """Say whether a bad operation is one that may be."""
        made = [value.producer for value in event.inputs if value.is_bad and value.producer >= 0]
        if any(not self._events[producer].meant for producer in made):
            return False
        carried = bool(made) and all(producer in self._allowed for producer in made)
        if carried or self._is_listed(event):
            self._allowed.add(event.index)
            return True
        return False

    def allow(self, event: Event) -> None:
        """Let an operation pass that has been told of."""
        event.meant = True
        self._allowed.add(event.index)

    def forget(self) -> None:
        """A new step begins, and its operations are numbered from 0 again."""
        self._allowed.clear()

    def _is_listed(self, event: Event) -> bool:
        cause = self._events[event.forward] if event.forward >= 0 else event
        names = {event.op.rstrip("_"), cause.op.rstrip("_")}
        return bool(names & self._ops) or self._fits(cause.site)


class Tracer:
    """Watches the operations of a ``with`` block. ``findings`` holds a verdict for each bad one it told of."""

    def __init__(self, *, deferred: bool, raises: bool, sites: tuple[str, ...], ops: tuple[str, ...]) -> None:
        self.findings: list[Verdict] = []
        self._deferred = deferred
        self._raises = raises
        self._step = 0
        self._is_told = False
        self._rehearsal = Rehearsal(Registry(SiteTable(("*",))), on_symptom=self._take_symptom, adopts=True)
        lens = self._rehearsal.lens
        self._allowance = lens.excuse = Allowance(lens, sites, ops)
        if not deferred:
            lens.on_bad = self._take_event
        self._stack = contextlib.ExitStack()

    @property
    def verdict(self) -> Verdict | None:
        """The first finding, or None as long as everything is finite."""
        return self.findings[0] if self.findings else None

    def __enter__(self) -> Tracer:
        session = current.active()
        self._step = session.step if session is not None else 0
        self._rehearsal.install()
        self._stack.callback(self._rehearsal.remove)
        self._stack.callback(register_optimizer_step_post_hook(self._end_step).remove)
        self._stack.enter_context(self._rehearsal.lens)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None and self._deferred and not self._is_told and not self._rehearsal.losses:
            self._look_at_the_end()

    # ---------------------------------------------------------------- what is bad

    def _take_event(self, event: Event) -> None:
        """Immediate: the operation itself is the place to stop."""
        self._rehearsal.symptom = Symptom("operation", event.op, event.index, None)
        verdict = self._judge()
        # Whatever is computed from it is its fault, not one of its own.
        self._allowance.allow(event)
        self._tell(verdict)

    def _take_symptom(self, _: Symptom) -> None:
        """Deferred: a loss, gradient or weight is bad; what never gets that far is not blamed.

        In immediate mode its operation was told of already, unless the value was bad before the block began.
        """
        if not self._is_told:
            self._tell(self._judge())

    def _look_at_the_end(self) -> None:
        self._rehearsal.take_last_operation()
        if self._rehearsal.symptom is not None:
            self._tell(self._judge())

    def _judge(self) -> Verdict:
        return judge(self._rehearsal, step=self._step, batch_size=self._rehearsal.batch_size, way="trace")

    def _tell(self, verdict: Verdict) -> None:
        self._is_told = True
        if len(self.findings) < _MOST_FINDINGS:
            self.findings.append(verdict)
        if self._raises:
            raise as_error(verdict)

    def _end_step(self, *_: Any) -> None:
        self._step += 1
        self._is_told = False
        self._rehearsal.begin_step()
        self._allowance.forget()


def as_error(verdict: Verdict) -> NonFiniteError:
    """Return the error that tells of a verdict."""
    source = verdict.source
    where = f"{source['file']}:{source['line']}: {source['text']}" if source["file"] else verdict.site
    return NonFiniteError(say(verdict.to_json()), where=where, next_step=verdict.hint, verdict=verdict)
