"""Every operation of an executed step in order: what went in, what came out, which line and which module asked.

Going backwards is looking at an earlier operation: nothing is executed for it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.clock import CLEW
from clew.capture.torch.patches import Patches
from clew.replay.frames import Line, is_user_file
from clew.replay.kept import DEFAULT_BYTES, Held, Vault
from clew.replay.lens import replace_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from clew.capture.torch.recorder import Recorder
    from clew.replay.lens import Event
    from clew.replay.rehearsal import Rehearsal, Symptom

_MOST_FRAMES: Final = 4
_HOME: Final = Path(__file__).resolve().parents[1]
_OURS: Final = str(_HOME) + os.sep
_LENS: Final = (str(_HOME / "replay" / "lens.py"), str(_HOME / "replay" / "timeline.py"))
_RUNNER: Final = str(_HOME / "api" / "script.py")
"""Where clew runs a script: the frames outside it are not the user's."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A frame of the user's code when an operation ran: its line, and its names as they were."""

    line: Line
    names: dict[str, Any]


@dataclass(slots=True)
class Operation:
    """One executed operation. ``call`` numbers the module call it ran in, ``depth`` says how deep that was.

    ``given`` is the arguments with every tensor replaced by what was held of it; ``forward`` the operation whose
    gradient a backward operation computes, or -1.
    """

    index: int
    op: str
    phase: str
    site: str
    node: str
    forward: int
    call: int
    depth: int
    inputs: tuple[Held, ...]
    outputs: tuple[Held, ...]
    given: Any
    frames: tuple[Moment, ...] = ()
    is_born: bool = False
    """Whether good values went in and a bad one came out that nobody meant."""

    @property
    def line(self) -> Line | None:
        """The line of the user's code that asked for it."""
        return self.frames[0].line if self.frames else None

    @property
    def is_bad(self) -> bool:
        """Whether something that came out is NaN or infinite."""
        return any(held.is_bad for held in self.outputs)


@dataclass(slots=True)
class ModuleCall:
    """One call of a module: which operations it spans, and the call it was made in (-1: by the loop itself)."""

    site: str
    module: torch.nn.Module
    parent: int
    first: int
    last: int = -1


@dataclass(slots=True)
class Timeline:
    """A step as it was executed. ``exactness``: how well it equalled the recording, with notes."""

    step: int
    vault: Vault
    operations: list[Operation] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    symptom: Symptom | None = None
    exactness: dict[str, Any] = field(default_factory=lambda: {"replay": "none", "notes": []})

    def restore(self, value: Any) -> Any:
        """Return a nest of containers with every held tensor as it was."""
        if isinstance(value, Held):
            return self.vault.value(value)
        if type(value) in (list, tuple):
            return type(value)(self.restore(part) for part in value)
        if isinstance(value, dict):
            return {key: self.restore(part) for key, part in value.items()}
        return value

    def path_of(self, operation: Operation) -> list[str]:
        """Return the modules around an operation, the outermost first."""
        path, call = [], operation.call
        while call >= 0:
            path.append(self.calls[call].site)
            call = self.calls[call].parent
        return path[::-1]


