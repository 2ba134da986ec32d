"""What is rehearsed: a training step that can be executed again from the same beginning, in copies of the process."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from clew.capture.torch.leaves import walk
from clew.capture.torch.patches import Patches
from clew.replay.preflight_losses import LossWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clew.capture.torch.flight import RootCall
    from clew.replay.preflight_losses import LossCall

_WRITES: Final = ("w", "a", "x", "+")


class Blocked(SystemExit):
    """Raised in a rehearsal where the script is about to write a file."""


class Seen(NamedTuple):
    """What one rehearsed step showed."""

    losses: list[float]
    calls: list[LossCall]
    steps: int
    gradients: dict[int, float | None]
    """Largest magnitude of the gradient of each parameter when the optimizer stepped, by identity; None: none."""
    blocked: str


class Subject:
    """A training to rehearse: its models, optimizers, one step as a function, and its state at the beginning."""

    def __init__(
        self,
        *,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        step: Callable[[], object],
        roots: Sequence[RootCall],
        names: dict[int, str],
        beginning: Beginning,
        random: Callable[[], None],
        way: str = "",
        loader: Any = None,
        batches: Sequence[Any] = (),
        targets: Sequence[torch.Tensor] = (),
        total_steps: int | None = None,
        guard: WriteGuard | None = None,
    ) -> None:
        self.models = list(models)
        self.optimizers = list(optimizers)
        self.step = step
        self.roots = list(roots)
        self.names = names
        self.beginning = beginning
        self.random = random
        self.way = way
        self.loader = loader
        self.batches = list(batches)
        self.targets = list(targets)
        """Targets of the losses of the first steps, in order."""
        self.total_steps = total_steps
        self._guard = guard

    def name(self, parameter: torch.Tensor) -> str:
        """Return what a parameter is called."""
        return self.names.get(id(parameter), "a parameter without a module")

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trainable parameters of all models, each once."""
        found = {id(p): p for model in self.models for p in model.parameters() if p.requires_grad}
        return list(found.values())

    @property
    def optimized(self) -> set[int]:
        """Identities of the parameters that some optimizer holds."""
        return {id(p) for each in self.optimizers for group in each.param_groups for p in group["params"]}

    def rewind(self) -> None:
        """Go back to the beginning: weights, buffers, optimizers, modes, no gradients."""
        self.beginning.restore()
        for parameter in self.parameters:
            parameter.grad = None

    def run(self, *, keep_random: bool = False) -> Seen:
        """Execute one step on the same batch with the same random numbers and return what it showed."""
        for parameter in self.parameters:
            parameter.grad = None
        self.beginning.restart_scalers()
        if not keep_random:
            self.random()
        watch = _StepWatch(self.parameters)
        watch.install()
        if self._guard is not None:
            self._guard.mode = "stop"
        try:
            self.step()
        except Blocked as stop:
            watch.blocked = str(stop)
        finally:
            watch.remove()
            if self._guard is not None:
                self._guard.mode = "ignore"
        return Seen(watch.losses, watch.calls, watch.steps, watch.gradients, watch.blocked)


class Beginning:
    """The state before the first step: kept as copies, put back as often as wanted."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = {}
        self._modes: dict[int, tuple[torch.nn.Module, bool]] = {}
        self._scalers: list[torch.amp.GradScaler] = []

    def keep(self, tensors: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Copy what was not copied before."""
        for tensor in tensors:
            if id(tensor) not in self._tensors and tensor.layout == torch.strided:
                self._tensors[id(tensor)] = (tensor, tensor.detach().clone())
        if optimizer is not None and id(optimizer) not in self._optimizers:
            groups = [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            self._optimizers[id(optimizer)] = (optimizer, groups)

    def keep_modes(self, models: Sequence[torch.nn.Module]) -> None:
        """Remember which modules were in training mode."""
        for model in models:
            for module in model.modules():
                self._modes.setdefault(id(module), (module, module.training))

    def keep_scalers(self) -> None:
        """Find the GradScalers of the process."""
        # The class, not isinstance: objects that pretend to be something else must not be woken up.
        self._scalers = [each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler)]

    def restart_scalers(self) -> None:
        """Let scalers forget that they have stepped: the training was stopped before it told them to go on."""
        for scaler in self._scalers:
            scaler._per_optimizer_states.clear()

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, copy in self._tensors.values():
                tensor.copy_(copy)
        for optimizer, groups in self._optimizers.values():
            optimizer.state.clear()
            for group, kept in zip(optimizer.param_groups, groups, strict=False):
                group.update(kept)
        for module, is_training in self._modes.values():
            module.training = is_training


