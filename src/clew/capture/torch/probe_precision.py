"""Notes loss scaling that is left out halfway, half-precision weights that Adam cannot train, slow settings left on."""

from __future__ import annotations

import weakref
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.probe_events import find_line

if TYPE_CHECKING:
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

_MOST_NOTES: Final = 4
_SLOW_PASSES: Final = 20
_SMALLEST_HALF: Final = 6e-8
_CUT_LOOKS: Final = 6
"""Scaled backward passes whose gradients are compared with those that the scaler's step then finds."""

_FEWEST_NUMBERS: Final = 8
_MOST_NUMBERS: Final = 4096
_CUT_SHARE: Final = 0.1
_CLIPPED: Final = 3
"""Steps with one and the same norm of the gradients, whatever it was before, that make a clipping."""


class PrecisionProbe:
    """Follows a GradScaler from the loss to the step, and looks once at every optimizer."""

    def __init__(self, recorder: Recorder, events: LoopEvents) -> None:
        self.recorder = recorder
        self.events = events
        self._scaler: Any = None
        self._was_scaled = False
        self._is_scaled_pass = False
        self._inside = 0
        self._stepped: set[int] = set()
        self._counts: dict[str, int] = {}
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._anomalies = 0
        self._passes = 0
        self._given: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._tops: dict[int, tuple[float, float]] = {}
        self._cut_looks = 0
        self._norms: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[float, list[tuple[float, float]]]
        ] = weakref.WeakKeyDictionary()
        """By optimizer: the norm of its scaled gradients after backward, and the norms before and at each step."""

    def install(self, patches: Patches) -> None:
        """Begin to follow."""
        patches.listen(self.events.on_scaled, self._see_scaled)
        patches.listen(self.recorder.on_pass, self._see_pass)
        patches.listen(self.events.on_clipped, self._see_clip)
        patches.listen(self.events.on_scaler_step, self._see_scaler_step)
        patches.listen(self.events.on_stepping, self._see_stepping)
        self.recorder.note("probe", {"probe": "precision"})

    def is_settled(self) -> bool:
        """Return whether no loss is scaled, and no slow mode is on."""
        return self._scaler is None and not self._anomalies

    # ---------------------------------------------------------------- scaling

    def _see_scaled(self, scaler: Any) -> None:
        self._scaler = scaler
        self._was_scaled = True

    def _see_pass(self, begins: bool) -> None:
        if not begins:
            self._keep_tops()
            return
        self._is_scaled_pass, self._was_scaled = self._was_scaled, False
        self._stepped.clear()
        self._passes += 1
        if torch.is_anomaly_enabled():
            self._anomalies += 1
            if self._anomalies == _SLOW_PASSES and 2 * self._anomalies > self._passes:
                self.recorder.note("slow-setting", {"setting": "anomaly mode", "passes": self._anomalies})

    def _see_clip(self, parameters: list[torch.Tensor], _norm: Any) -> None:
        if self._is_scaled_pass and self._is_waiting(parameters):
            self._note("clip")

    def _see_scaler_step(self, scaler: Any, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        self._inside = max(
            self._inside + (1 if begins else -1), 0
        )  # one that began while this was resting ends
        if not begins:
            self._stepped.add(id(optimizer))
        if begins and self._is_scaled_pass and _scale_of(scaler) > 1.0:
            self._given.add(optimizer)
            if _stage(scaler, optimizer) == "READY":
                self._judge_cut(scaler, optimizer)
        if not begins or not self._passes or self._is_scaled_pass or _scale_of(scaler) <= 1.0:
            return
        if _stage(scaler, optimizer) == "READY" and _has_gradients(optimizer):
            self._scaler = scaler
            self._note("unscaled loss", optimizer)

    def _see_stepping(self, optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            self._see_optimizer(optimizer)
        if self._inside or not self._is_scaled_pass or self._scaler is None or id(optimizer) in self._stepped:
            return
        is_scaled = _scale_of(self._scaler) > 1.0 and _stage(self._scaler, optimizer) == "READY"
        if is_scaled and _has_gradients(optimizer):
            self._note("step", optimizer)

    def _judge_cut(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scaler = scaler
        is_clipped = self._were_clipped(optimizer)
        if self._were_cut(optimizer):
            self._note("cut", optimizer)
        elif is_clipped:
            self._note("clipped", optimizer)

    def _were_clipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether gradients have one norm at every step that they did not have after backward."""
        before, norms = self._norms.get(optimizer, (0.0, []))
        if before:
            norms.append((before, _measure_norm(optimizer)))
        smaller = [(first, last) for first, last in norms[-_CLIPPED:] if last < 0.999 * first]
        if len(smaller) < _CLIPPED:
            return False
        first, last = zip(*smaller, strict=True)
        return bool(max(last) <= 1.001 * min(last) and max(first) > 1.01 * min(first))

    def _keep_tops(self) -> None:
        """Remember how many numbers of some scaled gradients lie at their top, before anybody can clip them."""
        self._tops.clear()
        if not self._is_scaled_pass or self._cut_looks >= _CUT_LOOKS:
            return
        for optimizer in list(self._given):
            _, norms = self._norms.get(optimizer, (0.0, []))
            self._norms[optimizer] = (_measure_norm(optimizer), norms)
            for parameter in _choose(optimizer):
                self._tops[id(parameter)] = _measure_top(parameter.grad)

    def _were_cut(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether gradients were cut off at a value since their backward: many numbers lie at a lower top."""
        before = [
            (self._tops[id(p)], _measure_top(p.grad)) for p in _choose(optimizer) if id(p) in self._tops
        ]
        self._cut_looks += bool(before)
        cut = [after[0] < top[0] and after[1] >= max(_CUT_SHARE, 2 * top[1]) for top, after in before]
        return bool(cut) and 2 * sum(cut) >= len(cut)

    def _is_waiting(self, parameters: list[torch.Tensor]) -> bool:
        """Return whether gradients are still multiplied by the scale: nothing was unscaled since the backward."""
        if self._scaler is None or _scale_of(self._scaler) <= 1.0:
            return False
        stages = [state["stage"].name for state in self._scaler._per_optimizer_states.values()]
        return any(each.grad is not None for each in parameters) and "UNSCALED" not in stages

    def _note(self, problem: str, optimizer: torch.optim.Optimizer | None = None) -> None:
        count = self._counts[problem] = self._counts.get(problem, 0) + 1
        if count > _MOST_NOTES:
            return
        known = self.events.know(optimizer).tell() if optimizer is not None else {}
        self.recorder.note(
            "scaler-misuse",
            {
                "problem": problem,
                "count": count,
                "scale": _scale_of(self._scaler),
                "source": find_line(),
                **known,
            },
        )

    # ---------------------------------------------------------------- optimizers

    def _see_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        dtypes = [
            (p.dtype, float(group.get("eps", 1.0) or 0.0), "betas" in group)
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        half = [eps for dtype, eps, is_adam in dtypes if dtype == torch.float16 and is_adam]
        if half and min(half) < _SMALLEST_HALF:
            note = {**self.events.know(optimizer).tell(), "eps": min(half), "parameters": len(half)}
            self.recorder.note("half-adam", note)
        doubles = sum(dtype == torch.float64 for dtype, _, _ in dtypes)
        if doubles and 2 * doubles > len(dtypes) and torch.get_default_dtype() != torch.float64:
            note = {
                "setting": "float64 weights",
                "parameters": doubles,
                "source": self.events.know(optimizer).source,
            }
            self.recorder.note("slow-setting", note)


def _scale_of(scaler: Any) -> float:
    if scaler is None or not getattr(scaler, "_enabled", False):
        return 1.0
    scale = getattr(scaler, "_scale", None)
    return float(getattr(scaler, "_init_scale", 1.0)) if scale is None else float(scale)


def _stage(scaler: Any, optimizer: torch.optim.Optimizer) -> str:
    states = getattr(scaler, "_per_optimizer_states", {})
    return str(states[id(optimizer)]["stage"].name) if id(optimizer) in states else "READY"


def _choose(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return a few parameters whose gradients have numbers enough to tell a cut from chance."""
    held = (p for group in optimizer.param_groups for p in group["params"])
    large = (p for p in held if p.grad is not None and p.numel() >= _FEWEST_NUMBERS and not p.grad.is_sparse)
    return list(islice(large, 4))


def _measure_top(gradient: torch.Tensor | None) -> tuple[float, float]:
    """Return the largest magnitude of some numbers of a gradient, and the share of numbers that have it."""
    if gradient is None:
        return 0.0, 0.0
    with torch.no_grad():
        sizes = gradient.detach().reshape(-1)[:_MOST_NUMBERS].abs()
        top = sizes.max()
        return float(top), float((sizes == top).float().mean())


def _measure_norm(optimizer: torch.optim.Optimizer) -> float:
    """Return the norm of all gradients together."""
    held = (p.grad for group in optimizer.param_groups for p in group["params"])
    plain = [each.detach() for each in held if each is not None and each.layout == torch.strided]
    with torch.no_grad():
        norms = torch._foreach_norm(plain) if plain else ()
        return (
            float(torch.linalg.vector_norm(torch.stack([each.float().cpu() for each in norms])))
            if norms
            else 0.0
        )


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
