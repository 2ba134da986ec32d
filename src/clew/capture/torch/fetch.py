"""Values inside a model by name, all from one and the same execution: activations, gradients, parameters."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.fetch_catch import Catcher, Wish
from clew.capture.torch.fetch_step import kept_step, take_step
from clew.capture.torch.trace import Pass
from clew.capture.torch.trace_loss import find_loss, leaf_gradients, own_loss
from clew.capture.torch.trace_restore import eager, kept_gradients, unchanged, unrecorded
from clew.capture.torch.trace_subject import resolve_subject
from clew.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clew.capture.torch.trace_names import NamedTensor
    from clew.capture.torch.trace_subject import Subject

_SUFFIXES: Final = ("grad", "before", "after")


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """How to run: which loss to differentiate, which optimizer to step, whether its step stays."""

    loss: Callable[[Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    keep_step: bool = False


def fetch_values(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str], options: FetchOptions
) -> dict[str, torch.Tensor]:
    """Run a model once and return the values that the names ask for, in the order of execution."""
    wishes = [parse_wish(name) for name in names]
    _check(wishes, options)
    fetcher = _Fetcher(resolve_subject(model, args, kwargs), wishes, options)
    fetcher.run()
    return fetcher.collect()


def parse_wish(text: str) -> Wish:
    """Return the pattern and the kind of value that a name such as ``fc.*@grad`` asks for."""
    pattern, at, suffix = text.rpartition("@") if "@" in text else (text, "", "")
    if at and suffix not in _SUFFIXES:
        near = suggest(suffix, _SUFFIXES)
        raise UsageError(f"'{text}' asks for '@{suffix}'", next_step=near or "write @grad, @before or @after")
    if not pattern:
        raise UsageError(
            f"'{text}' names nothing", next_step="give names such as 'fc', 'fc.weight@grad' or 'block.*'"
        )
    return Wish(text, pattern, suffix)


def _check(wishes: list[Wish], options: FetchOptions) -> None:
    if not wishes:
        raise UsageError(
            "no names to fetch", next_step="give names such as 'fc' or ['block.*', 'fc.weight@grad']"
        )
    late = next((wish for wish in wishes if wish.suffix == "after"), None)
    if late is not None and options.optimizer is None:
        raise UsageError(f"'{late.text}' needs a step to come after", next_step="give optimizer=")
    if options.keep_step and options.optimizer is None:
        raise UsageError("keep_step=True without a step to keep", next_step="give optimizer=")


def _describe_loss(loss: Any) -> str:
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}"
    form = f"{loss.dtype}{tuple(loss.shape)}".removeprefix("torch.")
    return form if loss.requires_grad else f"{form} without a graph"


class _Fetcher:
    """One execution: forward, and as far as asked for, backward and step."""

    def __init__(self, subject: Subject, wishes: list[Wish], options: FetchOptions) -> None:
        self.options = options
        self.wishes = wishes
        self.catcher = Catcher(wishes)
        self.forward = Pass(subject, self.catcher)
        self.catcher.recorder = self.forward.recorder
        self.named = list(self.forward.recorder.names.tensors.values())
        self.needs_grads = options.optimizer is not None or any(wish.suffix == "grad" for wish in wishes)

    def run(self) -> None:
        """Execute, and leave model and optimizer as they were unless the step is to be kept."""
        with ExitStack() as stack:
            stack.callback(self.catcher.close)
            stack.enter_context(eager())
            if not self.options.keep_step:
                stack.enter_context(unrecorded())
                stack.enter_context(unchanged(list(self.forward.recorder.names.modules.values())))
            if self.needs_grads:
                stack.enter_context(torch.enable_grad())
            self._keep_named("before")
            output = self._run_forward()
            if self.needs_grads:
                self._run_backward(self._loss_of(output), stack)
            self._keep_named("after")

    def _run_forward(self) -> Any:
        subject = self.forward.subject
        output = self.forward.run_forward(subject.call, *subject.args, **subject.kwargs)
        self.catcher.keep_all("output", output)
        if self.options.loss is not None:
            output = self.forward.run_forward(self.options.loss, output)
            self.catcher.keep_all("loss", output)
        elif not self.catcher.is_known("loss"):  # a module of that name comes first
            self.catcher.keep_all("loss", own_loss(output))
        return output

    def _loss_of(self, output: Any) -> torch.Tensor:
        loss = find_loss(output)
        if loss is None and self.options.loss is not None:
            raise UsageError(
                f"gradients were asked for, and loss= gave {_describe_loss(output)}",
                next_step="return one number that depends on the output, as in loss.mean()",
            )
        if loss is None:
            raise UsageError(
                "gradients were asked for, and the output is no scalar that can be differentiated",
                next_step="give loss=, a function from the output to the loss",
            )
        return loss

    def _run_backward(self, loss: torch.Tensor, stack: ExitStack) -> None:
        leaves = [each for each in self.named if each.tensor.requires_grad]
        if self.options.optimizer is None:
            with self.forward.explained():
                grads = leaf_gradients(loss, [each.tensor for each in leaves])
            self._keep_grads(leaves, grads)
            return
        if self.options.keep_step:
            self.options.optimizer.zero_grad()
        else:
            stack.enter_context(kept_step(self.options.optimizer))
            stack.enter_context(kept_gradients([each.tensor for each in leaves]))
        with self.forward.explained():
            loss.backward()  # type: ignore[no-untyped-call]
        self._keep_grads(leaves, [each.tensor.grad for each in leaves])
        take_step(self.options.optimizer)

    def _keep_named(self, moment: str) -> None:
        """Keep parameters and buffers as they are before the pass, or after the step."""
        suffixes = ("", "before") if moment == "before" else ("after",)
        for each in self.named:
            for name in each.names:
                for suffix in suffixes:
                    self.catcher.keep(name, each.tensor, suffix)

    def _keep_grads(self, leaves: list[NamedTensor], grads: list[torch.Tensor | None]) -> None:
        for each, grad in zip(leaves, grads, strict=True):
            for name in each.names:
                self.catcher.offer(name, "grad")
                if grad is not None:
                    self.catcher.keep(name, grad, "grad")

    def collect(self) -> dict[str, torch.Tensor]:
        """Return what was caught; a name that caught nothing is an error."""
        self.catcher.settle_names()
        for wish in self.wishes:
            if not self.catcher.has_caught(wish):
                raise self._nothing_for(wish)
        return dict(self.catcher.caught)

    def _nothing_for(self, wish: Wish) -> UsageError:
        if wish.suffix == "grad" and self.catcher.is_known(wish.pattern):
            return UsageError(
                f"no gradient reached '{wish.pattern}'",
                next_step="it does not need one, or the loss does not depend on it",
            )
        shared = self.forward.recorder.names.shared
        first = next((path for path, others in shared.items() if wish.pattern in others), "")
        if first:
            return UsageError(
                f"'{wish.pattern}' is another name of the module '{first}'",
                next_step=f"ask for '{first}*': its calls are told apart by #1, #2 in order",
            )
        names = self.catcher.known_names()
        near = suggest(wish.pattern, names)
        listed = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
        return UsageError(
            f"'{wish.text}' matches nothing in {self.forward.subject.name}",
            next_step=near or f"there are {listed}",
        )
