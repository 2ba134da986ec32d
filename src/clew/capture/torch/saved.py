"""Which tensors that autograd keeps may be looked at: not those that pass through a user's hooks on their way out.

Activation checkpointing and offloading pack saved tensors and unpack them in backward, once. A second look would run
the model again or raise, so a node that was made while such hooks were on is left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder


class SavedRegions:
    """The stretches of the current step in which saved tensors were hooked, as numbers of autograd's counter."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._serial = -1
        self._open: list[int] = []
        self._closed: list[tuple[int, int]] = []

    def install(self, patches: Patches) -> None:
        """Begin to see where hooks are switched on and off."""
        owner = torch.autograd.graph.saved_tensors_hooks
        patches.replace(owner, "__enter__", self._make_enter)
        patches.replace(owner, "__exit__", self._make_exit)

    def may_read(self, node: Any) -> bool:
        """Return whether the tensors a node has saved are the very tensors, with no hook in between."""
        if not self._open and not self._closed:
            return True
        number = node._sequence_nr()
        if any(number >= start for start in self._open):
            return False
        return not any(start <= number < end for start, end in self._closed)

    def _make_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __enter__(context: Any) -> Any:  # noqa: N807
            if torch.compiler.is_compiling() or self.recorder.is_off():
                return original(context)
            if self._serial != self.recorder.serial:
                self._serial = self.recorder.serial
                self._closed.clear()
            self._open.append(torch._C._autograd._get_sequence_nr())
            return original(context)

        return __enter__

    def _make_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __exit__(context: Any, *args: object) -> Any:  # noqa: N807
            if not torch.compiler.is_compiling() and self._open and not self.recorder.is_off():
                self._closed.append((self._open.pop(), torch._C._autograd._get_sequence_nr()))
            return original(context, *args)

        return __exit__


def walk_nodes(node: Any, *, most: int) -> Iterator[Any]:
    """Yield the nodes of a graph from its end, nearest first, up to a number of them."""
    seen, queue = {node}, [node]
    for current in queue:
        yield current
        for before, _ in current.next_functions:
            if before is not None and before not in seen and len(seen) < most:
                seen.add(before)
                queue.append(before)
