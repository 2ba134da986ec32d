"""Parameters of known models that no optimizer holds: frozen ones, forgotten ones, those of a teacher.

They are measured beside the optimizer's own, and copied never. A frozen weight is read once, and again when it has been
written: of a large model with a small adapter a recorded step reads the adapter alone.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.assemble import OUTSIDE, SITE_SHIFT
from clew.capture.torch.recorder import KIND_GRAD, KIND_PARAM
from clew.capture.torch.shadow import list_versions_slowly
from clew.stats.readable import LAZY, undisturbed
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.registry import TensorEntry

_UNREAD: Final = -1
_GRADIENTS: Final = "gradients of outsiders"


class LastGradient:
    """The gradient of a parameter that somebody looked at last."""

    __slots__ = ("ref", "version")

    def __init__(self) -> None:
        self.ref: Callable[[], torch.Tensor | None] = lambda: None
        self.version = _UNREAD

    def take(self, gradient: torch.Tensor | None) -> bool:
        """Return whether this is another gradient than last time, or has been added to: not one that was left over."""
        if gradient is None:
            return False
        (version,) = list_versions_slowly([gradient])
        is_fresh = self.ref() is not gradient or self.version != version
        self.ref, self.version = weakref.ref(gradient), version
        return is_fresh


class Outsider:
    """One parameter, the place in a module where it stands, and what was last measured of it."""

    __slots__ = ("entry", "given", "key", "measured", "measured_at", "module", "version")

    def __init__(self, entry: TensorEntry, module: torch.nn.Module, key: str) -> None:
        self.entry = entry
        self.module = weakref.ref(module)
        self.key = key
        self.version = _UNREAD
        self.measured, self.given = LastGradient(), LastGradient()
        """The gradients that were last measured, and there at the end of a pass that was looked at."""
        self.measured_at = -1
        """The serial of the step in which its gradient was last measured."""

    def follow(self, before: Outsider) -> None:
        """Take over what is known of the parameter."""
        self.version, self.measured_at = before.version, before.measured_at
        self.measured, self.given = before.measured, before.given

    def stands(self, tensor: torch.Tensor | None) -> bool:
        """Return whether the module still has this very tensor there."""
        module = self.module()
        slots = None if module is None else module.__dict__.get("_parameters")
        if not isinstance(slots, dict):  # a script keeps its parameters elsewhere
            return module is not None and tensor is not None
        return slots.get(self.key) is tensor and tensor is not None


class Outsiders:
    """The list of them, kept until optimizers, their groups or the known parameters change."""

    def __init__(self, recorder: Recorder, held: Callable[[], list[torch.Tensor]]) -> None:
        self.recorder = recorder
        self.changes = 0
        """Grows with every change of what optimizers hold that is seen."""
        self.trainable: list[Outsider] = []
        """Those that wanted gradients when the list was made."""
        self.scaler: Callable[[], Any] = lambda: None
        """Returns the GradScaler in use; it takes its scale off the gradients of optimizers alone."""
        self._held = held
        self._held_keys: list[int] = []
        self._used: dict[int, Callable[[], torch.Tensor | None]] = {}
        """By parameter, the gradients that an optimizer which is gone has used."""
        self._at = (-1, -1)
        self._all: list[Outsider] = []
        self._values_at = -1

    def look_again(self) -> None:
        """Optimizers hold others than before: make the list anew when it is needed."""
        self.changes += 1
        self.recorder.alone_at = -1

    def let_go(self, parameters: list[torch.Tensor]) -> None:
        """Take parameters whose optimizer is gone: what it has used of them is not measured again."""
        self.look_again()
        with torch._C.DisableTorchFunction():
            graded = [(id(p), grad) for p in parameters if p.is_leaf and (grad := p.grad) is not None]
        self._used |= {key: weakref.ref(grad) for key, grad in graded}

    def list_living(self) -> list[torch.Tensor]:
        """Return the parameters, looked for again where something may have changed."""
        self.find()
        registry = self.recorder.registry
        if not self._all:
            return []
        found = [each.entry.ref() for each in self._all]
        stands = all(each.stands(tensor) for each, tensor in zip(self._all, found, strict=True))
        if not stands or self._list_held_keys() != self._held_keys:
            for tree in list(registry.living_trees()):
                registry.refresh(tree)
            self._find()
            found = [each.entry.ref() for each in self._all]
        return [tensor for tensor in found if tensor is not None]

    def list_trainable(self) -> list[tuple[Outsider, torch.Tensor]]:
        """Return those that want gradients; frozen ones, which may be very many, are not even looked at."""
        self.find()
        if not all(each.stands(each.entry.ref()) for each in self.trainable):
            self.list_living()
        return [(each, tensor) for each in self.trainable if (tensor := each.entry.ref()) is not None]

    def list_pairs(self) -> list[tuple[TensorEntry, torch.Tensor]]:
        """Return the same with their entries."""
        living = self.list_living()
        return [(each.entry, tensor) for each, tensor in zip(self._all, living, strict=True)]

    def find(self) -> None:
        """Make the list anew where optimizers or known parameters are others."""
        if self._at != (self.changes, self.recorder.registry.added):
            self._find()

    def _list_held_keys(self) -> list[int]:
        return [id(parameter) for parameter in self._held()]

    def _find(self) -> None:
        registry = self.recorder.registry
        self._at, self._held_keys = (self.changes, registry.added), self._list_held_keys()
        held, known = set(self._held_keys), {each.entry.site: each for each in self._all}
        found: dict[int, Outsider] = {}
        for tree in registry.living_trees():
            top = tree.ref()
            for module in top.modules() if top is not None else ():
                for key, parameter in module.named_parameters(recurse=False):
                    entry = registry.tensors.get(id(parameter))
                    if entry is None or entry.site in found or id(parameter) in held:
                        continue
                    found[entry.site] = each = Outsider(entry, module, key)
                    earlier = known.get(entry.site)
                    if earlier is not None and earlier.entry is entry:
                        each.follow(earlier)
                    elif (used := self._used.get(id(parameter))) is not None:
                        each.measured.take(used())
        self._used.clear()
        self._all = list(found.values())
        self.recorder.alone_at = -1 if self._all else registry.added
        self.trainable = [
            each for each in self._all if (t := each.entry.ref()) is not None and t.requires_grad
        ]

    # ---------------------------------------------------------------- measuring

    def measure(self, *, with_grads: bool) -> None:
        """Measure them at the first step of an optimizer in a recorded step; where there are none, nothing is done."""
        if not self._all and self.recorder.alone_at == self.recorder.registry.added:
            return
        serial, tensors = self.recorder.serial, self.list_living()
        if self._values_at != serial:
            self._measure_values(tensors)
        if not with_grads:
            return
        rows = self.recorder.latest.rows.get(_GRADIENTS)
        if rows is None:
            self._measure_grads(tensors, mark=OUTSIDE)
        else:  # taken for those of a loop without an optimizer, until this one stepped
            for row in rows:
                self.recorder.keys[row] |= OUTSIDE

    def measure_by_hand(self, *, is_alone: bool) -> None:
        """Measure them after a backward pass, for a loop that writes to its weights itself.

        ``is_alone``: no optimizer trains any of the models. What is written through ``.data`` has no new version, so
        that the weights are read in every recorded step.
        """
        tensors = self.list_living()
        if self._values_at != self.recorder.serial:
            self._measure_values(tensors, is_written=is_alone)
        self._measure_grads(tensors)

    def _measure_values(self, tensors: list[torch.Tensor], *, is_written: bool = False) -> None:
        recorder = self.recorder
        self._values_at = recorder.serial
        if not recorder.wants["param"]:
            return
        read = KERNEL.list_versions if KERNEL is not None else list_versions_slowly
        chosen = [
            (each, tensor, version)
            for each, tensor, version in zip(self._all, tensors, read(tensors), strict=True)
            if version != each.version or (is_written and tensor.requires_grad)
        ]
        # A lazy parameter keeps its version when it gets its values.
        chosen = [(each, tensor, v) for each, tensor, v in chosen if not isinstance(tensor, LAZY)]
        for each, _, version in chosen:
            each.version = version
        wanted = [(each.entry, tensor) for each, tensor, _ in chosen if each.entry.wanted]
        recorder.measure_many([tensor for _, tensor in wanted], [e.site for e, _ in wanted], KIND_PARAM)

    def _measure_grads(self, tensors: list[torch.Tensor], *, mark: int = 0) -> None:
        """Measure the gradients, to which a pass may have added; ``mark`` leaves them out of the norm of all."""
        recorder, serial = self.recorder, self.recorder.serial
        if not recorder.wants["grad"]:
            return
        first = recorder.latest.forget(_GRADIENTS, recorder.keys)
        chosen = []
        for each, tensor in zip(self._all, tensors, strict=True):
            if each.entry.wanted and tensor.requires_grad and tensor.is_leaf:
                gradient = tensor.grad
                is_fresh = each.measured.take(gradient) or each.measured_at == serial
                if gradient is not None and is_fresh:
                    each.measured_at = serial
                    chosen.append((each.entry.site << SITE_SHIFT | KIND_GRAD | mark, gradient))
        scale = self._find_scale() if mark else None
        if scale is None:
            recorder.measure_keyed([gradient for _, gradient in chosen], [key for key, _ in chosen])
        else:
            for key, gradient in chosen:  # one at a time, which takes little memory
                with undisturbed():
                    unscaled = gradient / scale.to(gradient.device)
                recorder.measure_keyed([unscaled], [key])
        recorder.latest.rows[_GRADIENTS] = range(first, len(recorder.keys))

    def _find_scale(self) -> torch.Tensor | None:
        scaler = self.scaler()
        scale = getattr(scaler, "_scale", None) if scaler is not None and scaler.is_enabled() else None
        return scale if isinstance(scale, torch.Tensor) else None
