"""A cheap signature of the loop: what happens in which order, where, on which graph, with which gradients.

Each part of it is a few table look-ups. It is taken in the first steps, in those after a change, and now and then for
the rest of the run, also while the probes rest. What it has never seen before is reason for all probes to look
again as they did at the start.
"""

from __future__ import annotations

import os
import sys
import weakref
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from clew.capture.beat import Turns
from clew.capture.torch.glance import stamp
from clew.capture.torch.leaves import list_leaves
from clew.capture.torch.unheard import ask_unheard
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from clew.capture.torch.recorder import Recorder

FORWARD, QUIET, BACKWARD, CLEARED, STEP, CLIPPED, SCALED, SCALER_STEP, SEEDED = range(1, 10)
"""What can happen in a loop; a quiet call is one without gradients or in eval mode."""

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Tensors that hear nothing of what they are asked."""

_SETTLING: Final = 5
"""Steps at the start, and after a change, in which whatever is new belongs to it."""

_ATTENTIVE_STEPS: Final = 24
"""Steps at the start, and after a change, that are all taken."""

_SHORTEST_GAP: Final = 5
_GAP_SPREAD: Final = (7, 11)
_GAP_GROWTH: Final = 72
"""Steps left out between two that are taken: ever more, up to a limit, and by turns more and less, so that no regular
loop keeps time with them. A step that is taken costs some 50 µs on a small model, where each line of Python is run
among tensors that have filled the caches; ten times what it costs alone."""

_NEXT_LOOK: Final = 8
_FREE_LOOKS: Final = 4
"""Steps between two looks; after some looks ever more of them: such a loop changes all the time."""

_MOST_HEADS: Final = 24
_MOST_SIZES: Final = 8
_MOST_PLACES: Final = 12
_MOST_STATES: Final = 6
"""A part of the signature with more values than that is no sign of anything."""

_FOLLOWED: Final = 16
_AT_ONCE: Final = 4
"""Parameters of an optimizer whose gradients are followed, and how many of them in one step."""

_FEWEST_ROWS: Final = 4
_HEAD_NODES: Final = 4
_FRAMES: Final = 3
_MOST_FRAMES: Final = 16
_HIGH_LOSS: Final = 4.0
_REDUCTIONS: Final = ("MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1")
_OWN: Final = tuple(
    f"{path.parent}{os.sep}" for path in (Path(torch.__file__), Path(__file__).resolve().parents[1])
)


class _Followed:
    """A parameter: how often its gradient had been written to at the last visit, and how that number has grown."""

    __slots__ = ("at", "parameter", "states", "version")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.version = 0
        self.at = -1
        self.states: set[float | None] = set()


class _Held:
    """An optimizer: the parameters that are followed, some in each of its steps."""

    __slots__ = ("at", "groups", "parameters", "parts", "ref", "stamp", "usual")

    def __init__(self, ref: weakref.ref[torch.optim.Optimizer], optimizer: torch.optim.Optimizer) -> None:
        self.ref = ref
        self.groups = len(optimizer.param_groups)
        self.at = 0
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        chosen = parameters[:: max(1, -(-len(parameters) // _FOLLOWED))]
        followed = [_Followed(parameter) for parameter in chosen]
        self.parts = [followed[at : at + _AT_ONCE] for at in range(0, len(followed), _AT_ONCE)] or [[]]
        self.parameters = [[each.parameter for each in part] for part in self.parts]
        is_plain = all(type(parameter) in _PLAIN for parameter in chosen)
        quick = stamp if KERNEL is None else KERNEL.stamp
        self.stamp = quick if is_plain else partial(ask_unheard, stamp)
        self.usual: list[list[int | None] | None] = [None] * len(self.parts)
        """Versions of the gradients of each part that need no closer look."""


class Places:
    """Finds where in the user's program something happens, and remembers of each code whether it is the user's."""

    def __init__(self) -> None:
        self._counts: dict[int, bool] = {}
        self._codes: list[CodeType] = []

    def find(self, frame: FrameType, frames: int) -> tuple[int, ...]:
        """Return the lines of the user that lead to a frame, the innermost few."""
        find = find_place if KERNEL is None else KERNEL.find_place
        return find(frame, self._counts, self._judge, frames, _MOST_FRAMES)

    def _judge(self, code: CodeType) -> bool:
        """Return whether a code is the user's; it is kept, so that no other gets its identity."""
        self._codes.append(code)
        return not code.co_filename.startswith(_OWN)


