"""Putting a script into the state that a snapshot holds, and giving it the recorded batches from there on.

The script runs by itself until its first step has ended. That is the same place in the program as the end of any other
step, so there the weights, optimizers, schedulers and random generators are exchanged for the recorded ones.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import load_file
from torch.utils.data import dataloader

from clew.capture.torch import snapshot_state as states
from clew.capture.torch.companions import Companions
from clew.capture.torch.leaves import walk
from clew.capture.torch.randomness import RandomBytes
from clew.replay.lens import replace_tensors
from clew.replay.variables import restore_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.session import TorchSession
    from clew.store.snapshots import StoredBatches, StoredSnapshot

_AHEAD: Final = 2
_GENERATORS: Final = ("torch", "python", "numpy")


class Unfit(Exception):
    """Something recorded that cannot be put in place; the text says what."""


class Jump:
    """One snapshot and the batches after it. ``install`` before the session starts, ``restore`` after a first step."""

    def __init__(self, snapshot: StoredSnapshot, batches: list[StoredBatches], *, last: int) -> None:
        self.step = snapshot.step
        self.state = snapshot.read_state()
        self.is_done = False
        self.has_old_gradients = False
        """Whether the first backward after it added to gradients from before: nobody has cleared them."""
        self.notes: list[str] = []
        """What could not be restored, and what was not recorded."""
        self._folder = snapshot.path
        self._given: deque[tuple[dict[str, Any], dict[str, torch.Tensor]]] = deque()
        self.calls: list[tuple[str, Any]] = []
        """Root calls of the last step, with their recorded arguments."""
        self._first_calls: list[tuple[str, Any]] = []
        self._load_given(batches, last)
        self._exchanged: dict[int, torch.Tensor] = {}
        self._seen: deque[Any] = deque(maxlen=_AHEAD)
        self._companions = Companions()

    def _load_given(self, batches: list[StoredBatches], last: int) -> None:
        for file in batches:
            if file.last < self.step or file.first > last + 1:
                continue
            tensors = load_file(file.path)
            for step in file.read_steps():
                # One step more than wanted: a framework may fetch a batch ahead.
                if self.step <= step["step"] <= last + 1:
                    self._take_step(step, tensors, is_last=step["step"] == last)

    def _take_step(self, step: dict[str, Any], tensors: dict[str, torch.Tensor], *, is_last: bool) -> None:
        if not step.get("whole", True):
            self.notes.append(f"step {step['step']} took more batches than are kept")
        for given in step["given"]:
            if given["kind"] != "call":
                self._given.append((given, tensors))
            elif "value" in given and (is_last or step["step"] == self.step):
                call = given["site"], unpack_or_none(given["value"], tensors)
                self.calls += [call] if is_last else []
                self._first_calls += [call] if step["step"] == self.step else []

    # ---------------------------------------------------------------- what the script is given

    def install(self, patches: Patches) -> None:
        """Stand between the loaders and the session, and learn of schedulers and scalers."""
        patches.replace(dataloader._BaseDataLoaderIter, "__next__", self._make_next)
        self._companions.install(patches)

    def _make_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:  # noqa: N807
            if not self.is_done or not self._given:
                batch = original(iterator)
                self._seen.append(batch)
                return batch
            given, tensors = self._given.popleft()
            if given["kind"] == "stop":
                self._restore_random(given, tensors)
                raise StopIteration
            if given.get("changed"):
                self.notes.append("a batch was changed in place by the training before it was kept")
            batch = self._unpack_batch(given, tensors) if "value" in given else None
            if batch is None:
                return original(iterator)
            self._restore_random(given, tensors)
            return batch

        return __next__

    def _unpack_batch(self, given: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
        reason: Unfit | None = None
        for template in reversed(self._seen or [None]):
            try:
                return unpack(given["value"], tensors, template)
            except Unfit as error:
                reason = error
        self.notes.append(f"a recorded batch cannot be made again: {reason}")
        return None

    def _restore_random(self, given: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        if "random" in given:
            unpack_random(given["random"], tensors).restore()

    def suspect(self) -> list[str]:
        """Return what a difference from the recording may come from, as sentences."""
        found = []
        if left_out := self.state.get("left_out"):
            found.append(f"too large to be kept in the snapshot: {', '.join(left_out)}")
        if self.has_old_gradients:
            found.append("gradients add up from step to step, and a snapshot holds none")
        return found

    # ---------------------------------------------------------------- the state

    def fits(self, session: TorchSession) -> bool:
        """Return whether the script is where it was when the snapshot was taken: the same optimizers have stepped."""
        used = session.optimizers.list_used()
        stepped = [index for index, (_, serial) in enumerate(used) if serial == session.recorder.serial]
        # A state from the middle of a step was taken before its optimizer had stepped.
        return len(used) == len(self.state["optimizers"]) and stepped == (self.state["stepped"] or stepped)

    def restore(self, session: TorchSession) -> None:
        """Put everything into the state from before the snapshot's step."""
        self.is_done = True
        # First: a variable may be the very dictionary of an optimizer's group.
        self._exchanged = restore_names(self.state.get("names", []), self._load("names"))
        self._restore_weights(session)
        self._restore_optimizers(session)
        for scheduler, numbers in self._pairs(
            "scheduler", self._companions.schedulers, self.state.get("schedulers", [])
        ):
            vars(scheduler).update({key: unpack(value, {}) for key, value in numbers.items()})
        for scaler, state in self._pairs(
            "GradScaler", self._companions.scalers, self.state.get("scalers", [])
        ):
            if state:
                states.restore_scaler(scaler, state)
        self._restore_ahead()
        unpack_random(self.state["random"], self._load("random")).restore()

    def exchange(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a root call that was under way when the state was restored, as they were recorded.

        Those of the script's own are tensors of its variables, most of the time, which have been exchanged.
        """
        mine = [leaf for _, leaf in walk((args, kwargs)) if leaf.grad_fn is None]
        known = next((given for _, given in self._first_calls if given is not None), None)
        if known is not None and any(id(leaf) not in self._exchanged for leaf in mine):
            return known["args"], known["kwargs"]
        new = self._exchanged
        return replace_tensors((args, kwargs), lambda tensor: new.get(id(tensor), tensor))  # type: ignore[no-any-return]

    def _load(self, name: str) -> dict[str, torch.Tensor]:
        path = self._folder / f"{name}.safetensors"
        return load_file(path) if path.is_file() else {}

    def _restore_weights(self, session: TorchSession) -> None:
        registry, saved = session.recorder.registry, self._load("weights")
        with torch.no_grad():
            for name, tensor in states.name_tensors(registry):
                kept = saved.pop(name, None)
                if kept is None or kept.shape != tensor.shape:
                    self.notes.append(f"{name} is not in the snapshot")
                else:
                    tensor.copy_(kept)
        self.notes += [f"there is no {name} in the script after its first step" for name in list(saved)[:3]]
        known = self.state.get("modules", {})
        for tree in registry.living_trees():
            top = tree.ref()
            for module in top.modules() if top is not None else ():
                entry = registry.modules.get(id(module))
                if entry is not None:
                    vars(module).update(known.get(entry.name, {}))

    def _restore_optimizers(self, session: TorchSession) -> None:
        tensors = self._load("optimizer")
        used = [optimizer for optimizer, _ in session.optimizers.list_used()]
        for optimizer, saved in self._pairs("optimizer", used, self.state.get("optimizers", [])):
            self._restore_groups(session, optimizer, saved)
            for group, numbers in zip(optimizer.param_groups, saved["groups"], strict=False):
                group.update({key: unpack(value, tensors, group.get(key)) for key, value in numbers.items()})
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for position, parameter in enumerate(parameters):
                old = optimizer.state.get(parameter)
                if str(position) in saved["state"]:
                    optimizer.state[parameter] = unpack(saved["state"][str(position)], tensors, old)
                elif old is not None:
                    del optimizer.state[parameter]

    def _restore_groups(self, session: TorchSession, optimizer: Any, saved: dict[str, Any]) -> None:
        """Have as many groups as there were: the script may add some later than after its first step."""
        groups, held = optimizer.param_groups, saved.get("held", [])
        del groups[len(saved["groups"]) :]
        named = dict(states.name_tensors(session.recorder.registry))
        for names in held[len(groups) :]:
            known = [named[name] for name in names if name in named]
            groups.append({**dict.fromkeys(groups[0]), "params": known})
            if len(known) < len(names):
                self.notes.append("the script has no tensor yet for a group that its optimizer had")

    def _pairs(self, what: str, living: list[Any], saved: list[Any]) -> list[tuple[Any, Any]]:
        if len(living) != len(saved):
            self.notes.append(
                f"the recording had {len(saved)} of {what}, the script has {len(living)} by now"
            )
        return list(zip(living, saved, strict=False))

    def _restore_ahead(self) -> None:
        """Exchange the data of batches that a framework has fetched ahead; their tensors stay the same objects."""
        tensors = self._load("ahead")
        saved = [unpack_or_none(each, tensors) for each in self.state.get("ahead", ())]
        for batch, kept in zip(reversed(self._seen), reversed(saved), strict=False):
            recorded = dict(walk(kept))
            for path, leaf in walk(batch):
                if path in recorded:
                    leaf.data = recorded[path]


# ------------------------------------------------------------------------ plain data back into values


def unpack(data: Any, tensors: dict[str, torch.Tensor], template: Any = None) -> Any:
    """Return a recorded value; where plain data does not tell, what the script itself has there is taken."""
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        return _unpack_tensor(data, tensors)
    if "float" in data:
        return float(data["float"])
    if "list" in data or "tuple" in data:
        kind = list if "list" in data else tuple
        items = data["list"] if "list" in data else data["tuple"]
        return kind(unpack(part, tensors, _part(template, index)) for index, part in enumerate(items))
    if "dict" in data:
        return {key: unpack(part, tensors, _part(template, key)) for key, part in data["dict"]}
    if "like" in data:
        return _unpack_like(data, tensors, template)
    if template is None:
        raise Unfit("it holds something that is no plain value")
    return template


def unpack_or_none(data: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a recorded value, or None where it is not known without the script's own."""
    try:
        return unpack(data, tensors)
    except Unfit:
        return None


def unpack_random(data: dict[str, Any], tensors: dict[str, torch.Tensor]) -> RandomBytes:
    """Return recorded random states."""
    words = {key: bytes(tensors[data[key]].numpy().data) if key in data else b"" for key in _GENERATORS}
    return RandomBytes(words["torch"], words["python"], data.get("gauss"), words["numpy"])


def _unpack_tensor(data: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    tensor = tensors[data["tensor"]]
    stride = data.get("stride")
    if stride is not None:
        # A repeated dimension has one element in memory; the others keep their order there.
        once = tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)]
        laid = torch.empty_strided(once.shape, stride, dtype=tensor.dtype)
        tensor = laid.copy_(once).expand(tensor.shape)
    else:
        tensor = tensor.clone()
    return tensor.requires_grad_() if data.get("grad") else tensor


def _unpack_like(data: dict[str, Any], tensors: dict[str, torch.Tensor], template: Any) -> Any:
    kind = type(template)
    if f"{kind.__module__}.{kind.__qualname__}" != data["like"]:
        raise Unfit(f"it holds a {data['like']}, and the script has none there")
    parts = {key: unpack(part, tensors, _part(template, key)) for key, part in data["parts"]}
    if isinstance(template, tuple):
        return kind(*parts.values())
    made = copy.copy(template)
    for key, part in parts.items():
        if isinstance(template, Mapping):
            made[key] = part
        else:
            setattr(made, key, part)
    return made


def _part(template: Any, key: Any) -> Any:
    try:
        if isinstance(template, (Mapping, list, tuple)) and not isinstance(key, str):
            return template[key]
        return template[key] if isinstance(template, Mapping) else getattr(template, str(key), None)
    except (KeyError, IndexError, TypeError):
        return None
