"""Calls of known loss functions, seen as they happen: what the model gave, what it should have given, and the loss."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.nn.functional as F

from clew.capture.torch.patches import Patches

if TYPE_CHECKING:
    from collections.abc import Callable

CLASSES: Final = ("cross_entropy", "nll_loss")
PROBABILITIES: Final = ("binary_cross_entropy_with_logits", "binary_cross_entropy")
DISTANCES: Final = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")

_ORIGINALS: Final = {name: getattr(F, name) for name in (*CLASSES, *PROBABILITIES, *DISTANCES)}


class LossCall(NamedTuple):
    """One call of a loss function, its tensors as they were given."""

    name: str
    prediction: torch.Tensor
    target: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: torch.Tensor

    def repeat(self, prediction: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss of another prediction, everything else as it was."""
        with torch.no_grad():
            chosen = self.target if target is None else target
            result: torch.Tensor = _ORIGINALS[self.name](prediction, chosen, *self.args, **self.kwargs)
            return result

    @property
    def class_count(self) -> int:
        """How many classes the prediction tells apart."""
        return int(self.prediction.shape[1 if self.prediction.dim() > 1 else 0])

    @property
    def ignored(self) -> int:
        """The target that does not count."""
        position = {"cross_entropy": 2, "nll_loss": 2}.get(self.name, -1)
        given = self.args[position] if 0 <= position < len(self.args) else None
        return int(self.kwargs.get("ignore_index", -100 if given is None else given))

    @property
    def has_class_targets(self) -> bool:
        """Whether the target names classes by number."""
        return self.name in CLASSES and not self.target.is_floating_point()


class LossWatch:
    """Keeps the calls of known loss functions between ``install`` and ``remove``; a call inside a call counts once."""

    def __init__(self) -> None:
        self.calls: list[LossCall] = []
        self._patches = Patches()
        self._is_inside = False

    def install(self) -> None:
        """Begin to see loss functions; modules such as ``CrossEntropyLoss`` call them by name."""
        for name in _ORIGINALS:
            self._patches.replace(F, name, functools.partial(self._make, name))

    def remove(self) -> None:
        """Leave torch as it was found."""
        self._patches.undo()

    @staticmethod
    def seen(function: Any) -> Any:
        """Return what a loss function is called by now: a watch sees it by name, not by an older reference."""
        name = next((name for name, known in _ORIGINALS.items() if known is function), "")
        return getattr(F, name) if name else function

    def _make(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def loss(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return original(*args, **kwargs)
            self._is_inside = True
            try:
                result = original(*args, **kwargs)
            finally:
                self._is_inside = False
            self._keep(name, args, kwargs, result)
            return result

        return loss

    def _keep(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = dict(kwargs)
        values = list(args)
        prediction = values.pop(0) if values else given.pop("input", None)
        target = values.pop(0) if values else given.pop("target", None)
        if isinstance(prediction, torch.Tensor) and isinstance(target, torch.Tensor):
            self.calls.append(LossCall(name, prediction, target, tuple(values), given, result))
