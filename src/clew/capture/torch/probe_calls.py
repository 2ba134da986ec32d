"""Notes layers that are used in a way they are not made for: dropout that stays on, or drops all; too few values."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from clew.capture.torch.gates import Gates
from clew.capture.torch.probe_functions import FunctionWatch
from clew.capture.torch.probe_sensitive import find_extreme_dropout, list_spectral_vectors

if TYPE_CHECKING:
    from clew.capture.torch.listeners import Call
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.probe_functions import Look
    from clew.capture.torch.probe_modes import ModeProbe
    from clew.capture.torch.recorder import Recorder

_TRAINING_LOOKS: Final = 1
_EVAL_LOOKS: Final = 2
_FEWEST_VALUES: Final = 2
_FEW_CALLS: Final = 3
_EXTREME: Final = 0.9
_MOST_PENDING: Final = 16


class _Seen:
    """How often a root was looked into, and what waits until it is known to be trained."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.ref = weakref.ref(module)
        self.training = 0
        self.evaluating = 0
        self.pending: list[tuple[str, dict[str, Any]]] = []


class CallProbe:
    """Looks into the first calls of every model, and at every batch normalisation."""

    def __init__(self, recorder: Recorder, events: LoopEvents, modes: ModeProbe) -> None:
        self.recorder = recorder
        self.events = events
        self.modes = modes
        self._seen: dict[int, _Seen] = {}
        self._norms: dict[str, list[int]] = {}
        self._told: set[str] = set()
        self._functions = FunctionWatch(Gates(recorder), self._fail)

    def _fail(self, error: Exception) -> None:
        self.recorder.guard.fault(error, "functions inside a root call", step=self.recorder.step)

    def install(self, patches: Patches) -> None:
        """Begin to look into calls."""
        self._functions.install(patches)
        self.recorder.around = self._around
        patches.on_undo(self._let_go)
        patches.listen(self.recorder.on_call, self._see_call)
        patches.listen(self.events.on_stepped, self._see_stepped)
        self.recorder.note("probe", {"probe": "calls"})

    def look_again(self) -> None:
        """Look into the next calls of every model."""
        for seen in self._seen.values():
            seen.training = 0

    def is_settled(self) -> bool:
        """Return whether nothing waits to be told, and no normalisation was given few values."""
        is_waiting = any(seen.pending for seen in self._seen.values())
        return not is_waiting and not any(few for few, _ in self._norms.values())

    def _let_go(self) -> None:
        self.recorder.around = None

    # ---------------------------------------------------------------- root calls

    def _around(self, module: torch.nn.Module) -> Look | None:
        """Return the look into a root call that is worth it."""
        seen = self._seen.get(id(module))
        if seen is None or seen.ref() is not module:
            if self.modes.find(module) is None:
                return None
            seen = self._seen[id(module)] = _Seen(module)
        if module.training:
            if seen.training >= _TRAINING_LOOKS or not torch.is_grad_enabled():
                return None
            seen.training += 1
            self._scan_dropout(module)
        else:
            if seen.evaluating >= _EVAL_LOOKS:
                return None
            seen.evaluating += 1
            if seen.evaluating == 1:
                seen.pending.append(("eval-call", {}))
                self._tell(seen)
            if not seen.training:
                self._scan_spectral(module, seen)
        if self.recorder.in_backward or _is_transformed():
            return None
        is_training, known = module.training, seen
        return self._functions.look(module, lambda facts: self._take(known, facts, is_training))

    def _take(self, seen: _Seen, facts: dict[str, Any], is_training: bool) -> None:
        """Keep what a function was called with; this runs inside the user's forward and must not raise."""
        try:
            if "values" in facts:
                if is_training and facts["values"] <= _FEWEST_VALUES:
                    self._note_once("few-values", {"site": facts["function"], "calls": 1, "of": 1, **facts})
            elif is_training:
                if facts["p"] >= _EXTREME:
                    self._note_once("extreme-dropout", {"site": facts["function"], **facts})
            elif len(seen.pending) < _MOST_PENDING:
                seen.pending.append(("dropout-in-eval", facts))
                self._tell(seen)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self.recorder.guard.fault(error, "functions of a forward", step=self.recorder.step)

    def _see_stepped(self, _optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        for seen in self._seen.values():
            if seen.pending:
                self._tell(seen)

    def _tell(self, seen: _Seen) -> None:
        """What was seen of a model counts once the model is trained."""
        module = seen.ref()
        root = self.modes.find(module) if module is not None else None
        if root is not None and root.is_trained:
            for kind, facts in seen.pending:
                self.recorder.note(kind, {"root": self.modes.name(root), **facts})
            seen.pending.clear()

    def _scan_dropout(self, module: torch.nn.Module) -> None:
        for name, probability in find_extreme_dropout(module):
            self._note_once("extreme-dropout", {"site": name, "p": probability, "source": ""})

    def _scan_spectral(self, module: torch.nn.Module, seen: _Seen) -> None:
        """An estimate that was never written to is a random one; loading or training writes to it."""
        raw = [name for name, _, vector in list_spectral_vectors(module) if vector._version == 0]
        if raw:
            seen.pending.append(("raw-spectral-norm", {"layers": raw[:8], "count": len(raw)}))
            self._tell(seen)

    def _note_once(self, kind: str, data: dict[str, Any]) -> None:
        key = f"{kind} {data['site']}"
        if key not in self._told and len(self._told) < 4 * _MOST_PENDING:
            self._told.add(key)
            self.recorder.note(kind, data)

    # ---------------------------------------------------------------- batch normalisation

    def _see_call(self, call: Call) -> None:
        module = call.module
        if not isinstance(module, _BatchNorm) or not module.training or isinstance(module, SyncBatchNorm):
            return
        given = call.args[0] if call.args else None
        if not isinstance(given, torch.Tensor) or given.dim() < 2 or not given.shape[1]:
            return
        values = given.numel() // given.shape[1]
        counts = self._norms.setdefault(call.entry.name, [0, 0])
        counts[1] += 1
        if values > _FEWEST_VALUES:
            return
        counts[0] += 1
        if counts[0] >= _FEW_CALLS and 2 * counts[0] >= counts[1]:
            few, of = counts
            self._note_once(
                "few-values",
                {"site": call.entry.name, "values": values, "calls": few, "of": of, "source": ""},
            )


def _is_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None
