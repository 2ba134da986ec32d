"""Runs a trained model again in a copy of the process: do samples mix, does a causal model see the future, does
dropout that is written out stay on?

These questions need another forward. In the training itself that could draw random numbers, move
buffers or run the user's side effects, so it happens once, in a forked copy that answers through a pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import torch
from torch import nn

from clew.capture.process_copy import fall_silent, write_all
from clew.capture.torch.glance import glance
from clew.capture.torch.leaves import walk
from clew.capture.torch.probe_change import (
    Given,
    find_leak,
    find_mask,
    find_mixing,
    find_spread,
    find_time,
    is_repeated,
)
from clew.capture.torch.probe_events import is_library
from clew.capture.torch.probe_learns import has_parameters
from clew.capture.torch.saved import walk_nodes

if TYPE_CHECKING:
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.saved import SavedRegions

_AT_STEP: Final = 21
"""After the first steps, in which everything looks at once."""

_APART: Final = frozenset((
    nn.Sequential, nn.Linear, nn.Identity, nn.Dropout, nn.LayerNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.MaxPool2d, nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
))  # fmt: skip
"""Layers that treat each sample by itself; a chain of these needs no copy of the process, which takes some 20 ms."""

_SECOND: Final = 2
_FEWEST_STEPS: Final = 3
_PATIENCE_SECONDS: Final = 10.0
_LAST_SECONDS: Final = 5.0
_MOST_MODELS: Final = 3
_MOST_BYTES: Final = 4 << 20
_ROWS: Final = 8
_GLANCE: Final = 16
_MOST_NODES: Final = 120
_CLASSES: Final = ("NllLossBackward0", "NllLoss2DBackward0")


class _Model:
    """A trained model with the inputs of one of its calls."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.ref = weakref.ref(module)
        self.calls = 0
        self.given: Given | None = None
        self.is_apart = False
        """Whether its layers were seen to treat each sample by itself: then no inputs are kept."""
        self.first: tuple[float, ...] = ()
        self.causal_at: tuple[int, int] | None = None
        """Which of the inputs holds the tokens that the targets are the next ones of, and in which dimension."""
        self.repeated_at: list[int] = []
        """Which of the inputs hold tokens that are the targets themselves, place by place."""