class TimelineLens:
    """Fills a timeline from a rehearsal, between ``begin`` and ``end``, on the thread that trains.

    ``window``: only the values of these operations are kept.
    """

    def __init__(
        self,
        recorder: Recorder,
        rehearsal: Rehearsal,
        *,
        limit_bytes: int = DEFAULT_BYTES,
        window: tuple[int, int] | None = None,
    ) -> None:
        self._recorder = recorder
        self._rehearsal = rehearsal
        self._window = window
        self._patches = Patches()
        self._stack: list[int] = []
        self._seen: dict[tuple[Any, ...], Held] = {}
        self._numbers: dict[int, int] = {}
        self.timeline = Timeline(recorder.step, Vault(limit_bytes))

    def begin(self) -> None:
        """Begin to take note of what the rehearsal sees; its own patches come on top of these."""
        self._patches.replace(torch.nn.Module, "_call_impl", self._make_call)
        self._rehearsal.lens.on_event = self._take

    def end(self) -> Timeline:
        """Leave everything as it was found, after the rehearsal has, and return the timeline."""
        self._rehearsal.lens.on_event = None
        self._patches.undo()
        self._seen.clear()
        last = len(self.timeline.operations) - 1
        for call in self.timeline.calls:
            call.last = last if call.last < 0 else min(call.last, last)
        self.timeline.losses = list(self._rehearsal.losses)
        self.timeline.symptom = self._rehearsal.symptom
        return self.timeline

    # ---------------------------------------------------------------- modules

    def _make_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _call_impl(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            timeline = self.timeline
            entry = self._recorder.registry.modules.get(id(module))
            parent = self._stack[-1] if self._stack else -1
            call = ModuleCall(
                entry.name if entry is not None else type(module).__name__,
                module,
                parent,
                len(timeline.operations),
            )
            self._stack.append(len(timeline.calls))
            timeline.calls.append(call)
            try:
                return original(module, *args, **kwargs)
            finally:
                self._stack.pop()
                call.last = len(timeline.operations) - 1

        return _call_impl

    # ---------------------------------------------------------------- operations

    def _take(
        self, event: Event, func: Any, given: Any, before: list[torch.Tensor], after: list[torch.Tensor]
    ) -> None:
        if self._recorder.clock.phase == CLEW or _is_ours():
            return
        timeline = self.timeline
        index = len(timeline.operations)
        self._numbers[event.index] = index
        timeline.vault.is_open = self._window is None or self._window[0] <= index < self._window[1]
        inputs = tuple(
            self._hold(copy, original=original)
            for original, copy in zip(tensors_in(given), before, strict=True)
        )
        results = after or _written(func, *given)
        outputs = tuple(self._hold(tensor, producer=index) for tensor in results)
        frames = tuple(self._look_at(frame) for frame in _user_frames())
        held = iter(inputs)
        timeline.operations.append(
            Operation(
                index=index,
                op=event.op,
                phase=event.phase,
                site=event.site,
                node=event.node,
                forward=self._numbers.get(event.forward, -1),
                call=self._stack[-1] if self._stack else -1,
                depth=len(self._stack),
                inputs=inputs,
                outputs=outputs,
                given=replace_tensors(given, lambda _: next(held)),
                frames=frames,
                is_born=bool(event.elements) and not event.meant,
            )
        )

    def _hold(
        self, tensor: torch.Tensor, *, original: torch.Tensor | None = None, producer: int | None = None
    ) -> Held:
        """Keep a tensor's content; ``original`` is the tensor that this one is an earlier copy of."""
        owner = tensor if original is None else original
        place = _place_of(owner)
        known = self._seen.get(place[:-1])
        maker = producer if producer is not None else known.producer if known is not None else -1
        held = self.timeline.vault.hold(tensor, role=self._rehearsal.lens.role_of(owner), producer=maker)
        if owner is tensor:
            self._seen[place] = held
            # A view holds what was there before: whoever wrote it is still the one to name.
            if known is None or known.key != held.key:
                self._seen[place[:-1]] = held
        return held

    def _look_at(self, frame: FrameType) -> Moment:
        line = Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        names = {
            name: self._freeze(value) for name, value in frame.f_locals.items() if not name.startswith("__")
        }
        return Moment(line, names)

    def _freeze(self, value: Any) -> Any:
        """A tensor stands for its content of this moment; anything else for itself."""
        if not isinstance(value, torch.Tensor) or value.is_nested or value.layout != torch.strided:
            return value
        known = self._seen.get(_place_of(value))
        return known if known is not None else self._hold(value)


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies and how often that was written to: the same place and count, the same content."""
    if tensor.layout != torch.strided:
        return (id(tensor), 0)
    version = 0 if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, version)


def _user_frames() -> list[FrameType]:
    """Return the innermost frames of the user's own code."""
    frame: FrameType | None = sys._getframe(2)
    found: list[FrameType] = []
    while frame is not None and len(found) < _MOST_FRAMES and frame.f_code.co_filename != _RUNNER:
        if is_user_file(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found


def _is_ours() -> bool:
    """Return whether the operation was asked for by clew itself: the first frame outside the lens is ours."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _LENS:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.endswith(("/_python_dispatch.py", "/torch/_ops.py")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OURS)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return what an operation without a result has written into: the parameters of a fused update."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found
