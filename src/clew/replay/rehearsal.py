"""Executing a step again under the op lens, up to the moment its symptom shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from clew.capture.torch.leaves import walk
from clew.capture.torch.patches import Patches
from clew.replay.frames import name_in_frames
from clew.replay.lens import OpLens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from clew.capture.torch.registry import Registry
    from clew.replay.lens import Event


COMPUTED: Final = "computed"
"""What a tensor is that was computed before the piece that is executed began."""
LEAF: Final = "leaf"
"""What a tensor is that gathers gradients and belongs to no module: a weight of one's own."""


class Symptom(NamedTuple):
    """What showed that something is wrong: the loss, a gradient or a parameter, and the operation that wrote it."""

    kind: str
    name: str
    writer: int
    loss: float | None


class _Shown(BaseException):
    """Ends the execution where the symptom shows; no handler of the user's is meant to catch it."""


class Rehearsal:
    """Runs a piece of training and stops at the first bad loss, gradient or parameter.

    ``on_symptom`` is called instead of stopping; ``adopts`` names models that the registry does not know yet when
    they are first called.
    """

    def __init__(
        self,
        registry: Registry,
        batch: Iterable[torch.Tensor] = (),
        *,
        on_symptom: Callable[[Symptom], None] | None = None,
        adopts: bool = False,
    ) -> None:
        self._registry = registry
        self._on_symptom = on_symptom or _stop
        self._adopts = adopts
        self._batch = {id(tensor) for tensor in batch}
        self.batch_size: int | None = None
        self._path: list[torch.nn.Module] = []
        self.lens = OpLens(role_of=self._role_of, site=self._site)
        self.symptom: Symptom | None = None
        self.losses: list[float] = []
        self.prints: list[tuple[str, int]] = []
        """Modules in order of execution with the hash of their output, to compare with the recording."""
        self.error: BaseException | None = None
        self._may_overflow = False
        self.bad_loss: torch.Tensor | None = None
        """The loss whose value showed the fault."""
        self.backward_ended = -1
        """How many operations there were when the last backward pass ended: what follows writes the weights."""
        self.blamed: Event | None = None
        """The operation that the verdict names."""
        self.on_call: Callable[[str, torch.nn.Module, tuple[Any, ...], dict[str, Any], Any], None] | None = (
            None
        )
        """Called after each module call with its name, arguments and output."""
        self._patches = Patches()
        self._leaves: dict[int, tuple[str, torch.Tensor]] = {}
        self._is_on = self._is_listening = False

    def run(self, step: Callable[[], object]) -> None:
        """Execute a step under the lens; ``symptom`` says what showed, None when nothing did."""
        self.install()
        try:
            with self.lens:
                result = step()
                self._look_at_result(result)
        except _Shown:
            pass
        except Exception as error:  # noqa: BLE001 - the way did not work; the caller tries another
            self.error = error
        finally:
            self.remove()

    # ---------------------------------------------------------------- where it stops

    def install(self) -> None:
        """Begin to see module calls, backward passes and optimizers."""
        self._patches.replace(torch.nn.Module, "_call_impl", self._make_call)
        self._patches.replace(torch.autograd, "backward", self._make_backward)
        self._patches.replace(torch.amp.GradScaler, "scale", self._make_scale)
        self.listen()
        self._is_on = True

    def listen(self) -> None:
        """Hear of optimizers from now on: torch takes no new hooks while it is calling them, so this comes first."""
        if not self._is_listening:
            self._is_listening = True
            self._patches.on_undo(register_optimizer_step_pre_hook(self._before_optimizer).remove)
            self._patches.on_undo(register_optimizer_step_post_hook(self._after_optimizer).remove)

    def begin_step(self) -> None:
        """Drop what was noted of the step before."""
        self.lens.forget()
        self._batch.clear()
        self.losses.clear()
        self.prints.clear()
        self.symptom = None
        self.bad_loss = None
        self._leaves.clear()

    def remove(self) -> None:
        """Leave torch as it was found."""
        self._is_on = self._is_listening = False
        self._patches.undo()

    def _make_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _call_impl(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._adopts:
                self._adopt(module, (args, kwargs))
            self._path.append(module)
            try:
                output = original(module, *args, **kwargs)
            finally:
                self._path.pop()
            name = self._name_module(module)
            if type(output) is torch.Tensor and torch._C._current_autograd_node() is None:
                self.prints.append((name, self.lens.fingerprint(output)))
            if self.on_call is not None:
                self.on_call(name, module, args, kwargs, output)
            return output

        return _call_impl

    def _make_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            for _, loss in walk(tensors):
                if loss.numel() == 1:
                    self.losses.append(float(loss.detach()))
                self._stop_if_bad("loss", "loss", loss)
            result = original(tensors, *args, **kwargs)
            self.backward_ended = len(self.lens.events)
            self._look_at_gradients()
            return result

        return backward

    def _make_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            # Infinite gradients are how a scaler finds its scale; once it has nothing left to lower, they are a fault.
            self._may_overflow = scaler.is_enabled() and scaler.get_scale() > 1
            return original(scaler, outputs)

        return scale

    def _before_optimizer(self, *_: Any) -> None:
        self.lens.in_optimizer = True

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.lens.in_optimizer = False
        if not self._is_on:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._stop_if_bad("parameter", self._name(parameter), parameter)

    def look_at_parameters(self) -> None:
        """Look at the weights that were written in this step: a loop without an optimizer says nothing itself."""
        for entry, parameter in self._registry.living_parameters():
            if self.lens.writer_of(parameter) >= 0:
                self._stop_if_bad("parameter", entry.name, parameter)
        for name, leaf in list(self._leaves.values()):
            if self.lens.writer_of(leaf) >= 0:
                self._stop_if_bad("parameter", name, leaf)

    def take_last_operation(self) -> None:
        """Nothing was trained by a backward: the last bad value that was computed is the symptom, if there is one."""
        bad = [event for event in self.lens.events if event.bad and not event.meant]
        if bad and self.symptom is None:
            self.symptom = Symptom("operation", bad[-1].op, bad[-1].index, None)

    def _look_at_gradients(self) -> None:
        if self._may_overflow:
            return
        for entry, parameter in self._registry.living_parameters():
            if parameter.is_leaf and parameter.grad is not None:
                self._stop_if_bad("gradient", entry.name, parameter.grad)

    def _look_at_result(self, result: object) -> None:
        for _, tensor in walk(result):
            self._stop_if_bad("output", "result", tensor)

    def _stop_if_bad(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        if self.lens.measure(tensor).is_bad and not self.lens.is_meant(tensor):
            self.bad_loss = tensor if kind == "loss" else None
            self.symptom = Symptom(
                kind, name, self.lens.writer_of(tensor), self.losses[-1] if self.losses else None
            )
            self._on_symptom(self.symptom)

    def fingerprint(self, tensor: torch.Tensor) -> int:
        """Return the hash of a tensor, 0 for one that cannot be read."""
        return self.lens.fingerprint(tensor)

    # ---------------------------------------------------------------- what is what

    def _adopt(self, module: torch.nn.Module, given: Any) -> None:
        """Name a model that is called for the first time, and what it is called with."""
        if id(module) not in self._registry.modules:
            self._registry.add_tree(module)
        if not self._path:
            self.add_batch(given)

    def add_batch(self, given: Any) -> None:
        """Take the tensors in a value that nothing has computed in this step as the batch."""
        leaves = [leaf for _, leaf in walk(given) if leaf.grad_fn is None and not leaf.requires_grad]
        batch = [leaf for leaf in leaves if self.lens.writer_of(leaf) < 0 and not self._registry.owns(leaf)]
        self._batch |= set(map(id, batch))
        if batch:
            self.batch_size = int(batch[0].shape[0]) if batch[0].dim() else None

    def _site(self) -> str:
        return self._name_module(self._path[-1]) if self._path else ""

    def _name_module(self, module: torch.nn.Module) -> str:
        """Return a module's name as it is now: the first call of a model is what gives it one."""
        entry = self._registry.modules.get(id(module))
        return entry.name if entry is not None else type(module).__name__

    def find_tensor(self, name: str) -> torch.Tensor | None:
        """Return the parameter or buffer of a name, if it is still there."""
        entries = self._registry.tensors.values()
        return next((entry.ref() for entry in entries if entry.name == name), None)

    def _name(self, parameter: torch.Tensor) -> str:
        entry = self._registry.tensors.get(id(parameter))
        return entry.name if entry is not None else "parameter"

    def _role_of(self, tensor: torch.Tensor) -> str:
        """Name a tensor from outside: a parameter or buffer by its path, the batch and earlier results as such."""
        entry = self._registry.tensors.get(id(tensor))
        if entry is not None:
            return f"parameter {entry.name}" if tensor.requires_grad else f"buffer {entry.name}"
        if id(tensor) in self._batch:
            return "batch"
        if tensor.grad_fn is not None:
            return COMPUTED
        if not tensor.requires_grad:
            return ""
        name = name_in_frames(tensor)
        # A view without a graph, such as optimizers make, is no weight, and cannot be looked at later.
        if not tensor._is_view():
            self._leaves.setdefault(id(tensor), (name, tensor))
        return f"{LEAF} {name}".strip()


def _stop(_: Symptom) -> None:
    raise _Shown
