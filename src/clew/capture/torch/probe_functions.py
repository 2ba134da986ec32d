"""Sees functional dropout, attention and batch normalisation for the length of one root call.

A mode of torch sees every function whatever name it was imported by. It is on in a model's first call of training and
its first two of evaluation only, and never where code is compiled.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from clew.capture.torch.probe_events import find_line

if TYPE_CHECKING:
    from collections.abc import Callable

_DROPOUTS: Final[dict[Any, tuple[str, int, int]]] = {
    F.dropout: ("F.dropout", 1, 2),
    F.dropout1d: ("F.dropout1d", 1, 2),
    F.dropout2d: ("F.dropout2d", 1, 2),
    F.dropout3d: ("F.dropout3d", 1, 2),
    F.alpha_dropout: ("F.alpha_dropout", 1, 2),
    F.feature_alpha_dropout: ("F.feature_alpha_dropout", 1, 2),
    torch.dropout: ("torch.dropout", 1, 2),
}
"""Name, position of the probability and of the switch among the arguments."""

_MOST_FRAMES: Final = 6


class FunctionWatch(TorchFunctionMode):
    """Passes every function on as it is, and tells of those that matter."""

    def __init__(self, module: torch.nn.Module, tell: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._module = module
        self._tell = tell
        self._known: set[int] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at a function that is about to run, and run it."""
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            self._see_dropout(func, args, kwargs)
        elif func is F.scaled_dot_product_attention:
            self._see_attention(args, kwargs)
        elif func is F.batch_norm:
            self._see_batch_norm(args, kwargs)
        return func(*args, **kwargs)

    def _see_dropout(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, at, switch = _DROPOUTS[func]
        probability = _argument(args, kwargs, at, "p", 0.5)
        is_on = bool(_argument(args, kwargs, switch, "train" if func is torch.dropout else "training", True))
        if is_on and probability > 0:
            self._report(name, probability)

    def _see_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        probability = _argument(args, kwargs, 4, "dropout_p", 0.0)
        if probability > 0:
            self._report("F.scaled_dot_product_attention", probability)

    def _see_batch_norm(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("input")
        if not isinstance(given, torch.Tensor) or given.dim() < 2 or not given.shape[1]:
            return
        if _argument(args, kwargs, 5, "training", False) and _find_caller() is None:
            values = given.numel() // given.shape[1]
            self._tell({"function": "F.batch_norm", "values": values, "source": find_line()})

    def _report(self, name: str, probability: float) -> None:
        """Tell of a dropout that is on, unless a module of the model itself has switched it on."""
        caller = _find_caller()
        if caller is not None:
            if self._known is None:
                self._known = {id(module) for module in self._module.modules()}
            if id(caller) in self._known:
                return
            name = f"nn.{type(caller).__name__}"
        self._tell({"function": name, "p": float(probability), "source": find_line(caller)})


def is_compiling_in_use() -> bool:
    """Return whether something was given to torch.compile: a mode would make it compile again."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends: dict[int, Any] = getattr(frames, "cached_backends", {})
    return any(backend is not None for backend in backends.values())


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], at: int, name: str, default: Any) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def _find_caller() -> torch.nn.Module | None:
    """Return the module of torch that called the function, or None where the user's own code did."""
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        file = frame.f_code.co_filename
        if "torch" not in file or not file.endswith((".py",)):
            return None
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and type(owner).__module__.startswith("torch."):
            return owner
        if not file.endswith(("functional.py", "overrides.py", "probe_functions.py")):
            return None
    return None
