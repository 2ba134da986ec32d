"""Notes checkpoints that do not load, and saved weights that are not those of the model at that moment."""

from __future__ import annotations

import functools
import io
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.glance import glance
from clew.capture.torch.leaves import local_part
from clew.capture.torch.probe_events import find_line
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

    Glance = tuple[float, ...]

_GLANCE: Final = 8
_MOST_STATES: Final = 4096
_EVERY_STEP: Final = 100
"""Up to this step the weights of every step are remembered, later those of probed steps and of every state dict."""

_MOST_NAMES: Final = 4
_MOST_NOTES: Final = 4
_FEWEST_STEPS_BEHIND: Final = 2
_FEWEST_EARLY: Final = 2


class _Model:
    """A model whose weights are followed: what two of its weights were after which step."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.ref = weakref.ref(module)
        self.names: list[str] = []
        self.owners: list[tuple[weakref.ref[torch.nn.Module], str]] = []
        """The modules that hold these weights, and their names there."""
        self.states: dict[Glance, int] = {}

    def find_owners(self) -> None:
        """Look up who holds the weights; asking the model by their whole names takes too long for every step."""
        module = self.ref()
        if module is not None:
            pairs = [name.rpartition(".") for name in self.names]
            owners = [(dict(module.named_modules()).get(path), last) for path, _, last in pairs]
            self.owners = [(weakref.ref(owner), last) for owner, last in owners if owner is not None]


class _Kept:
    """The first tensor of a state dict that the program holds on to, itself or in another dict: when it was made."""

    def __init__(self, tensor: torch.Tensor, step: int) -> None:
        self.ref = weakref.ref(tensor)
        self.step = step


class CheckpointProbe:
    """Compares what is saved with what the model holds, and what is loaded with what the model asks for."""

    def __init__(self, recorder: Recorder, events: LoopEvents) -> None:
        self.recorder = recorder
        self.events = events
        self._models: list[_Model] = []
        self._sizes = (-1, -1)
        self._kept: dict[int, _Kept] = {}
        self._evaluated: set[int] = set()
        self._depth = 0
        self._is_shared = False
        self._reads = 0
        self._early_at: set[int] = set()
        """Steps in which a checkpoint was saved between backward and step."""
        self._notes = 0

    def install(self, patches: Patches) -> None:
        """Begin to see checkpoints."""
        patches.replace(torch, "save", self._make_save)
        patches.replace(torch, "load", self._make_load)
        patches.replace(torch.nn.Module, "load_state_dict", self._make_load_state)
        patches.replace(torch.nn.Module, "state_dict", self._make_state)
        patches.listen(self.recorder.on_root, self._see_root)
        patches.listen(self.events.on_stepping, self._see_stepping)
        patches.listen(self.events.on_stepped, self._see_stepped)
        self.recorder.note("probe", {"probe": "checkpoint"})

    # ---------------------------------------------------------------- what the weights were

    def _see_root(self, _module: torch.nn.Module, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self._evaluated.add(self.recorder.step)
        registry = self.recorder.registry
        if (len(registry.trees), len(registry.tensors)) != self._sizes:
            self._expect_models()

    def _expect_models(self) -> None:
        """Look at the weights before the next step: there are new models, or new weights in one."""
        if self._see_stepping not in self.events.on_stepping:
            self.events.on_stepping.append(self._see_stepping)

    def _see_stepping(self, _optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        self._find_models()
        for model in self._models:
            if not model.states:
                self._keep(model, self.recorder.step - 1)
        self.events.on_stepping.remove(self._see_stepping)

    def _see_stepped(self, _optimizer: torch.optim.Optimizer, _has_closure: bool) -> None:
        recorder = self.recorder
        if recorder.step < _EVERY_STEP or recorder.probing:
            registry = recorder.registry
            if (len(registry.trees), len(registry.tensors)) != self._sizes:
                self._expect_models()
            self._keep_all(recorder.step)

    def _keep_all(self, step: int) -> None:
        for model in self._models:
            if len(model.states) < _MOST_STATES:
                self._keep(model, step)

    def _find_models(self) -> None:
        trees = self.recorder.registry.trees
        sizes = (len(trees), len(self.recorder.registry.tensors))
        if sizes == self._sizes:
            return
        self._sizes = sizes
        known = {id(module) for model in self._models if (module := model.ref()) is not None}
        self._models = [model for model in self._models if model.ref() is not None]
        for tree in trees:
            module = tree.ref()
            if module is None or id(module) in known:
                continue
            model = _Model(module)
            names = [name for name, p in module.named_parameters() if p.requires_grad and p.numel()]
            model.names = [names[0], names[-1]] if names else []
            if names:
                self._models.append(model)
        for model in self._models:
            model.find_owners()

    def _keep(self, model: _Model, step: int) -> None:
        values: Glance = ()
        for ref, name in model.owners:
            owner = ref()
            if owner is not None:
                table = owner._parameters
                # Not get(): the table of a scripted module is no dict.
                values += _look_at(table[name] if name in table else None)  # noqa: SIM401
        if model.ref() is not None:
            model.states[values] = step

    # ---------------------------------------------------------------- saving

    def _make_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        told = [self._see_save]

        @functools.wraps(original)
        def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
            to = args[0] if args else kwargs.get("f")
            self.events.tell(told, obj, not isinstance(to, io.BytesIO))
            return original(obj, *args, **kwargs)

        return save

    def _see_save(self, thing: Any, is_file: bool) -> None:
        if self._notes >= _MOST_NOTES:
            return
        for state in _find_states(thing):
            self._compare(state, is_file=is_file)

    def _compare(self, state: Mapping[str, Any], *, is_file: bool) -> None:
        kept = self._find_kept(state)
        for model in self._models:
            module = model.ref()
            saved = [_strip(state, name) for name in model.names]
            if module is None or any(each is None for each in saved):
                continue
            living = [_find_parameter(module, name) for name in model.names]
            if any(a is None or b is None or a.shape != b.shape for a, b in zip(saved, living, strict=True)):
                continue
            told, now = _glance_at(saved), _glance_at(living)
            step = model.states.get(told)
            if told != now and step is not None and not self._is_somebody(told, besides=model):
                self._tell_old(step)
            elif told == now and kept is not None and _is_shared(saved, living):
                self._tell_followed(kept.step)
            # What is written into memory is a copy of this moment rather than a checkpoint.
            if is_file and told == now and step == self.recorder.step - 1 and self._is_step_ahead():
                self._tell_early()
            return

    def _find_kept(self, state: Mapping[str, Any]) -> _Kept | None:
        first = _find_first(state)
        kept = self._kept.get(id(first))
        return kept if kept is not None and kept.ref() is first else None

    def _is_somebody(self, told: Glance, *, besides: _Model) -> bool:
        """Return whether the weights are those of another model that is there: an average, a best one kept apart."""
        others = [model for model in self._models if model is not besides and model.names == besides.names]
        living = [(model.ref(), model.names) for model in others]
        return any(
            module is not None and _glance_at([_find_parameter(module, name) for name in names]) == told
            for module, names in living
        )

    def _tell_old(self, step: int) -> None:
        # A copy from a moment of evaluation or of the lowest loss is the best one so far, kept on purpose.
        if step >= 0 and (
            {step, step + 1} & self._evaluated or self.recorder.lowest_loss[1] in (step, step + 1)
        ):
            return
        behind = self.recorder.step - 1 - step
        self._note("stale-checkpoint", {"problem": "an earlier state", "behind": behind, "from": step})

    def _tell_followed(self, step: int) -> None:
        """A state dict that was kept has changed with the model: it shares its memory."""
        behind = self.recorder.step - step
        if step > 0 and behind >= _FEWEST_STEPS_BEHIND:
            self._note("stale-checkpoint", {"problem": "not a copy", "behind": behind, "from": step})

    def _is_step_ahead(self) -> bool:
        """Return whether the gradients of this step wait for their optimizer, and nobody has asked for the old weights.

        What was evaluated before the step is right to be saved before it; loops that gather gradients save anywhere.
        """
        recorder = self.recorder
        is_waiting = recorder.backward_at == recorder.serial and not recorder.closing
        return is_waiting and recorder.flight.usual_passes <= 1 and recorder.step not in self._evaluated

    def _tell_early(self) -> None:
        self._early_at.add(self.recorder.step)
        if len(self._early_at) == _FEWEST_EARLY:
            self._note(
                "stale-checkpoint",
                {"problem": "before its step", "behind": 1, "from": self.recorder.step - 1},
            )

    def _note(self, kind: str, data: dict[str, Any]) -> None:
        self._notes += 1
        self.recorder.note(kind, {**data, "source": find_line()})

    # ---------------------------------------------------------------- loading

    def _make_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            self._reads += 1
            return original(*args, **kwargs)

        return load

    def _make_state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        told = [self._see_state]

        @functools.wraps(original)
        def state_dict(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            self._depth += 1
            try:
                state = original(module, *args, **kwargs)
            finally:
                self._depth -= 1
            self.events.tell(told, state)
            return state

        return state_dict

    def _see_state(self, state: Any) -> None:
        if self.recorder.step >= _EVERY_STEP:
            # Between steps the last one may not have ended yet: then the weights are already those after it.
            self._keep_all(self.recorder.step - (not self.recorder.closing))
        if len(self._kept) > 64:
            self._kept = {key: kept for key, kept in self._kept.items() if kept.ref() is not None}
        first = _find_first(state) if isinstance(state, Mapping) else None
        if first is not None and len(self._kept) <= 256:
            self._kept[id(first)] = _Kept(first, self.recorder.step)

    def _make_load_state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        before, after = [self._see_loading], [self._see_load]

        @functools.wraps(original)
        def load_state_dict(module: torch.nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(state_dict, Mapping):
                return original(module, state_dict, *args, **kwargs)
            self.events.tell(before, module, state_dict)
            result = original(module, state_dict, *args, **kwargs)
            self.events.tell(after, module, state_dict, result)
            return result

        return load_state_dict

    def _see_loading(self, module: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Keep whether a model is given its own tensors, so that nothing can change."""
        pairs = [(p, state.get(name)) for name, p in module.named_parameters()]
        same = [isinstance(given, torch.Tensor) and _address(p) == _address(given) for p, given in pairs]
        self._is_shared = bool(pairs) and sum(same) >= 0.9 * len(pairs)

    def _see_load(self, module: torch.nn.Module, state: Mapping[str, Any], result: Any) -> None:
        if self._notes >= _MOST_NOTES:
            return
        own = [name for name, _ in module.named_parameters()]
        missing = set(getattr(result, "missing_keys", ())) & set(own)
        unexpected = list(getattr(result, "unexpected_keys", ()))
        kept = self._find_kept(state)
        if own and len(missing) >= 0.9 * len(own) and len(unexpected) >= 0.9 * len(state):
            told = {"missing": len(missing), "of": len(own), "unexpected": unexpected[:_MOST_NAMES]}
            self._note("not-loaded", {**told, "expected": own[:_MOST_NAMES]})
        elif self._is_shared and self._reads and not self._models:
            told = {"missing": len(own), "of": len(own), "unexpected": []}
            self._note("not-loaded", {**told, "expected": own[:_MOST_NAMES]})
        elif self._is_shared and kept is not None:
            self._tell_followed(kept.step)
        elif self._is_shared and self.recorder.step >= _FEWEST_STEPS_BEHIND and self._models:
            self._note("stale-checkpoint", {"problem": "its own tensors", "behind": None, "from": None})


