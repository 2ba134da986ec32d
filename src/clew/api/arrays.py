"""Runs put together from arrays: what any framework computes, in the form of a recorded run."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.api.folder import choose_folder
from clew.capture import provenance
from clew.capture.settings import load_settings
from clew.compare.diff_sides import BY_HAND
from clew.errors import UsageError, suggest
from clew.model.record import Scalar, Site, StepRecord
from clew.model.schema import KIND_INDEX, KINDS, STAT_NAMES
from clew.stats import reference
from clew.store.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from numpy.typing import NDArray

_ROLES: Final = {
    "param": "parameter",
    "grad": "parameter",
    "update": "parameter",
    "state": "parameter",
    "buffer": "buffer",
    "batch": "batch",
    "loss": "loss",
}

_open: dict[Path, ArrayRun] = {}


class ArrayRun:
    """A run that grows by whole steps of arrays; ``path`` is its folder. Closed by ``with``, ``close`` or at exit."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        info = provenance.collect(folder.name, list(sys.argv), {BY_HAND: True})
        self._writer = Writer(folder.absolute(), info)
        self._sites: dict[str, Site] = {}
        self._step = -1
        self._is_closed = False
        # The writer calls a run that nobody closed dead; this one is complete after every step.
        atexit.register(self.close)

    def put(
        self,
        arrays: Mapping[Any, Any],
        *,
        step: int | None = None,
        kind: str = "output",
        scalars: Mapping[str, float] | None = None,
        types: Mapping[str, str] | None = None,
    ) -> None:
        """Write one step: arrays by site, in order of execution; a key ``(site, kind)`` has a kind of its own.

        ``step`` is the next one unless given. ``scalars``: ``{"loss": 0.3}``. ``types``: classes of modules.
        """
        if self._is_closed:
            raise UsageError("the run is closed", where=str(self.path), next_step="record into a new one")
        number = self._step + 1 if step is None else step
        if number <= self._step:
            raise UsageError(
                f"step {number} is written already",
                where=str(self.path),
                next_step="give all arrays of a step in one call, and steps in rising order",
            )
        rows = [(*_read_key(key, kind), _as_array(key, value)) for key, value in arrays.items()]
        self._add_sites(rows, types or {})
        self._writer.put(self._make_record(number, rows, scalars or {}))
        self._writer.flush()
        self._step = number

    def _add_sites(self, rows: list[tuple[str, str, NDArray[Any]]], types: Mapping[str, str]) -> None:
        for name, kind, array in rows:
            dtype = str(array.dtype)
            role = _ROLES.get(kind, "module")
            known = self._sites.get(name)
            number = known.id if known else len(self._sites)
            parent = self._sites.get(name.rpartition(".")[0])
            self._sites[name] = Site(
                number,
                name,
                known.role if known else role,
                type=types.get(name, "") if role == "module" else dtype,
                parent=parent.id if parent else -1,
                shape=tuple(array.shape),
                dtype=dtype,
                order=number,
            )
        self._writer.add_sites(self._sites.values())

    def _make_record(
        self, step: int, rows: list[tuple[str, str, NDArray[Any]]], scalars: Mapping[str, float]
    ) -> StepRecord:
        arrays = [array for _, _, array in rows]
        return StepRecord(
            step,
            np.array([self._sites[name].id for name, _, _ in rows], np.int32),
            np.array([KIND_INDEX[kind] for _, kind, _ in rows], np.int8),
            np.zeros(len(rows), np.int16),
            np.zeros(len(rows), np.int8),
            np.array([reference.summarise(each) for each in arrays]).reshape(len(rows), len(STAT_NAMES)),
            np.array([reference.fingerprint(each) for each in arrays], np.uint64),
            np.array([reference.histogram(each) for each in arrays], np.uint32) if rows else None,
            tuple(Scalar(name, float(value)) for name, value in scalars.items()),
        )

    def close(self) -> None:
        """End the run; nothing can be added any more."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        for key in [key for key, run in _open.items() if run is self]:
            del _open[key]
        self._writer.close("complete")

    def __enter__(self) -> ArrayRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def record(
    name: str,
    arrays: Mapping[Any, Any] | None = None,
    step: int | None = None,
    *,
    kind: str = "output",
    scalars: Mapping[str, float] | None = None,
    out: str | None = None,
) -> ArrayRun:
    """Write a step of arrays, by site, into the run of this name, and return the run.

    The first call makes the run, later ones add steps, until it is closed: by ``close``, by ``with``, or at the end of
    the program. Anything that numpy can read is an array: JAX, TensorFlow and torch tensors, lists of numbers.
    """
    settings = load_settings({"out": out, "name": name}, origin="clew.record")
    label = settings.name or name
    run = _open.get((Path(settings.out) / label).absolute())
    if run is None:
        folder = choose_folder(settings.out, label, label)
        run = ArrayRun(folder)
        # A taken name gets a number; this program's own run is found under the name it asked for.
        _open[(Path(settings.out) / label).absolute()] = run
    if arrays is not None:
        run.put(arrays, step=step, kind=kind, scalars=scalars)
    return run


def _read_key(key: Any, kind: str) -> tuple[str, str]:
    name, own = key if isinstance(key, tuple) and len(key) == 2 else (key, kind)
    if not isinstance(name, str) or not name:
        raise UsageError(
            f"{key!r} names no site", where="clew.record", next_step='write {"encoder.0": array}'
        )
    if own not in KINDS:
        raise UsageError(
            f"unknown kind '{own}'",
            where="clew.record",
            next_step=suggest(str(own), KINDS) or f"kinds: {', '.join(KINDS)}",
        )
    return name, str(own)


def _as_array(key: Any, value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype).startswith(("torch.bfloat16", "torch.float8")) else value
    array = np.asarray(value)
    if array.dtype.kind == "V":
        # bfloat16 and its kin come as types that numpy does not know; each of their numbers is a float32.
        array = array.astype(np.float32)
    if array.dtype.kind not in "biufc":
        raise UsageError(
            f"what is given for {key!r} is no array of numbers but {type(value).__name__}",
            where="clew.record",
            next_step="give arrays, or numbers",
        )
    return array
