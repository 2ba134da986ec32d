"""Who hears of what happens in a recording, and when: the probes, and whoever acts on a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from clew.capture.beat import Beat

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from clew.capture.torch.probe_signature import Signature
    from clew.capture.torch.registry import ModuleEntry


class Call(NamedTuple):
    """A module call that has ended, as probes see it."""

    module: torch.nn.Module
    entry: ModuleEntry
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    is_root: bool


class Listeners(Beat):
    """The part of a recorder that others put themselves into."""

    def make_room_for_listeners(self) -> None:
        """Begin with nobody who listens."""
        self.on_call: list[Callable[[Call], None]] = []
        """Probes: called after each module call of a recorded step, recomputed forwards left out."""
        self.on_root: list[Callable[..., None]] = []
        """Probes: called after every root call, recorded or not, with the module, its arguments and its output."""
        self.calm: set[int] = set()
        """Identities of models whose calls in training, outside probed steps, have nothing new for the next two."""
        self.around: Callable[[torch.nn.Module], Any] | None = None
        """A probe that may give a context manager to run a root call in, or None."""
        self.sentinel: Callable[..., None] | None = None
        """Called as ``on_root`` and by the shortest way: it waits, for probes that rest, for something new."""
        self.on_pass: list[Callable[[bool], None]] = []
        """Probes: called with True before a backward pass that fills ``.grad``, with False after it."""
        self.on_grad: list[Callable[[], None]] = []
        """Probes: called before ``autograd.grad``, which leaves ``.grad`` alone."""
        self.on_derived: list[Callable[[Any, Any], None]] = []
        """Probes: called after it with what it was to derive by, and the derivatives."""
        self.on_batch: list[Callable[[Any, Any], None]] = []
        """Probes: called with a loader's iterator and the batch it has given."""
        self.on_first_batch: list[Callable[[Any, Any], None]] = []
        """Probes: called as these, after them, with the first batch of an iterator."""
        self.on_exhausted: list[Callable[[Any], None]] = []
        """Probes: called with a loader's iterator that has no more batches."""
        self.on_trouble: list[Callable[[str, str], None]] = []
        """Probes: called with what is bad (loss, gradient, parameter) and its name, before it is explained."""
        self.on_error: list[Callable[[BaseException], None]] = []
        """Probes: called with the exception that ends the training."""
        self.on_each_loss: list[Callable[[torch.Tensor], None]] = []
        """Probes: as ``on_loss``, but in every step; for what takes itself out again soon."""
        self.on_loss: list[Callable[[torch.Tensor], None]] = []
        """Probes: called with each root of a backward pass before it runs, its graph still whole."""
        self.on_end: list[Callable[[], None]] = []
        """Called in the training's own thread after a step has ended and before the next one begins."""
        self.on_seldom: list[Callable[[], None]] = []
        """Called as ``on_end``, in the first steps and seldom afterwards."""
        self.on_stepping: list[Callable[[torch.optim.Optimizer, bool], None]] = []
        """An optimizer is about to step; True where a closure will compute the gradients inside."""
        self.on_stepped: list[Callable[[torch.optim.Optimizer, bool], None]] = []
        """An optimizer has stepped."""
        self.signing: list[Signature] = []
        """The signature of the loop in steps that it takes: it is told of everything by the shortest way."""
        self.turns: Signature | None = None
        """The same, as long as it is told of the end of each step of an optimizer: all listeners have been."""
        self.prompt = False
        """Whether each step is handed over at once: somebody acts on it."""
        self.is_followed = False
        """Whether somebody stands at the end of every step: then none passes by the short way."""
        self.breaker: Any = None
        """Stops the training for somebody who asked for that; made where there is a recording to stop."""
