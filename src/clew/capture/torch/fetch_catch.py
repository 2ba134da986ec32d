"""Catching values by name while a pass runs: outputs of modules and operations, and their gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clew.capture.torch.leaves import walk
from clew.capture.torch.trace_build import name_operations
from clew.model.glob import compile_globs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from clew.capture.torch.trace_recorder import OperationRecorder, RawOperation


@dataclass(frozen=True, slots=True)
class Wish:
    """What one name asks for: its text, the pattern, and ``grad``, ``before``, ``after`` or nothing."""

    text: str
    pattern: str
    suffix: str


class Catcher:
    """Watches a pass and keeps copies of what was wished for, under the names of the graph."""

    recorder: OperationRecorder

    def __init__(self, wishes: Sequence[Wish]) -> None:
        self.caught: dict[str, torch.Tensor] = {}
        self._fits = [(wish, compile_globs((wish.pattern,))) for wish in wishes]
        self._suffixes = {wish.suffix for wish in wishes}
        self._fulfilled: set[Wish] = set()
        self._known: dict[str, None] = {}
        self._counts: dict[str, int] = {}
        self._handles: list[Any] = []
        self._drafts: dict[int, str] = {}

    # ---------------------------------------------------------------- what the recorder tells

    def on_tensor(self, index: int, tensor: torch.Tensor) -> None:
        """Tensors are caught with the module or operation that made them."""

    def on_module(self, site: str, call: int, output: Any) -> None:
        """Catch the output of a module."""
        if site:
            self.keep_all(f"{site}#{call}" if call else site, output)

    def on_operation(self, operation: RawOperation, outputs: Sequence[torch.Tensor]) -> None:
        """Catch the outputs of an operation, under a draft of its name."""
        stem = f"{operation.site}#{operation.call}" if operation.call else operation.site
        name = f"{stem}.{operation.op}".lstrip(".")
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        draft = f"{name}_{count}" if count else name
        self._drafts[len(self.recorder.operations) - 1] = draft
        for index, tensor in enumerate(outputs):
            self._keep_with_grad(f"{draft}:{index}" if index else draft, draft, tensor)

    # ---------------------------------------------------------------- keeping

    def keep_all(self, name: str, value: Any) -> None:
        """Catch every tensor of a value; one inside a container is told apart by its path."""
        for path, tensor in walk(value):
            self._keep_with_grad(name + path, name, tensor)

    def _keep_with_grad(self, name: str, group: str, tensor: torch.Tensor) -> None:
        self.keep(name, tensor, "", group=group)
        wanted = "grad" in self._suffixes and self._wishes(name, "grad", group)
        if wanted and tensor.requires_grad:
            hook = functools.partial(self._keep_gradient, name, group)
            self._handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]

    def _keep_gradient(self, name: str, group: str, grad: torch.Tensor | None) -> None:
        if grad is not None:
            self.keep(name, grad, "grad", group=group)

    def keep(self, name: str, tensor: torch.Tensor, suffix: str, *, group: str = "") -> None:
        """Copy a tensor if its name, or that of what it belongs to, was wished for with this suffix."""
        self.offer(group or name, suffix)
        wishes = self._wishes(name, suffix, group)
        if wishes:
            self._fulfilled.update(wishes)
            self.caught[f"{name}@{suffix}" if suffix else name] = tensor.detach().clone()

    def offer(self, name: str, suffix: str) -> None:
        """Note that a name exists, for suggestions."""
        if suffix in ("", "grad"):
            self._known[name] = None

    def _wishes(self, name: str, suffix: str, group: str) -> list[Wish]:
        if suffix not in self._suffixes:
            return []
        return [
            wish
            for wish, fits in self._fits
            if wish.suffix == suffix and (fits(name) or (group and fits(group)))
        ]

    # ---------------------------------------------------------------- afterwards

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def settle_names(self) -> None:
        """Drop the operation that is all its module did, where the module itself was caught."""
        for number, name in enumerate(name_operations(self.recorder)):
            draft = self._drafts.get(number, name)
            if draft != name and name in self._known:
                self._known.pop(draft, None)
                for suffix in ("", "@grad"):
                    if name + suffix in self.caught:
                        self.caught.pop(draft + suffix, None)

    def has_caught(self, wish: Wish) -> bool:
        """Return whether a wish was fulfilled."""
        return wish in self._fulfilled

    def is_known(self, pattern: str) -> bool:
        """Return whether a pattern fits any name of the pass."""
        fits = compile_globs((pattern,))
        return any(fits(name) for name in self._known)

    def known_names(self) -> list[str]:
        """Return every name of the pass in order of execution."""
        return list(self._known)
