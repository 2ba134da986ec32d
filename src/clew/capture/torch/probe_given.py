"""Notes losses of scores or logarithms that are given probabilities, whatever made them: judged by what goes in.

A softmax or sigmoid right before the loss is seen in its graph. Shares that were divided by their sum, or the mean of
several sigmoids, look like any other arithmetic there; what gives them away is that every row adds up to 1, or that
numbers made of sigmoids alone all lie between 0 and 1. A divergence is written out in the graph in as many ways as it
has arguments with gradients, but what it is given first is never the logarithm of a probability where it is positive.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from clew.capture.torch.glance import glance
from clew.capture.torch.probe_events import find_line
from clew.capture.torch.probe_functions import replace_function
from clew.capture.torch.probe_graph import VIEWS, name_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder

_LOOKS: Final = 3
_FEWEST_LOOKS: Final = 2
"""Calls that are looked at, and how many suffice where nothing was found."""

_ROWS: Final = 64
_FEWEST: Final = 4
_ABOVE_ONE: Final = 1e-3
_MOST_NODES: Final = 24
_SQUASHING: Final = frozenset(("Sigmoid", "Softmax"))
_MIXING: Final = frozenset(
    ("Mean", "Sum", "Max", "Min", "Amax", "Amin", "Maximum", "Minimum", "Stack", "Cat", "Prod", "Add", "Sub", "Rsub",
     "Mul", "Div", "Clamp", "ClampMin", "ClampMax", "Expand", "Unbind", "Split", "Gather", "Pow")
)  # fmt: skip
"""Arithmetic that makes one probability out of several."""


class GivenProbe:
    """Looks at what the first calls of losses of scores and logarithms are given."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._looks: dict[str, int] = {}
        self._found: dict[str, int] = {}
        self._leave: dict[str, Callable[[], None]] = {}

    def install(self, patches: Patches) -> None:
        """Begin to see losses."""
        for form, (owner, name, find) in _FORMS.items():
            if self._looks.get(form, 0) < _LOOKS:
                make = functools.partial(self._make, find=find, form=form)
                self._leave[form] = replace_function(patches, owner, name, make)

    def _make(
        self, original: Callable[..., Any], *, find: Callable[[torch.Tensor], str], form: str
    ) -> Callable[..., Any]:
        is_compiling = torch.compiler.is_compiling
        recorder = self.recorder
        told: list[Callable[..., None]] = [functools.partial(self._see, find, form)]

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if args and not is_compiling() and not recorder.asleep and self._looks.get(form, 0) < _LOOKS:
                recorder.ask(told, args)
            return original(*args, **kwargs)

        return function

    def _see(self, find: Callable[[torch.Tensor], str], form: str, args: tuple[Any, ...]) -> None:
        given = args[0]
        is_plain = type(given) is torch.Tensor and not is_functorch_wrapped_tensor(given)
        if not is_plain or given.is_meta or not torch.is_grad_enabled():
            return
        targets = args[1] if len(args) > 1 else None
        is_swapped = form == "kl" and given.grad_fn is None and getattr(targets, "requires_grad", False)
        if given.grad_fn is None and not is_swapped:
            return
        self._looks[form] = self._looks.get(form, 0) + 1
        with torch.no_grad():
            above = find(given) if given.is_floating_point() and given.numel() >= _FEWEST else ""
        self._found[form] = self._found.get(form, 0) + bool(above)
        if self._looks[form] >= _FEWEST_LOOKS + self._found[form] or self._looks[form] >= _LOOKS:
            # A function that is called in every step is not to take a turn through here for ever.
            self._leave[form]()
        if above:
            classes = given.shape[min(1, given.dim() - 1)]
            note = {"form": form, "above": above, "classes": classes, "source": find_line()}
            self.recorder.note("loss-input", {**note, "is_swapped": is_swapped})


def _find_shares(given: torch.Tensor) -> str:
    """Return ``shares`` where the classes of every sample are not negative and add up to 1."""
    if given.dim() < 2 or given.shape[1] < 2 or (given.dim() == 2 and min(glance(given, _ROWS)) < 0):
        return ""  # a few numbers tell of nearly all scores that they are no shares
    rows = given.detach().movedim(1, -1).reshape(-1, given.shape[1])[:_ROWS].float()
    is_share = bool((rows >= 0).all()) and bool(((rows.sum(1) - 1).abs() < 1e-3).all())
    return "shares" if is_share else ""


def _find_positive(given: torch.Tensor) -> str:
    """Return ``positive`` where something is above the logarithm of 1, by more than an epsilon makes it."""
    return "positive" if float(given.detach().reshape(-1)[: _ROWS * _ROWS].max()) > _ABOVE_ONE else ""


def _find_squashed(given: torch.Tensor) -> str:
    """Return ``sigmoid`` or ``softmax`` for numbers from 0 to 1 that are made of those alone."""
    values = given.detach().reshape(-1)[: _ROWS * _ROWS]
    if not bool(((values > 0) & (values < 1)).all()):
        return ""
    found: set[str] = set()
    start: Any = given.grad_fn
    queue, seen = [start], {start}
    for node in queue:
        name = name_of(node)
        if name in _SQUASHING:
            found.add(name.lower())
            continue
        if (name not in _MIXING and type(node).__name__ not in VIEWS) or len(seen) > _MOST_NODES:
            return ""
        fresh = [before for before, _ in node.next_functions if before is not None and before not in seen]
        seen.update(fresh)
        queue += dict.fromkeys(fresh)
    return min(found, default="")


_FORMS: Final = {
    "cross_entropy": (torch._C._nn, "cross_entropy_loss", _find_shares),
    "bce_logits": (torch, "binary_cross_entropy_with_logits", _find_squashed),
    "kl": (torch, "kl_div", _find_positive),
}
"""Losses by where torch keeps them, and what to look for in what they are given."""
