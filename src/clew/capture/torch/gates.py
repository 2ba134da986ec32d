"""Gates where torch calls clew: in a quiet step they let its calls through without a Python frame of ours.

Each stands in front of a wrapper in Python, the general way, and hands over to that whatever is not quiet. Without the
kernel the wrapper stands there itself. The compiler of torch sees through wrappers and not through gates: as soon as
somebody compiles, ``Patches.uncover`` leaves the wrappers alone in their places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.clock import BACKWARD, DATA, FORWARD, OPTIMIZER
from clew.capture.torch.unheard import has_dispatch_mode
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.recorder import Recorder
    from clew.stats._kernel import Leaf

    Function = Callable[..., Any]

_FLAGS: Final = vars(torch.compiler)
_HAS_FLAG: Final = isinstance(_FLAGS.get("_is_compiling_flag"), bool)
"""Whether this version of torch says there that it compiles."""


class Gates:
    """Makes the gates of one recording; each method returns what stands in the place of ``original``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        is_fit = KERNEL is not None and recorder.tray is not None and _HAS_FLAG
        self._kernel: Any = KERNEL if is_fit else None

    def call(
        self,
        original: Function,
        general: Function,
        *,
        fail: Function,
        leaf: Leaf | None,
        entries: dict[int, Any],
        finish: Function,
    ) -> Any:
        """Return the method that calls modules; a leaf sees the outputs of those in recorded steps."""
        if self._kernel is None or not _is_bindable(original):
            return general
        return self._kernel.CallGate(
            original=original,
            general=general,
            beat=self._recorder,
            flags=_FLAGS,
            ask=torch._C._get_tracing_state,
            fail=fail,
            leaf=leaf,
            entries=entries,
            finish=finish,
            phase=FORWARD,
        )

    def differentiate(
        self,
        original: Function,
        general: Function,
        *,
        entries: dict[int, Any],
        fail: Function,
        finish: Function,
    ) -> Any:
        """Return the function of backward passes."""
        if self._kernel is None:
            return general
        return self._kernel.PassGate(
            original=original,
            general=general,
            beat=self._recorder,
            course=self._recorder.flight,
            entries=entries,
            flags=_FLAGS,
            fail=fail,
            finish=finish,
            phase=BACKWARD,
        )

    def step(
        self,
        before: Function,
        after: Function,
        *,
        entries: dict[int, Any],
        keys: tuple[str, ...],
        fail: Function,
        measure: Function,
        finish: Function,
    ) -> tuple[Function, Function]:
        """Return the hooks before and after the steps of optimizers."""
        if self._kernel is None:
            return before, after
        gate = self._kernel.StepGate(
            original=before,
            general=after,
            beat=self._recorder,
            course=self._recorder.flight,
            entries=entries,
            ask=has_dispatch_mode,
            fail=fail,
            finish=finish,
            measure=measure,
            lists=keys,
            phase=OPTIMIZER,
        )
        return gate.before, gate.after

    def fetch(
        self,
        original: Function,
        general: Function,
        *,
        optimizers: dict[int, Any],
        origins: tuple[Any, type, dict[int, Any]],
        fail: Function,
        finish: Function,
    ) -> Any:
        """Return the method that gives a loader's next batch; ``origins``: where these go, their type, the sources."""
        if self._kernel is None:
            return general
        return self._kernel.FetchGate(
            original=original,
            general=general,
            beat=self._recorder,
            course=self._recorder.flight,
            entries=optimizers,
            ask=has_dispatch_mode,
            fail=fail,
            finish=finish,
            lists=origins,
            phase=DATA,
        )

    def fetch_index(self, original: Function, general: Function, *, sources: dict[int, Any]) -> Any:
        """Return the method that gives the indices which a loader's next batch is made of."""
        if self._kernel is None:
            return general
        return self._kernel.IndexGate(
            original=original, general=general, beat=self._recorder, entries=sources
        )

    def listen(self, original: Function, general: Function, *listeners: list[Any]) -> Any:
        """Return a method of torch that somebody may listen to."""
        if self._kernel is None or not _is_bindable(original):
            return general
        return self._kernel.IdleGate(original=original, general=general, lists=listeners)

    def look(self, original: Function, general: Function, *, looks: list[Any]) -> Any:
        """Return a function of torch that is looked at while there are looks."""
        if self._kernel is None:
            return general
        return self._kernel.LookGate(original=original, general=general, lists=(looks,))

    def evaluate(self, original: Function, general: Function) -> Any:
        """Return a function of torch that is looked at while there are no gradients."""
        if self._kernel is None:
            return general
        return self._kernel.LossGate(original=original, general=general, beat=self._recorder)


def _is_bindable(function: Any) -> bool:
    """Return whether looking a function up on an object gives a method: that of another gate, too."""
    return hasattr(type(function), "__get__")
