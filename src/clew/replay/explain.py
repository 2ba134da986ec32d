"""Explains a bad step at once: a copy of the process executes it again under the lens, the training waits."""

from __future__ import annotations

import functools
import math
import sys
from typing import TYPE_CHECKING, Final

import torch
from torch.overrides import TorchFunctionMode

from clew.capture.assemble import KIND_SHIFT, ORDINAL_MASK, SITE_SHIFT
from clew.capture.torch.leaves import local_part, walk
from clew.logs import room_log
from clew.model.schema import KIND_INDEX
from clew.replay import alone
from clew.replay.evidence import Evidence, pack
from clew.replay.fork import run_forked
from clew.replay.in_memory import InMemory
from clew.replay.reenter import Way, find_ways
from clew.replay.rehearsal import Rehearsal
from clew.replay.verdict import Verdict, judge, name_symptom

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from clew.capture.torch.recorder import Recorder

_log = room_log("replay")
_PATIENCE_SECONDS: Final = 120.0
_OUTPUT: Final = KIND_INDEX["output"]
_EXACTNESS: Final = ("identical", "close", "diverged", "none")
_ENOUGH: Final = 3
"""After so many executions that showed the fault, none of them exact, the best of them has to do."""


class Explainer:
    """Answers the recorder's report of a bad value, once a run: the first fault explains the rest."""

    def __init__(
        self,
        recorder: Recorder,
        publish: Callable[[Verdict], None],
        *,
        keep: Callable[[int, bytes], None] | None = None,
    ) -> None:
        self._keep = keep
        self._recorder = recorder
        self._publish = publish
        self._is_done = False

    def __call__(self, kind: str, name: str) -> None:
        """Explain a bad loss, gradient or parameter of the current step."""
        if self._is_done:
            return
        self._is_done = True
        verdict = self.explain(kind)
        verdict.symptom = verdict.symptom or name_symptom(kind, name)
        self._publish(verdict)

    def explain(self, kind: str) -> Verdict:
        """Try the ways to execute the step again, each in a copy of the process, until one is exact; or the best."""
        recorder = self._recorder
        ways = find_ways(recorder.flight.known_frames, has_gathered=recorder.flight.has_gathered)
        if recorder.flight.is_later_turn:
            ways = [way._replace(is_turn=True) for way in ways] + ways
        ways.append(Way("root calls", self._call_roots))
        if recorder.flight.step_call is not None:
            ways.insert(0, Way("step function", recorder.flight.step_call))
        if modes := _find_modes():
            # What they do belongs to the step as well; most only listen, and stand between an operation and its line.
            ways += [way._replace(run=functools.partial(_run_heard, way.run, modes)) for way in ways]
        notes: list[str] = []
        found: list[Verdict] = []
        for way in ways:
            verdict = run_in_copy(lambda way=way: self._rehearse(way, kind), step=recorder.step)  # type: ignore[misc]
            _log.info(
                "step %d by %s: %s", recorder.step, way.name, "found" if verdict.found else verdict.notes
            )
            if verdict.found:
                verdict.notes = [*notes, *verdict.notes]
                found.append(verdict)
            else:
                notes += [f"{way.name}: {note}" for note in verdict.notes]
            if verdict.replay == "identical" or len(found) == _ENOUGH:
                break
        if not found:
            if alone.has_others() and kind != "loss":
                notes.insert(
                    0, "nothing bad came of this rank's own batch: look at the other ranks' verdicts"
                )
            return Verdict(False, recorder.step, notes=notes)
        return min(found, key=lambda verdict: _EXACTNESS.index(verdict.replay))

    # ---------------------------------------------------------------- inside the copy

    def _rehearse(self, way: Way, kind: str) -> Verdict:
        recorder = self._recorder
        flight = recorder.flight
        if alone.has_others():
            alone.stay_alone()
        memory = InMemory(kind, recorder.registry, is_sum=flight.has_gathered)
        if kind != "loss":
            for _, parameter in recorder.registry.living_parameters():
                parameter.grad = None
        if kind == "parameter":
            self._restore_parameters()
        self._repeat_batch()
        batch = [leaf for call in flight.recorder.calls for _, leaf in walk((call.args, call.kwargs))]
        data = [leaf for leaf in batch if leaf.grad_fn is None and not recorder.registry.owns(leaf)]
        flight.restore(to_turn=way.is_turn)
        rehearsal = Rehearsal(recorder.registry, data)
        evidence = Evidence(rehearsal, flight=flight)
        rehearsal.run(way.run)
        size = data[0].shape[0] if data and data[0].dim() else None
        verdict = judge(rehearsal, step=recorder.step, batch_size=size, way=way.name)
        if verdict.found:
            if alone.has_others():
                verdict.notes.append(alone.NOTE)
            self._compare(rehearsal, verdict, memory)
            self._keep_evidence(evidence, verdict)
        return verdict

    def _keep_evidence(self, evidence: Evidence, verdict: Verdict) -> None:
        """Keep what a test of this step needs; a verdict without a test is better than none."""
        if self._keep is None:
            return
        try:
            self._recorder.flight.restore()
            self._keep(verdict.step, pack(*evidence.build(verdict)))
        except Exception as error:  # noqa: BLE001 - told beside the verdict
            verdict.notes.append(f"no test can be made of it: {type(error).__name__}: {error}")

    def _call_roots(self) -> object:
        return [call.module(*call.args, **call.kwargs) for call in self._recorder.calls]

    def _repeat_batch(self) -> None:
        """A loop that fetches its batch itself gets the same batch again."""
        from torch.utils.data import dataloader

        batch = self._recorder.flight.last_batch
        if batch is not None:
            dataloader._BaseDataLoaderIter.__next__ = lambda _: batch  # type: ignore[assignment,method-assign]

    def _restore_parameters(self) -> None:
        with torch.no_grad():
            for entry, parameter in self._recorder.registry.living_parameters():
                if entry.shadow is not None:
                    local_part(parameter).copy_(entry.shadow)

    def _compare(self, rehearsal: Rehearsal, verdict: Verdict, memory: InMemory) -> None:
        """Say how well the copy reproduced the step: hashes where it was recorded, else what is left in memory."""
        recorded = self._recorded_hashes()
        if not recorded:
            self._compare_unrecorded(rehearsal, verdict, memory)
            return
        seen: dict[str, list[int]] = {}
        for name, number in rehearsal.prints:
            seen.setdefault(name, []).append(number)
        for name, numbers in recorded.items():
            mine = seen.get(name, [])
            # Of a step that gathers gradients over several turns of the loop, the last one is executed again.
            theirs = numbers[-len(mine) :] if self._recorder.flight.has_gathered else numbers[: len(mine)]
            if mine and mine[: len(numbers)] != theirs:
                verdict.replay = "diverged"
                verdict.notes.append(f"the replay diverged from the recording at {name}")
                return
        verdict.replay = "identical"

    def _compare_unrecorded(self, rehearsal: Rehearsal, verdict: Verdict, memory: InMemory) -> None:
        same = self._is_same_loss(rehearsal)
        equal = memory.count_equal(rehearsal) if same else 0
        if equal > 0:
            verdict.replay = "identical"
            what = "tensor equals that" if equal == 1 else "tensors equal those"
            verdict.notes.append(f"this step was not recorded in full; {equal} {what} still in memory")
            return
        if equal < 0:
            verdict.replay = "diverged"
            verdict.notes.append("the replay differs from what is still in memory of the step")
            return
        if self._recorder.last_loss is None:
            verdict.notes.append("nothing of this step was recorded that it could be compared with")
            return
        verdict.replay = "close" if same else "diverged"
        verdict.notes.append("this step was not recorded in full: only the loss could be compared")

    def _is_same_loss(self, rehearsal: Rehearsal) -> bool:
        recorded, last = self._recorder.last_loss, rehearsal.losses[-1] if rehearsal.losses else None
        if recorded is None or last is None:
            return False
        return recorded == last or (math.isnan(recorded) and math.isnan(last))

    def _recorded_hashes(self) -> dict[str, list[int]]:
        recorder = self._recorder
        if not recorder.hashes or recorder.rows.hashes is None:
            return {}
        found: dict[str, list[int]] = {}
        copies = dict(recorder.copies)
        for row, key in enumerate(recorder.keys):
            if key >> KIND_SHIFT & 0xFF == _OUTPUT and key & ORDINAL_MASK < 15:
                name = recorder.sites[key >> SITE_SHIFT].name
                found.setdefault(name, []).append(int(recorder.rows.hashes[copies.get(row, row)]))
        return found