class AgainProbe:
    """Keeps the inputs of an early call of each model, and asks a copy of the process what changed ones would do."""

    def __init__(self, recorder: Recorder, events: LoopEvents, saved: SavedRegions) -> None:
        self.recorder = recorder
        self.events = events
        self.saved = saved
        self._models: dict[int, _Model] = {}
        self._tokens: tuple[_Model, list[tuple[int, torch.Tensor]]] | None = None
        self._sizes: dict[int, int] = {}
        self._patches: Patches | None = None
        self._is_asked = False
        self._is_open = False
        """It is not known yet what tokens are repeated for."""
        self._child = 0
        self._reading = -1
        self._since = 0.0

    def install(self, patches: Patches) -> None:
        """Begin to keep inputs."""
        self._patches, self._tokens = patches, None
        patches.listen(self.recorder.on_batch, self._see_batch)
        patches.listen(self.recorder.on_root, self._see_root)
        patches.listen(self.recorder.on_loss, self._see_loss)
        self.recorder.on_loss.remove(self._see_loss)  # listens where a model was given tokens
        patches.listen(self.events.on_stepped, self._see_stepped)
        patches.on_undo(self._finish)
        self.recorder.note("probe", {"probe": "again"})

    # ---------------------------------------------------------------- inputs

    def _see_batch(self, _iterator: Any, batch: Any) -> None:
        """Remember which tensors a loader gave with the samples along their first dimension."""
        if self._is_asked:
            return
        leaves = [leaf for _, leaf in walk(batch) if leaf.layout == torch.strided and leaf.dim()]
        if leaves and all(leaf.shape[0] == leaves[0].shape[0] for leaf in leaves):
            self._sizes = {leaf.data_ptr(): leaf.shape[0] for leaf in leaves}

    def _see_root(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        model = self._models.get(id(module))
        is_known = model is not None and model.ref() is module
        if model is not None and is_known and (model.is_apart or model.calls > _FEWEST_STEPS):
            model.calls += 1
            return
        if self._is_asked or not torch.is_grad_enabled() or not module.training or self.recorder.in_backward:
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if model is None or not is_known:
            first = next((leaf for _, leaf in walk(output)), None)
            if len(self._models) >= _MOST_MODELS or first is None or not first.requires_grad:
                return
            if not has_parameters(module):
                return
            model = self._models[id(module)] = _Model(module)
        model.calls += 1
        leaf = next(
            (leaf for _, leaf in walk((args, kwargs)) if leaf.layout == torch.strided and leaf.dim()), None
        )
        if leaf is None or leaf.grad_fn is not None:
            return
        places = enumerate(each for _, each in walk((args, kwargs)))
        tokens = [(at, each) for at, each in places if each.dtype == torch.int64 and each.dim() == 2]
        if tokens:
            if self._tokens is None:
                self.recorder.on_loss.append(self._see_loss)
            self._tokens = (model, tokens)
        if model.calls == 1:
            model.first = glance(leaf, _GLANCE)
            model.is_apart = not tokens and _keeps_apart(module)
        elif model.given is None or model.given.is_repeated:
            has_samples = self._sizes.get(leaf.data_ptr()) == leaf.shape[0]
            model.given = _keep(
                args, kwargs, is_repeated=glance(leaf, _GLANCE) == model.first, has_samples=has_samples
            )

    def _see_loss(self, loss: torch.Tensor) -> None:
        kept, self._tokens = self._tokens, None
        self.recorder.on_loss.remove(self._see_loss)
        if kept is None or loss.grad_fn is None or kept[0].causal_at is not None:
            return
        model, tokens = kept
        for node in walk_nodes(loss.grad_fn, most=_MOST_NODES):
            if type(node).__name__ in _CLASSES and self.saved.may_read(node):
                with contextlib.suppress(RuntimeError), torch.no_grad():
                    targets = node._saved_target.detach()
                    times = ((at, find_time(each.detach(), targets)) for at, each in tokens)
                    model.causal_at = next(((at, time) for at, time in times if time is not None), None)
                    self._see_repeated(
                        model, [at for at, each in tokens if is_repeated(each.detach(), targets)]
                    )
                return

    def _see_repeated(self, model: _Model, places: list[int]) -> None:
        """Tokens that are to be repeated are a fault in a model of language, not in one that packs them: ask soon."""
        model.repeated_at = places
        if places and not self._is_open:
            self._is_open = True
            self.recorder.note("repeated-tokens", {"is_open": True})

    def _close(self, spread: float | None) -> None:
        if self._is_open:
            self._is_open = False
            self.recorder.note("repeated-tokens", {"is_open": False, "spread": spread})

    # ---------------------------------------------------------------- asking

    def _see_stepped(self, _optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        if self._child:
            self._listen(0.0)
        elif self._is_asked and self._patches is not None:
            self._patches.hush((self,))
        elif self.recorder.step >= _AT_STEP or (self._is_open and self._has_repeated()):
            self._ask()

    def _finish(self) -> None:
        """The recording ends: ask now if it was too short, and wait a little for the answer."""
        if self.recorder.is_child():
            return  # another copy of the process: the answer is not for it
        if not self._is_asked and self.recorder.step >= _FEWEST_STEPS:
            self._ask()
        if self._child:
            self._listen(_LAST_SECONDS)
        if self._child:
            self._end()
        self._close(None)

    def _has_repeated(self) -> bool:
        """Return whether there are inputs to ask with what tokens are repeated for."""
        models = self._models.values()
        return any(model.repeated_at and model.given is not None for model in models)

    def _ask(self) -> None:
        self._is_asked = True
        models, self._models, self._tokens = list(self._models.values()), {}, None
        named: list[_Question] = []
        for model in models:
            module = model.ref()
            if module is None or model.calls < _SECOND:
                continue
            name, is_asked = self._name(module), model.causal_at is not None or model.repeated_at
            if (model.is_apart or model.given) and not is_asked and _keeps_apart(module):
                self.recorder.note("changed-input", {"site": name, "source": "", "mixing": 0.0, "leak": None})
            elif model.given is not None:
                named.append(_Question(name, model.causal_at, model.repeated_at, module, model.given))
        if not named or not _can_fork():
            self._close(None)
            return
        self._reading, writing = os.pipe()
        self._since = time.monotonic()
        self._child = os.fork()
        if self._child == 0:
            _live(named, writing)
        os.close(writing)

    def _name(self, module: torch.nn.Module) -> str:
        entry = self.recorder.registry.modules.get(id(module))
        return entry.name if entry is not None else type(module).__name__

    def _listen(self, seconds: float) -> None:
        ready, _, _ = select.select([self._reading], [], [], seconds)
        if ready:
            text = b""
            while piece := os.read(self._reading, 1 << 16):
                text += piece
            self._end()
            self._tell(text)
        elif time.monotonic() - self._since > _PATIENCE_SECONDS:
            self._end()

    def _end(self) -> None:
        child, self._child = self._child, 0
        os.close(self._reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)

    def _tell(self, text: bytes) -> None:
        try:
            answers = json.loads(text)
        except ValueError:
            return
        spreads = [spread for answer in answers if (spread := answer.pop("spread", None)) is not None]
        self._close(max(spreads, default=None))
        for answer in answers:
            self.recorder.note("changed-input", answer)


class _Question(NamedTuple):
    """A model and inputs to run it with again, and where they hold tokens that the targets follow or repeat."""

    name: str
    causal_at: tuple[int, int] | None
    repeated_at: list[int]
    module: torch.nn.Module
    given: Given


def _keeps_apart(module: torch.nn.Module) -> bool:
    """Return whether a model is a chain of layers of torch that never mix samples, and nothing else runs in it."""
    return all(type(part) in _APART and not _has_hooks(part) for part in module.modules())


def _has_hooks(part: torch.nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__)


def _can_fork() -> bool:
    is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return hasattr(os, "fork") and is_alone and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _live(questions: list[_Question], writing: int) -> NoReturn:
    """Answer in the copy, silent, and be gone whatever happens."""
    try:
        fall_silent()
        torch.set_num_threads(1)  # the threads of the pool are not here
        answers = [_try(question) for question in questions]
        write_all(writing, json.dumps(answers).encode())
    finally:
        os._exit(0)


def _try(question: _Question) -> dict[str, Any]:
    name, causal_at, repeated_at, module, given = question
    answer: dict[str, Any] = {"site": name, "source": _find_forward(module)}
    module.eval()
    for part in module.modules():
        part._forward_hooks.clear()
    with torch.no_grad():
        try:
            answer["mixing"] = find_mixing(module, given)
            answer["leak"] = None if causal_at is None else find_leak(module, given, *causal_at)
            answer["spread"] = find_spread(module, given, repeated_at) if repeated_at else None
            answer["mask"] = find_mask(module, given)
        except Exception as error:  # noqa: BLE001 - a model that cannot be run so is not judged
            answer["error"] = f"{type(error).__name__}: {error}"[:200]
    return answer


def _find_forward(module: torch.nn.Module) -> str:
    """Return ``file:line`` of the user's own forward, or nothing for one of a library."""
    code = getattr(type(module).forward, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code and not is_library(code.co_filename) else ""


def _keep(args: Any, kwargs: Any, *, is_repeated: bool, has_samples: bool) -> Given | None:
    """Copy the inputs of a call, or a few rows of large ones; nothing where that is too much."""
    leaves = [leaf for _, leaf in walk((args, kwargs))]
    plain = [leaf for leaf in leaves if type(leaf) is torch.Tensor and leaf.layout == torch.strided]
    if len(plain) != len(leaves) or not leaves or leaves[0].dim() < 2:
        return None
    size = sum(leaf.nbytes for leaf in leaves)
    count = leaves[0].shape[0]
    rows = count if size <= _MOST_BYTES else min(count, _ROWS)
    if sum(
        leaf.nbytes * rows // count if leaf.dim() and leaf.shape[0] == count else leaf.nbytes
        for leaf in leaves
    ) > (_MOST_BYTES):
        return None

    def copy(leaf: torch.Tensor) -> torch.Tensor:
        part = leaf[:rows] if leaf.dim() and leaf.shape[0] == count else leaf
        return part.detach().clone()

    return Given(args, kwargs, is_repeated=is_repeated, has_samples=has_samples, copy=copy)
