"""A script on its way to one step: where the step begins, its execution under the lens, where it ends.

The script runs as it always does; the stage listens to the recorder for the beginning and the end of steps and compares
each with the recording. Nobody unwinds the script: when all is known the process answers and is gone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from clew.capture.schedule import Schedule
from clew.capture.torch.patches import Patches
from clew.replay.exactness import Comparison
from clew.replay.rehearsal import Rehearsal

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.session import TorchSession
    from clew.replay.exactness import Recorded
    from clew.replay.process import Child
    from clew.replay.rehearsal import Symptom
    from clew.replay.restore import Jump

    Around = Callable[["Stage"], Callable[[], Any] | None]


_MOST_STEPS_BEFORE: Final = 8
"""Steps that a script may take before it is where a snapshot was taken, such as after the second optimizer."""


class ChosenSteps(Schedule):
    """Records the steps that there is something to compare with, and no others."""

    def __init__(self, steps: frozenset[int]) -> None:
        super().__init__(every=1, budget=None, warmup_steps=0)
        self._steps = steps

    def is_due(self, step: int) -> bool:
        """Return whether this step is recorded in full."""
        return step in self._steps

    def is_probed(self, step: int) -> bool:  # noqa: ARG002 - the interface of every schedule
        """No rules look here."""
        return False

    def force(self, step: int, *, steps: int, is_probed: bool = True) -> None:
        """A finding makes no difference: the comparison wants what the recording has."""


class Stage:
    """Executes a script up to the end of one step. ``around`` is called where that step begins."""

    def __init__(
        self,
        session: TorchSession,
        child: Child,
        *,
        step: int,
        way: str,
        recorded: Recorded,
        around: Around | None,
        is_last: bool,
        is_loud: bool = False,
        jump: Jump | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.session = session
        self.recorder = session.recorder
        self.step = step
        self.way = way
        self.so_far = Comparison()
        """How the steps before this one, and at the end this one too, compare with the recording."""
        self.rehearsal = Rehearsal(self.recorder.registry, on_symptom=self._show)
        self.on_symptom: Callable[[Symptom], None] | None = None
        """Called with each bad loss, gradient or parameter; the first one stays in ``rehearsal.symptom``."""
        self.first_step = 0
        self.reasons: list[str] = []
        """Sentences about what may make this execution differ from the recorded one."""
        self._child = child
        self._recorded = recorded
        self._around = around
        self._after: Callable[[], Any] | None = None
        self._is_last = is_last
        self._is_loud = is_loud
        self._jump = jump
        self._release = release
        self._is_live = False
        self._is_over = False
        self._depth = 0
        self._first_symptom: Symptom | None = None
        self._patches = Patches()

    # ---------------------------------------------------------------- on the way

    def attach(self) -> None:
        """Listen to the recorder; called after its session has started."""
        recorder = self.recorder
        recorder.schedule = ChosenSteps(self._recorded.full_steps | {self.step})
        recorder.due = recorder.schedule.is_due(recorder.step)
        recorder.probing = False
        recorder.on_bad, recorder.is_followed = None, True
        end_step, mark_end = recorder.end_step, recorder.mark_end

        def ends(*, partial: bool = False) -> None:
            self._attempt(self._before_end)
            end_step(partial=partial)
            if self._depth and self._is_here() and not self.session.optimizers.seen:
                self._begin()  # of a loop without a backward only the call tells that is going on

        def marks() -> None:
            mark_end()
            self._attempt(self._after_optimizer)

        recorder.end_step, recorder.mark_end = ends, marks  # type: ignore[method-assign]
        recorder.on_batch.append(self._take_batch)
        self.rehearsal.listen()
        self._patches.replace(torch.nn.Module, "_call_impl", self._make_call)

    def _attempt(self, action: Callable[[], None]) -> None:
        """The script must not see a fault of ours, and there is nothing to go on for."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - told with the answer
            self._child.answer({"error": f"{type(error).__name__}: {error}", "way": self.way})

    def _before_end(self) -> None:
        recorder = self.recorder
        if self._is_live:
            self.rehearsal.look_at_parameters()
            self.finish()
        if self.first_step <= recorder.step < self.step:
            self.so_far.add_step(recorder, self._recorded)
            if self.so_far.diverged_at and not self._is_last:
                self._give_up()

    def _try_jump(self, jump: Jump) -> None:
        """An optimizer has stepped for the first time; if the snapshot was taken at such a place, go there."""
        recorder = self.recorder
        if not jump.fits(self.session):
            if recorder.step >= _MOST_STEPS_BEFORE:
                self.reasons.append("in its first steps the script never was where the snapshot was taken")
                self._give_up()
            return
        try:
            jump.restore(self.session)
        except Exception as error:  # noqa: BLE001 - the script must not see it; another way is tried
            self.reasons.append(f"the snapshot cannot be restored: {type(error).__name__}: {error}")
            self._give_up()
        self.reasons += jump.notes
        jump.notes = self.reasons  # what it finds later is told as well
        self.first_step = jump.step
        recorder.end_step()
        recorder.step = jump.step
        recorder.due = recorder.schedule.is_due(jump.step)
        recorder.on_pass.append(self._look_at_old_gradients)
        if self.way == "calls":
            self._execute_calls(jump)

    def _look_at_old_gradients(self, is_beginning: bool) -> None:
        """The first backward after the jump: gradients that are there already were not in the snapshot."""
        self.recorder.on_pass.remove(self._look_at_old_gradients)
        if self._jump is not None and is_beginning:
            kept = (tensor.grad for _, tensor in self.recorder.registry.living_parameters() if tensor.is_leaf)
            self._jump.has_old_gradients = any(grad is not None and bool(grad.any()) for grad in kept)

    def _execute_calls(self, jump: Jump) -> NoReturn:
        """Call the root modules with what they were called with, and nothing else of the step."""
        recorder = self.recorder
        named = {entry.name: key for key, entry in recorder.registry.modules.items()}
        living = {id(module): module for tree in recorder.registry.trees for module in _modules_of(tree)}
        self._begin()
        for name, given in jump.calls:
            module = living.get(named.get(name, -1))
            if module is not None and given is not None:
                self.rehearsal.add_batch(given)
                module(*given["args"], **given["kwargs"])
        self.finish()

    def _after_optimizer(self) -> None:
        """The optimizer has stepped: without a loader and with one optimizer, the next step begins right here."""
        recorder = self.recorder
        if self._jump is not None and not self._has_jumped:
            self._try_jump(self._jump)
        if self._is_live or recorder.flight.has_loader or len(self.session.optimizers.entries) > 1:
            return
        if recorder.step == self.step - 1 and recorder.closing:
            recorder.before_event()
        if self._is_here():
            self._begin()

    def _take_batch(self, _iterator: Any, batch: Any) -> None:
        if self._is_live:
            self.rehearsal.add_batch(batch)
        elif self._is_here() and self.recorder.registry.modules:
            self.rehearsal.add_batch(batch)
            self._begin()

    def _make_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _call_impl(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = original
            if not self._depth:
                was_live, has_jumped = self._is_live, self._has_jumped
                self._end_manual_step()
                if self._jump is not None and self._has_jumped and not has_jumped:
                    # A loop without an optimizer: its next step has begun by the time it is seen.
                    args, kwargs = self._jump.exchange(args, kwargs)
                self._before_root((args, kwargs))
                if self._is_live and not was_live:
                    # The step began with this call: it has to pass what was installed a moment ago.
                    call = torch.nn.Module._call_impl
            self._depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._depth -= 1

        return _call_impl

    @property
    def _has_jumped(self) -> bool:
        return self._jump is None or self._jump.is_done

    def _end_manual_step(self) -> None:
        """In a loop without an optimizer it is the next call of the model that tells of the end of a step."""
        if not self._is_live and (not self._has_jumped or self.recorder.step == self.step - 1):
            self.recorder.before_event()
            self.session.end_manual_step()

    def _before_root(self, given: Any) -> None:
        """Take note of a root call that starts now: the step may begin with it."""
        begins = not self._is_live and self._is_here()
        if self._is_live or begins:
            self.rehearsal.add_batch(given)
        if begins:
            self._begin()

    @property
    def _is_bare(self) -> bool:
        """Whether the script trains bare tensors, with neither modules nor an optimizer."""
        return not self.recorder.registry.trees and not self.session.optimizers.seen

    def _is_here(self) -> bool:
        return self.recorder.step == self.step and not self.recorder.closing

    # ---------------------------------------------------------------- the step itself

    def _begin(self) -> None:
        if self._is_live or self._is_over:
            return
        self._is_live = True
        if self._is_bare:
            self.rehearsal.backward_ended = 0  # such a step begins with its backward
        self._attempt(self._open)

    def _open(self) -> None:
        if self._is_loud:
            self._child.speak()
        self._after = self._around(self) if self._around is not None else None
        self.rehearsal.install()
        self.rehearsal.lens.__enter__()  # type: ignore[no-untyped-call]

    def _show(self, symptom: Symptom) -> None:
        if symptom.kind == "loss" and self._is_bare and self._first_symptom is None:
            # Only the next backward tells of the end of the step, and its loss may be bad by what this step wrote.
            self.rehearsal.look_at_parameters()
        self._first_symptom = self._first_symptom or symptom
        if self.on_symptom is not None:
            self.on_symptom(symptom)

    def fork(self, action: Callable[[], object] | None = None) -> int:
        """Run an action in a copy of the process as it is now, wait, and return how it ended.

        Without an action the copy goes on with the script: ``fork`` returns -1 there, and ``finish`` ends it.
        """
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if action is None:
            return -1
        try:
            action()
        finally:
            os._exit(0)

    def finish(self, *, error: str = "") -> NoReturn:
        """End the execution here and now: compare, let ``after`` speak, answer."""
        self._is_over = True
        if self._release is not None:
            self._release()
        lens = self.rehearsal.lens
        if _get_current_dispatch_mode() is lens:
            lens.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.rehearsal.remove()
        self.rehearsal.symptom = self._first_symptom
        if self._is_live:
            self.so_far.add_step(self.recorder, self._recorded, losses=self.rehearsal.losses)
        else:
            error = error or f"the script ended in step {self.recorder.step}, before step {self.step}"
        is_accepted = self._is_last or not self.so_far.diverged_at
        try:
            result = self._after() if self._after is not None and is_accepted else None
        except Exception as fault:  # noqa: BLE001 - told with the answer
            result, error = None, error or f"{type(fault).__name__}: {fault}"
        self._child.answer(self._describe(result, error))

    def end(self, error: str) -> NoReturn:
        """The script has come to its end; what it was in the middle of ends with it."""
        if not self._is_live and self.recorder.closing:
            self.recorder.end_step()
        elif self._is_live:
            self.rehearsal.look_at_parameters()
        self.finish(error=error)

    def _give_up(self) -> NoReturn:
        self._child.answer(self._describe(None, ""))

    def _describe(self, result: Any, error: str) -> dict[str, Any]:
        if self._jump is not None and self.so_far.diverged_at:
            self.reasons += self._jump.suspect()
        return {
            "way": self.way,
            "from_step": self.first_step,
            "exactness": self.so_far.exactness,
            "diverged_at": self.so_far.diverged_at or self.so_far.close_at,
            "compared": {"losses": self.so_far.losses, "hashes": self.so_far.hashes},
            "reasons": self.reasons,
            "was_executed": self._is_live,
            "result": result,
            "error": error,
        }


def _modules_of(tree: Any) -> list[torch.nn.Module]:
    top = tree.ref()
    return list(top.modules()) if top is not None else []