class _StepWatch:
    """Sees losses, gradients and optimizer steps of one rehearsed step."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._patches = Patches()
        self._losses = LossWatch()
        self.losses: list[float] = []
        self.gradients: dict[int, float | None] = {}
        self.steps = 0
        self.blocked = ""

    @property
    def calls(self) -> list[LossCall]:
        return self._losses.calls

    def install(self) -> None:
        self._patches.replace(torch.autograd, "backward", self._make_backward)
        self._patches.on_undo(register_optimizer_step_pre_hook(self._before_step).remove)
        self._patches.on_undo(register_optimizer_step_post_hook(self._after_step).remove)
        self._losses.install()

    def remove(self) -> None:
        self._losses.remove()
        self._patches.undo()

    def _make_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            for _, loss in walk(tensors):
                if loss.numel() == 1:
                    self.losses.append(float(loss.detach()))
            result = original(tensors, *args, **kwargs)
            self._look()
            return result

        return backward

    def _before_step(self, *_: Any) -> None:
        self._look()

    def _after_step(self, *_: Any) -> None:
        self.steps += 1

    def _look(self) -> None:
        """Note gradients as they are after each backward: a loop may clear them before or after the step."""
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                self.gradients.setdefault(id(parameter), None)
                continue
            dense = gradient.coalesce().values() if gradient.is_sparse else gradient
            size = float(dense.detach().abs().max()) if dense.numel() else 0.0
            before = self.gradients.get(id(parameter))
            self.gradients[id(parameter)] = size if before is None else max(size, before)


# ------------------------------------------------------------------------ files


class WriteGuard:
    """Sees every file that is opened for writing. ``mode``: ``note`` it, ``stop`` it, or ``ignore`` it.

    Python cannot take an audit hook away again, so there is one for the process; it does nothing while no guard is on.
    """

    _active: WriteGuard | None = None
    _is_hooked = False

    def __init__(self) -> None:
        self.written: dict[str, None] = {}
        self.mode = "note"
        self.allowed: tuple[str, ...] = ("/dev/", "/proc/")
        self._patches = Patches()

    def install(self) -> None:
        """Begin to watch."""
        WriteGuard._active = self
        if not WriteGuard._is_hooked:
            WriteGuard._is_hooked = True
            sys.addaudithook(_see_event)
        self._patches.replace(torch, "save", self._make_save)

    def remove(self) -> None:
        """Stop watching."""
        self._patches.undo()
        WriteGuard._active = None

    def see(self, path: str) -> None:
        """Take note of a file that is about to be written, or stop it."""
        if (
            self.mode == "ignore"
            or path.startswith(self.allowed)
            or path.endswith(".pyc")
            or "/__pycache__/" in path
        ):
            return
        if self.mode == "stop":
            raise Blocked(f"it was about to write {path}")
        self.written[path] = None

    def _make_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # torch opens the file in C++, where no audit event tells of it.
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(f, "write"):
                self.see(str(f))
            return original(obj, f, *args, **kwargs)

        return save


def _see_event(event: str, args: tuple[Any, ...]) -> None:
    guard = WriteGuard._active
    if guard is None:
        return
    if event == "open":
        path, mode, flags = args
        writes = any(sign in mode for sign in _WRITES) if isinstance(mode, str) else bool(flags & 0x3)
        if writes and isinstance(path, (str, bytes)):
            guard.see(path.decode(errors="replace") if isinstance(path, bytes) else path)
    elif event == "os.mkdir":
        guard.see(str(args[0]))
