"""A run of another framework while it grows: what an adapter captured, put into the record step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from clew.api.arrays import ArrayRun, record
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    Rows = Mapping[tuple[str, str], NDArray[Any]]


class Capture(Protocol):
    """What an adapter offers: it sees a model's modules from ``start`` to ``stop`` and reads its parameters."""

    types: dict[str, str]
    """The class of each module, by site."""

    def start(self) -> None:
        """Begin to see the calls of modules."""

    def stop(self) -> None:
        """Leave the framework as it was found."""

    def take(self) -> dict[tuple[str, str], NDArray[Any]]:
        """Return what was seen since the last call, by site and kind, in order of execution."""
        ...

    def parameters(self, model: Any) -> dict[str, NDArray[Any]]:
        """Return the parameters of a model by site."""
        ...

    def gradients(self, gradients: Any) -> dict[str, NDArray[Any]]:
        """Return gradients, in the form that the framework gives them, by site."""
        ...


class Recording:
    """Steps of a model in another framework; ``path`` is the run's folder."""

    def __init__(self, capture: Capture, *, name: str, out: str | None) -> None:
        self._capture = capture
        self._name, self._out = name, out
        self._run: ArrayRun | None = None
        self._before: dict[str, NDArray[Any]] = {}

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self._opened().path

    def _opened(self) -> ArrayRun:
        if self._run is None:
            raise UsageError(
                "nothing is recorded yet", where="clew.adapters", next_step="use it in a with statement"
            )
        return self._run

    def __enter__(self) -> Recording:
        self._run = record(self._name, out=self._out)
        self._capture.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._capture.stop()
        self._opened().close()

    def begin(self, model: Any) -> None:
        """Begin a step whose end comes after the update: the parameters are recorded as they are now."""
        self._before = self._capture.parameters(model)

    def step(
        self,
        model: Any,
        *,
        loss: Any = None,
        grads: Any = None,
        scalars: Mapping[str, float] | None = None,
    ) -> None:
        """End a step: what was seen since the last one, the parameters as they are, and the gradients if given.

        Call it before the optimizer changes the parameters, or ``begin`` before it does.
        """
        rows: dict[Any, Any] = dict(self._capture.take())
        parameters = self._before or self._capture.parameters(model)
        self._before = {}
        rows |= {(name, "param"): value for name, value in parameters.items()}
        if grads is not None:
            rows |= {(name, "grad"): value for name, value in self._capture.gradients(grads).items()}
        numbers = dict(scalars or {})
        seen = rows.pop(("loss", "loss"), None)
        loss = seen if loss is None else loss
        if loss is not None:
            numbers["loss"] = float(np.asarray(loss))
        self._opened().put(rows, scalars=numbers, types=self._capture.types)
