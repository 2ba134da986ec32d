"""Sees functional dropout, attention and batch normalisation inside root calls, whatever name they were imported by.

The functions of ``torch.nn.functional`` all end in a few of torch's own; those are replaced by ones that look at their
arguments and pass everything on. No mode of torch is used: a mode switches fused paths off and changes results.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.jit._builtins
import torch.nn.functional as F

from clew.capture.frame_variables import variables_of
from clew.capture.torch.probe_events import find_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from clew.capture.torch.gates import Gates
    from clew.capture.torch.patches import Patches

    Facts = dict[str, Any]

_DROPOUTS: Final = {
    "dropout": "F.dropout",
    "dropout_": "F.dropout",
    "feature_dropout": "F.dropout2d",
    "feature_dropout_": "F.dropout2d",
    "alpha_dropout": "F.alpha_dropout",
    "alpha_dropout_": "F.alpha_dropout",
    "feature_alpha_dropout": "F.feature_alpha_dropout",
    "feature_alpha_dropout_": "F.feature_alpha_dropout",
}
"""What ``torch.nn.functional`` calls, and what the user called."""

_MOST_FRAMES: Final = 24


class _Thread(threading.local):
    """The root call that one thread is in the middle of, if it is looked into."""

    look: Look | None = None


class Look:
    """Looks into one root call, as a context manager around it."""

    __slots__ = ("_looks", "_tell", "_thread", "module", "parts")

    def __init__(
        self, thread: _Thread, looks: list[Look], module: torch.nn.Module, tell: Callable[[Facts], None]
    ) -> None:
        self._thread = thread
        self._looks = looks
        self._tell = tell
        self.module = module
        self.parts: dict[int, torch.nn.Module] = {}

    def __enter__(self) -> None:
        self.parts = {id(part): part for part in self.module.modules()}
        self._thread.look = self
        self._looks.append(self)

    def __exit__(self, *_: object) -> None:
        self._thread.look = None
        self._looks.remove(self)

    def tell_dropout(self, name: str, probability: float) -> None:
        """Tell of a dropout that is on, unless a part of the model that was switched on itself has called it."""
        caller, owner = self._find_callers()
        if owner is not None and owner.training and not self.module.training:
            return
        if caller is not None and id(caller) in self.parts:
            return
        called = name if caller is None else f"nn.{type(caller).__name__}"
        self._tell({"function": called, "p": float(probability), "source": find_line(caller)})

    def tell_values(self, name: str, values: int) -> None:
        """Tell how many values a normalisation by hand has; modules are seen without this."""
        caller, _ = self._find_callers()
        if caller is None:
            self._tell({"function": name, "values": values, "source": find_line()})

    def _find_callers(self) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
        """Return the module of torch that called the function itself, and the nearest part of the model around it."""
        frame: FrameType | None = sys._getframe(3)
        caller: torch.nn.Module | None = None
        is_direct = True
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            own = variables_of(frame).get("self")
            if isinstance(own, torch.nn.Module):
                if is_direct and type(own).__module__.startswith("torch."):
                    caller = own
                if id(own) in self.parts:
                    return caller, own
            is_direct = is_direct and (frame.f_globals is vars(F) or frame.f_globals is globals())
            frame = frame.f_back
        return caller, None


class FunctionWatch:
    """The replaced functions; they look while a root call is looked into and are a mere call more otherwise."""

    def __init__(self, gates: Gates, fail: Callable[[Exception], None]) -> None:
        self._thread = _Thread()
        self._looks: list[Look] = []
        """Those of all threads."""
        self._gates = gates
        self._fail = fail

    def install(self, patches: Patches) -> None:
        """Replace the functions until the recording ends."""
        for name, told in _DROPOUTS.items():
            self._replace(patches, torch._VF, name, functools.partial(_see_dropout, told))
        self._replace(patches, torch, "dropout", functools.partial(_see_dropout, "torch.dropout"))
        self._replace(patches, torch, "batch_norm", _see_batch_norm)
        self._replace(patches, F, "scaled_dot_product_attention", _see_attention)

    def look(self, module: torch.nn.Module, tell: Callable[[Facts], None]) -> Look:
        """Return a context manager for one root call; ``tell`` must not raise."""
        return Look(self._thread, self._looks, module, tell)

    def _replace(
        self, patches: Patches, owner: Any, name: str, see: Callable[[Look, tuple[Any, ...], Facts], None]
    ) -> None:
        thread, fail, is_compiling = self._thread, self._fail, torch.compiler.is_compiling

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def function(*args: Any, **kwargs: Any) -> Any:
                if is_compiling():
                    return original(*args, **kwargs)
                if thread.look is not None:
                    try:
                        see(thread.look, args, kwargs)
                    except Exception as error:  # noqa: BLE001 - ours to answer for
                        thread.look = None
                        fail(error)
                return original(*args, **kwargs)

            return function

        replace_function(patches, owner, name, make, functools.partial(self._gates.look, looks=self._looks))


def replace_function(
    patches: Patches,
    owner: Any,
    name: str,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    cover: Callable[[Any, Any], Any] | None = None,
) -> Callable[[], None]:
    """Replace one of torch's own functions until the recording ends or the returned function is called.

    Scripted models may still call it. A cover is one of ``Patches.replace``.
    """
    original, was_own = getattr(owner, name), name in vars(owner)
    made = make(original)
    gate = made if cover is None else cover(original, made)
    setattr(owner, name, made)
    _register(made, name)
    _register(gate, name)
    patches.add_gate(owner, name, made, gate)
    undo = functools.partial(_undo, owner, name, (gate, made), original if was_own else None)
    patches.on_undo(undo)
    return undo


def _register(function: Any, name: str) -> None:
    """Tell torch.jit that a function is one of torch's own: scripted models call it too."""
    table = torch.jit._builtins._builtin_table
    if table is not None:
        table[id(function)] = f"aten::{name}"


def _undo(owner: Any, name: str, ours: tuple[Any, Any], original: Any) -> None:
    if not any(vars(owner).get(name) is each for each in ours):
        return
    if original is None:
        delattr(owner, name)
    else:
        setattr(owner, name, original)
    table = torch.jit._builtins._builtin_table
    if table is not None:
        # Made while ours was in place, the table knows ours alone.
        for each in ours:
            table.pop(id(each), None)
        _register(getattr(owner, name), name)


def _see_dropout(name: str, look: Look, args: tuple[Any, ...], kwargs: Facts) -> None:
    probability = _argument(args, kwargs, 1, "p", 0.0)
    if probability > 0 and _argument(args, kwargs, 2, "train", False):
        look.tell_dropout(name, probability)


def _see_attention(look: Look, args: tuple[Any, ...], kwargs: Facts) -> None:
    probability = _argument(args, kwargs, 4, "dropout_p", 0.0)
    if probability > 0:
        look.tell_dropout("F.scaled_dot_product_attention", probability)


def _see_batch_norm(look: Look, args: tuple[Any, ...], kwargs: Facts) -> None:
    given = args[0] if args else kwargs.get("input")
    if type(given) is not torch.Tensor or given.dim() < 2 or not given.shape[1]:
        return
    if _argument(args, kwargs, 5, "training", False):
        look.tell_values("F.batch_norm", given.numel() // given.shape[1])


def _argument(args: tuple[Any, ...], kwargs: Facts, at: int, name: str, default: Any) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)