def _run_heard(action: Callable[[], object], modes: list[TorchFunctionMode]) -> object:
    """Run an action in a copy of the process as the user's modes have it."""
    for (
        mode
    ) in modes:  # the frame that is reached first is that of the lowest: the ones above it were asked before
        torch._C._push_on_torch_function_stack(mode)
    with torch._C._EnableTorchFunction():
        return action()


def _find_modes() -> list[TorchFunctionMode]:
    """Return the torch-function modes that are answering a call: while one does so, it is off its stack."""
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        if frame.f_code.co_name == "__torch_function__" and frame.f_code.co_argcount:
            mode = frame.f_locals.get(frame.f_code.co_varnames[0])
            found += [mode] if isinstance(mode, TorchFunctionMode) else []
        frame = frame.f_back
    return found


# ------------------------------------------------------------------------ copies of the process


def run_in_copy(action: Callable[[], Verdict], *, step: int) -> Verdict:
    """Run an action in a forked copy of the process and return its verdict; the copy leaves no trace."""
    answer = run_forked(lambda: action().to_json(), seconds=_PATIENCE_SECONDS)
    if answer.trouble or answer.value is None:
        return Verdict(
            False, step, notes=[answer.trouble or "the copy of the process ended without an answer"]
        )
    return Verdict(**answer.value)
