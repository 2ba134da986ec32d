"""Tells of the moment in which the first step is under way: models are made, seeds are set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder


class FirstStep:
    """Calls an action before the first backward pass, and is gone."""

    def __init__(self, recorder: Recorder, action: Callable[[], object]) -> None:
        self._recorder = recorder
        self._action: Callable[[], object] | None = action

    def install(self, patches: Patches) -> None:
        """Begin to wait, unless it is over."""
        if self._action is not None:
            patches.listen(self._recorder.on_pass, self._see)
            patches.listen(self._recorder.on_grad, self._see)

    def _see(self, *_: Any) -> None:
        for listeners in (self._recorder.on_pass, self._recorder.on_grad):
            if self._see in listeners:
                listeners.remove(self._see)
        action, self._action = self._action, None
        if action is not None:
            action()