def _find_states(thing: Any, depth: int = 0) -> list[Mapping[str, Any]]:
    """Return the mappings from names to tensors in what is saved."""
    if not isinstance(thing, Mapping):
        return [dict(thing.named_parameters())] if isinstance(thing, torch.nn.Module) else []
    if any(isinstance(value, torch.Tensor) for value in thing.values()):
        return [thing]
    if depth >= 2:
        return []
    return [state for value in thing.values() for state in _find_states(value, depth + 1)]


def _find_first(state: Mapping[str, Any]) -> torch.Tensor | None:
    return next((value for value in state.values() if isinstance(value, torch.Tensor)), None)


def _strip(state: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """Return the tensor of a name, with or without the prefixes of wrappers."""
    for prefix in ("", "module.", "_orig_mod."):
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor):
            return value
    return None


def _find_parameter(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)  # replaced since, perhaps
    return value if isinstance(value, torch.Tensor) else None


def _glance_at(tensors: list[torch.Tensor | None]) -> Glance:
    return tuple(value for tensor in tensors for value in _look_at(tensor))


def _look_at(tensor: torch.Tensor | None) -> Glance:
    if tensor is None:
        return ()
    numbers: Glance | None = KERNEL.glance(tensor, _GLANCE) if KERNEL is not None else None
    if numbers is not None:
        return numbers
    return glance(tensor, _GLANCE) if tensor.layout == torch.strided else ()


def _is_shared(first: list[torch.Tensor | None], second: list[torch.Tensor | None]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(a is not None and b is not None and _address(a) == _address(b) for a, b in pairs)


def _address(tensor: torch.Tensor) -> int:
    held = local_part(tensor)
    return held.data_ptr() if held.layout == torch.strided else id(tensor)
