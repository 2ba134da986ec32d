"""The flight recorder: what it takes to execute the current step again, kept while the step goes on.

Random states and buffers as they were when the step began, the calls of root modules with their arguments, and the
frames that were there when the last step ended. Weights need no copy: a bad loss or gradient is seen before the
optimizer touches them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from clew.capture.beat import Course
from clew.capture.torch.randomness import RandomStates
from clew.model.record import new_tuple
from clew.model.schema import STAT_INDEX
from clew.stats.readable import LAZY, undisturbed
from clew.stats.rows import KERNEL, Rows

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable
    from types import CodeType, FrameType

    from clew.capture.torch.randomness import RandomBytes
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.registry import TensorEntry
    from clew.capture.torch.snapshot import SnapshotLens

_NAN, _NEG_INF = STAT_INDEX["nan"], STAT_INDEX["neg_inf"]
_UNKNOWN: Final = -2
"""The kernel's answer when a tensor is not simply memory."""
_SMALL: Final = 4096
_OWN_FRAMES: Final = 3
_MOST_CALLS: Final = 24
_MOST_LOOKED_AT: Final = 4
"""A NaN that flows through a backward pass reaches the small gradients (biases, norms) on its way. Of a step that is
not recorded two are looked at, the first and the last."""


class RootCall(NamedTuple):
    """A root module and what it was called with in this step."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Flight(Course):
    """State from the beginning of the current step; ``restore`` puts it back, in a copy of the process."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.last_batch: Any = None
        """What a loader gave last."""
        self.last_iterator: weakref.ref[Any] | None = None
        """The iterator that has given it."""
        self.frames: list[tuple[int, int, CodeType]] = []
        self.has_loader = False
        self.step_call: Callable[[], Any] | None = None
        """Calls the function that the user marked as the step, with the arguments it has now."""
        self.snapshots: SnapshotLens | None = None
        """Takes the state between steps, if snapshots are on."""
        self.look_at = sys.maxsize
        """The first step at whose end the snapshots are to be told."""
        self.ended, self.ends = -1, 0
        """The step that ended last, and how many optimizers have ended it."""
        self._random = RandomStates()
        self.blocks: bytes | None = None
        """Where the random states lie in memory, if that is all there is to copy."""
        self.spare = self._random.python
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._turn = RandomStates()
        self._turn_buffers: list[torch.Tensor] = []
        self.passes = 0
        """How many backward passes the present step has had."""
        self.usual_passes = 0
        """How many backward passes the last step had."""
        self.has_start = False
        self.known = recorder.registry.tensors
        self.trees = -1
        """How many tensors were known when the buffers among them were looked for."""
        self._shapes: list[torch.Size] = []
        self._rows = Rows(capacity=1)
        self.looked_at = -1
        """How many tensors were known when the small ones among them were chosen."""
        self._small: list[TensorEntry] = []
        self.references: list[weakref.ref[torch.Tensor]] = []
        self.outermost: list[weakref.ref[torch.Tensor]] = []

    @property
    def known_frames(self) -> dict[int, tuple[int, CodeType]]:
        """Frames that were there when the last step ended, by identity: the line each was at, and its code."""
        return {key: (_find_line(code, place), code) for key, place, code in self.frames}

    def mark_end(self) -> None:
        """A step has ended: remember the frames that hold the loop, and begin the next step here."""
        # Whoever tells of the end is ours, and who told the recorder: the user's frames come behind these, and at most
        # one more of ours.
        frame = sys._getframe(_OWN_FRAMES)
        if KERNEL is not None:
            KERNEL.list_frames(frame, self.frames)
        else:
            self.frames = _list_frames(frame)
        if self.snapshots is not None:
            self.snapshots.end_step()
        self.recorder.calls.clear()
        self.usual_passes, self.passes = self.passes, 0
        if not self.has_loader and not self.has_start:
            self.mark_start()
        self.has_start = False

    @property
    def has_gathered(self) -> bool:
        """Whether this step has had backward passes before the present one."""
        return self.passes > 0

    @property
    def is_later_turn(self) -> bool:
        """Whether the state is there from the beginning of the present turn of a loop that gathers gradients."""
        return self.passes > 0 and self.usual_passes > 1 and not self.has_loader

    def mark_backward(self, *, is_last: bool) -> None:
        """A backward pass has ended: the next turn of a loop that gathers gradients begins about here.

        ``is_last``: no optimizer will tell of the end of the step, so that the next step begins about here.
        """
        self.passes += 1
        if self.has_loader:
            return
        if is_last:
            self.has_start = True
            self.mark_start()
        elif self.usual_passes > 1:
            self._turn.take()
            with undisturbed():
                self._turn_buffers = [buffer.detach().clone() for buffer, _ in self.buffers]

    def begin_call(self, call: Callable[[], Any]) -> None:
        """A function that is known to be the step begins: calling it again is the step again."""
        self.recorder.before_event()
        self.step_call = call
        self.mark_start()

    def ask_snapshot(self, reason: str) -> bool:
        """Have the state after the present step kept; return whether snapshots are on at all."""
        if self.snapshots is None or self.snapshots.off:
            return False
        self.snapshots.ask_snapshot(reason)
        return True

    def mark_start(self) -> None:
        """The body of the loop begins: keep the random states and the buffers as they are now."""
        self._random.take()
        self.blocks = self._random.packed if self._random.is_fast else None
        if self.buffers or len(self.known) != self.trees:
            self._copy_buffers()

    def add_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep a root call of this step; inference and the hundredth call of a loop are not worth it."""
        if len(self.recorder.calls) < _MOST_CALLS:
            self.recorder.calls.append(new_tuple(RootCall, (module, args, kwargs)))

    def find_bad(self, *, of_gradients: bool) -> str:
        """Return the name of a small parameter that is bad, or has a bad gradient; nothing where all is well."""
        if len(self.recorder.registry.tensors) != self.looked_at:
            self._choose_small()
        references = self.references if self.recorder.due else self.outermost
        bad = KERNEL.find_bad(references, of_gradients) if KERNEL is not None else _UNKNOWN
        if bad == _UNKNOWN:
            with undisturbed():
                living = [reference() for reference in references]
                bad = self._find_bad_slowly(
                    [each.grad if each is not None and of_gradients else each for each in living]
                )
        if bad < 0:
            return ""
        return next(entry.name for entry in self._small if entry.ref is references[bad])

    def _find_bad_slowly(self, tensors: list[torch.Tensor | None]) -> int:
        for position, tensor in enumerate(tensors):
            if tensor is None or tensor.layout != torch.strided:
                continue
            self._rows.measure(tensor, 0)
            self._rows.settle()
            if self._rows.values[0, _NAN : _NEG_INF + 1].any():
                return position
        return -1

    def _choose_small(self) -> None:
        registry = self.recorder.registry
        self.looked_at = len(registry.tensors)
        self._small = small = [
            entry
            for entry, parameter in registry.living_parameters()
            if parameter.is_leaf
            and parameter.device.type == "cpu"
            and not isinstance(parameter, LAZY)  # a part that is never called stays without numbers
            and 0 < parameter.numel() <= _SMALL
        ]
        # Backward ends with the first layers: what went bad anywhere has passed through to them.
        half = _MOST_LOOKED_AT // 2
        if len(small) > _MOST_LOOKED_AT:
            small = small[:half] + small[-half:]
        self.references = [entry.ref for entry in small]
        self.outermost = self.references[:1] + self.references[1:][-1:]

    def start_state(self) -> tuple[RandomBytes, dict[int, torch.Tensor]]:
        """Return the random states and, by the buffers' identities, copies of them from the beginning of the step."""
        return self._random.export(), {id(buffer): copy for buffer, copy in self.buffers}

    def restore(self, *, to_turn: bool = False) -> None:
        """Put random states and buffers back to the beginning of the step, or of the present turn of its loop."""
        copies = self._turn_buffers if to_turn else [copy for _, copy in self.buffers]
        (self._turn if to_turn else self._random).restore()
        with torch.no_grad():
            for (buffer, _), copy in zip(self.buffers, copies, strict=True):
                if buffer.shape != copy.shape:
                    buffer.data = torch.empty_like(copy)
                buffer.copy_(copy)

    def _copy_buffers(self) -> None:
        count = len(self.recorder.registry.tensors)
        if KERNEL is not None and count == self.trees and KERNEL.copy_buffers(self.buffers):
            return
        with undisturbed():
            # A queue is swapped for a longer one, an observer makes room: then the copies are made anew.
            if count != self.trees or [buffer.shape for buffer, _ in self.buffers] != self._shapes:
                self._find_buffers(count)
            if self.buffers:
                torch._foreach_copy_([copy for _, copy in self.buffers], [b for b, _ in self.buffers])

    def _find_buffers(self, count: int) -> None:
        trees = self.recorder.registry.living_trees()
        living = [buffer for tree in trees for entry in tree.buffers if (buffer := entry.ref()) is not None]
        lazy = [buffer for buffer in living if isinstance(buffer, LAZY)]
        kept = [buffer for buffer in living if buffer.device.type == "cpu" and not isinstance(buffer, LAZY)]
        # One whose numbers are those in memory with the other sign is not copied as memory.
        self.trees = -1 if lazy or any(buffer.is_neg() for buffer in kept) else count
        self._shapes = [buffer.shape for buffer in kept]
        self.buffers = [(buffer, torch.empty_like(buffer)) for buffer in kept]


def _list_frames(frame: FrameType | None) -> list[tuple[int, int, CodeType]]:
    """Return the identity of each frame, its place in its code, and that: looking up the line takes longer."""
    found = []
    while frame is not None:
        # An identity may be used again by a frame of the next step: its code tells the two apart.
        found.append((id(frame), frame.f_lasti, frame.f_code))
        frame = frame.f_back
    return found


def _find_line(code: CodeType, place: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= place < end)
    return next(lines, None) or code.co_firstlineno