class Signature(Turns):
    """Tells when something in the loop is as it never was before; ``reason`` says what, until a look begins."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.is_on = True
        """Whether this step is taken."""
        self.reason = ""
        self.on_reason: Callable[[], None] = lambda: None
        """Called at the end of a step in which there is a reason to look."""
        self.on_turn: Callable[[], None] = lambda: None
        """Called when what follows is to be taken where the last steps were not, or the reverse."""
        self.batch = 0
        """The first dimension of what the last model gave."""
        self.steps = 0
        self.turn, self._next_turn = _ATTENTIVE_STEPS, 1
        """Steps until what follows is taken where the last were not, or the reverse; and for how many it is then."""
        self._turns = 0
        self._looks = 0
        self._learns_until = _SETTLING
        self._hears_from = 0
        self._last = 0
        self._order = bytearray(256)
        self._held: dict[int, _Held] = {}
        self._heads: set[Any] = set()
        self._is_reduction: dict[type, bool] = {}
        self._sizes: set[int] = set()
        self._number = 0
        self._places: set[tuple[int, ...]] = set()
        self._find_place = Places().find
        self.lowest, self.highest = 0.0, 0.0
        """Between these a loss is nothing new."""
        self._has_failed = False
        self._has_equal_samples: bool | None = None

    def begin(self) -> None:
        """The recording begins, or goes on: what has happened meanwhile is no part of a step."""
        self._begin_turn()
        for held in self._held.values():
            held.usual = [None] * len(held.parts)
            for followed in chain.from_iterable(held.parts):
                followed.at = -1

    def begin_look(self) -> None:
        """All probes look again: what comes now is known, and a loop that changes all the time is used to change."""
        self.reason = ""
        self._looks += 1
        if self.is_on:
            self.turn = _ATTENTIVE_STEPS
        else:
            self.turn, self._next_turn = 1, _ATTENTIVE_STEPS
        self._learns_until = self.recorder.step + _SETTLING
        gap = _NEXT_LOOK << min(max(self._looks - _FREE_LOOKS, 0), 20)
        self._hears_from = self.recorder.step + gap

    def end_step(self) -> None:
        """An optimizer has stepped: begin a look where something is new, take the signature of the next step or not."""
        if self.reason:
            self.on_reason()
        self.steps += 1
        loss = self.recorder.last_loss
        if loss is not None and not self.lowest <= loss <= self.highest:
            self._see_level(loss)
        self.turn -= 1
        if self.turn > 0:
            return
        self.is_on = not self.is_on
        if self.is_on:
            self.turn, self._next_turn = self._next_turn, 1
            self._begin_turn()
        else:
            factor, modulus = _GAP_SPREAD
            grown = min(self._turns, _GAP_GROWTH)
            self.turn = _SHORTEST_GAP + self._turns * factor % modulus + grown
            self._turns += 1
        self.on_turn()

    def _begin_turn(self) -> None:
        self._last, self._number = STEP, torch._C._autograd._get_sequence_nr()

    def notice(self, reason: str) -> bool:
        """Take something new; return whether it is known from now on, or comes too soon after the last change."""
        step = self.recorder.step
        if step < self._learns_until:
            return True
        if step < self._hears_from:
            return False
        self.reason = self.reason or reason
        return True

    # ---------------------------------------------------------------- the order of events

    def see(self, event: int) -> None:
        """Take one event: what counts is that it has followed the last one before."""
        pair = self._last << 4 | event
        self._last = event
        if not self._order[pair] and self.notice("order"):
            self._order[pair] = 1

    # ---------------------------------------------------------------- the data

    def see_batch(self, _iterator: Any, batch: Any) -> None:
        """Take whether the first and the last sample of a batch are the same."""
        leaf = next(iter(list_leaves(batch)), None)
        if leaf is None or leaf.dim() < 2 or leaf.shape[0] < _FEWEST_ROWS or leaf.device.type != "cpu":
            return
        if leaf.layout == torch.strided and self._has_equal_samples is not True:
            is_equal = torch.equal(leaf[0], leaf[-1])
            if is_equal != self._has_equal_samples and self.notice("samples"):
                self._has_equal_samples = is_equal

    # ---------------------------------------------------------------- the loss

    def see_loss(self, loss: torch.Tensor) -> None:
        """Take the root of a backward pass: the operations it ends in, and how many there were since the last."""
        self.see(BACKWARD)
        if self._has_failed or is_functorch_wrapped_tensor(loss):
            return
        try:
            self._see_graph(loss.grad_fn)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._fail(error)

    def _see_graph(self, node: Any) -> None:
        if node is not None and len(self._sizes) < _MOST_SIZES:
            number = node._sequence_nr()
            size, self._number = number - self._number, number + 1
            if size not in self._sizes and self.notice("graph"):
                self._sizes.add(size)
        head = self._read_head(node)
        if head not in self._heads and len(self._heads) < _MOST_HEADS and self.notice("loss"):
            self._heads.add(head)

    def _read_head(self, node: Any) -> tuple[Any, ...]:
        """Return the last operations of a loss, and the form of what was averaged: one number a sample, or a square."""
        head: list[Any] = []
        while node is not None:
            kind = type(node)
            head.append(kind)
            is_reduction = self._is_reduction.get(kind)
            if is_reduction is None:
                is_reduction = self._is_reduction[kind] = kind.__name__ in _REDUCTIONS
            if is_reduction:
                batch = self.batch
                sizes = node._saved_self_sym_sizes
                head.append(tuple([0 if size == 1 else 1 if size == batch else 2 for size in sizes]))
            before = node.next_functions if len(head) < _HEAD_NODES else ()
            node = before[0][0] if before else None
        return tuple(head)

    # ---------------------------------------------------------------- steps

    def see_stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: take its place in the program, and how its gradients came about."""
        self.see(STEP)
        if self._has_failed:
            return
        try:
            # The lines of the user that lead to this step: another phase is written somewhere else.
            place = self._find_place(sys._getframe(2), _FRAMES)
            if place not in self._places and len(self._places) < _MOST_PLACES and self.notice("place"):
                self._places.add(place)
            self._see_gradients(optimizer)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        self.recorder.guard.fault(error, "signature of the loop", step=self.recorder.step)

    def _see_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """A gradient that is there as always has been written to as often as always since the last visit."""
        held = self._held.get(id(optimizer))
        if held is None or held.groups != len(optimizer.param_groups):
            held = self._follow(optimizer)
        turn = held.at = held.at + 1 if held.at + 1 < len(held.parts) else 0
        part, steps = held.parts[turn], self.steps
        with torch._C.DisableTorchFunction():  # a gradient may be of a class that hears what it is asked
            stamps = held.stamp(held.parameters[turn])
        versions = [None if now is None else now[1] for now in stamps]
        if versions == held.usual[turn]:
            for each in part:
                each.at = steps
            return  # gradients that are made anew for each step, and written to as often as ever
        held.usual[turn] = versions if self._see_versions(part, versions) else None

    def _see_versions(self, part: list[_Followed], versions: list[int | None]) -> bool:
        """Take what was done to some gradients; return whether none was written to since, as far as versions tell."""
        is_same = True
        state: float | None
        for each, version in zip(part, versions, strict=True):
            if version is None:
                state = None
            else:
                before, each.version = each.version, version
                at, each.at = each.at, self.steps
                if at < 0:
                    is_same = False
                    continue
                state = round((version - before) / max(self.steps - at, 1), 2)
            states = each.states
            if state not in states and len(states) < _MOST_STATES and self.notice("gradients"):
                states.add(state)
            is_same = is_same and not state and state in states
        return is_same

    def _follow(self, optimizer: torch.optim.Optimizer) -> _Held:
        key, table = id(optimizer), self._held
        if key in table:
            self.notice("groups")
        held = table[key] = _Held(weakref.ref(optimizer, lambda _: table.pop(key, None)), optimizer)
        return held

    def _see_level(self, loss: float) -> None:
        """Take a loss that is negative for the first time, or far above the others."""
        if loss < 0 and self.lowest == 0 and self.notice("sign of the loss"):
            self.lowest = -inf
        if abs(loss) > self.highest and self.notice("level of the loss"):
            self.highest = _HIGH_LOSS * abs(loss)


def find_place(
    frame: FrameType | None,
    known: dict[int, bool],
    judge: Callable[[CodeType], bool],
    frames: int,
    most: int,
) -> tuple[int, ...]:
    """Return where the innermost frames that count stand; the twin of the kernel's function."""
    place: list[int] = []
    for _ in range(most):
        if frame is None or len(place) >= 2 * frames:
            break
        code = frame.f_code
        if id(code) not in known:
            known[id(code)] = judge(code)
        if known[id(code)]:
            place += (id(code), frame.f_lasti)
        frame = frame.f_back
    return tuple(place)
