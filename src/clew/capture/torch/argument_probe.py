"""Modules whose plain attributes change while they are watched: a dropout that is switched on, another eps."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder

_PLAIN: Final = (bool, int, float, str)


class ArgumentProbe:
    """Looks at the ends of steps, of later ones seldom: reading what did not change is cheap, not free."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._count = -1
        self._watched: list[tuple[weakref.ref[torch.nn.Module], list[tuple[str, Any]]]] = []

    def install(self, patches: Patches) -> None:
        """Begin to look."""
        patches.listen(self._recorder.on_seldom, self._look)

    def _look(self) -> None:
        if len(self._recorder.registry.modules) != self._count:
            self._collect()
        for reference, values in self._watched:
            module = reference()
            if module is None:
                continue
            own = module.__dict__
            for name, value in values:
                now = own.get(name)
                # What has become a tensor or another object has changed, and may not answer to a comparison.
                if now is not value and (type(now) not in _PLAIN or now != value):
                    self._collect()
                    return

    def _collect(self) -> None:
        registry = self._recorder.registry
        # The end of a step shows when the next one begins: a change may have come before the first look.
        registry.describe_again()
        self._count = len(registry.modules)
        self._watched = []
        for module in registry.living_modules():
            values = [
                (name, value)
                for name, value in module.__dict__.items()
                if type(value) in _PLAIN and name != "training" and not name.startswith("_")
            ]
            if values:
                self._watched.append((weakref.ref(module), values))
