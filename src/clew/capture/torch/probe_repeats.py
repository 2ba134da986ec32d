"""Notes what is done once and is done again and again: making the optimizer, setting the seed."""

from __future__ import annotations

import contextlib
import functools
import random
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from clew.capture.torch.probe_events import find_line
from clew.capture.torch.probe_signature import SEEDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

_MADE: Final = 4
_SEEDED: Final = 4
_FIRST_STEPS: Final = 2


class _Trained:
    """One parameter, and the optimizers of one kind that have been made for it."""

    def __init__(self, parameter: torch.Tensor, kind: tuple[Any, ...]) -> None:
        self.ref = weakref.ref(parameter)
        self.version = parameter._version
        self.kind = kind
        """The class of the optimizers, the line that makes them and what they hold."""
        self.made = 1
        self.has_stepped = False
        self.is_told = False


class RepeatProbe:
    """Counts optimizers made for the same parameters, and equal seeds that are set while training goes on."""

    def __init__(self, recorder: Recorder, events: LoopEvents) -> None:
        self.recorder = recorder
        self.events = events
        self._trained: dict[int, _Trained] = {}
        self._seeds: dict[tuple[str, int], set[int]] = {}
        self._pending: list[tuple[str, int, str]] = []
        self._told: set[tuple[str, int]] = set()
        self._aside = 0
        self._patches: Patches | None = None
        self._is_following = False
        self._is_closure = False

    def install(self, patches: Patches) -> None:
        """Begin to count."""
        patches.listen(self.events.on_made, self._see_made)
        self._patches, self._is_following = patches, False
        if self._trained or self._seeds:
            self._follow()
        for owner in (torch, torch.random):
            patches.replace(owner, "manual_seed", functools.partial(self._make_seed, "torch"))
        patches.replace(torch.random, "fork_rng", self._make_fork)
        patches.replace(random, "seed", functools.partial(self._make_seed, "random"))
        patches.replace(np.random, "seed", functools.partial(self._make_seed, "numpy"))
        self.recorder.note("probe", {"probe": "repeats"})

    def _follow(self) -> None:
        """Listen to steps and passes, now that there is something to count."""
        if self._patches is not None and not self._is_following:
            self._is_following = True
            self._patches.listen(self.events.on_stepping, self._see_stepping)
            self._patches.listen(self.events.on_stepped, self._see_stepped)
            self._patches.listen(self.recorder.on_pass, self._see_pass)

    # ---------------------------------------------------------------- optimizers

    def _see_made(self, optimizer: torch.optim.Optimizer) -> None:
        parameter = _first(optimizer)
        if parameter is None:
            return
        self._follow()
        seen = self._trained.get(id(parameter))
        held = tuple(id(each) for group in optimizer.param_groups for each in group["params"])
        kind = (type(optimizer), self.events.know(optimizer).source, held)
        # Another optimizer is the next phase of a training; this one made again would be the same.
        if seen is None or seen.ref() is not parameter or seen.kind != kind:
            self._trained[id(parameter)] = _Trained(parameter, kind)
            return
        # Weights that somebody has set since are a new beginning: another task, a restored copy.
        if not seen.has_stepped or parameter._version != seen.version:
            seen.made, seen.has_stepped, seen.version = 1, False, parameter._version
            return
        seen.made, seen.has_stepped = seen.made + 1, False
        if seen.made == _MADE and not seen.is_told:
            seen.is_told = True
            self.recorder.note(
                "optimizer-again", {**self.events.know(optimizer).tell(), "made_times": seen.made}
            )

    def _see_stepping(self, _optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """A closure is evaluated several times for one step and must draw the same numbers each time."""
        self._is_closure = has_closure

    def _see_stepped(self, optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        self._is_closure = False
        parameter = _first(optimizer)
        seen = self._trained.get(id(parameter))
        if parameter is not None and seen is not None:
            seen.has_stepped, seen.version = True, parameter._version

    # ---------------------------------------------------------------- seeds

    def _make_seed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        told = [self._see_seed]

        @functools.wraps(original)
        def seed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            value = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(value, int):
                for signature in self.recorder.signing:
                    signature.see(SEEDED)
                self.events.tell(told, name, value)
            return result

        return seed

    def _make_fork(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        @functools.wraps(original)
        def fork_rng(*args: Any, **kwargs: Any) -> Iterator[None]:
            with original(*args, **kwargs):
                self._aside += 1
                try:
                    yield
                finally:
                    self._aside -= 1

        return fork_rng

    def _see_seed(self, name: str, value: int) -> None:
        if (
            not self._aside
            and not self._is_closure
            and self.recorder.step >= _FIRST_STEPS
            and len(self._pending) < 8
        ):
            self._follow()
            self._pending.append((name, value, find_line()))

    def _see_pass(self, begins: bool) -> None:
        """Training goes on with the seed that was set; one that was taken back meanwhile did not matter."""
        if not begins or not self._pending:
            return
        pending, self._pending = self._pending, []
        for name, value, source in pending:
            if name == "torch" and torch.initial_seed() != value % (1 << 64):
                continue
            steps = self._seeds.setdefault((name, value), set())
            steps.add(self.recorder.step)
            if len(steps) >= _SEEDED and (name, value) not in self._told:
                self._told.add((name, value))
                self.recorder.note(
                    "seed-again", {"generator": name, "seed": value, "times": len(steps), "source": source}
                )


def _first(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    return next((p for group in optimizer.param_groups for p in group["params"]), None)
