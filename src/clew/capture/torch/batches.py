"""Sees the batches: how long the loop waited for them, what they hold, and which samples they were made of."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils.data import dataloader

from clew.capture.clock import CLEW, DATA
from clew.capture.torch.leaves import list_leaves, walk
from clew.capture.torch.recorder import KIND_BATCH
from clew.capture.torch.registry import MAX_CALLS
from clew.model.record import Batch
from clew.model.schema import KIND_INDEX
from clew.stats.readable import unheard

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.registry import ModuleEntry
    from clew.capture.torch.roots import Roots

_KNOWN_BATCHES: Final = 8
"""Loader batches kept for recognition: frameworks fetch a batch or two ahead."""

_MOST_INDICES: Final = 4096
_KIND: Final = KIND_INDEX["batch"]


class _Origin(NamedTuple):
    """Where a loader batch came from; tensors are known by their addresses, never held."""

    loader: str
    position: int
    indices: tuple[int, ...]
    addresses: frozenset[int]


class BatchLens:
    """Turns loader batches and root inputs into records."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.roots: Roots | None = None
        self._origins: deque[_Origin] = deque(maxlen=_KNOWN_BATCHES)
        self._pending: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
        self._positions: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._loaders: dict[int, str] = {}
        self._inside = False

    def install(self, patches: Patches) -> None:
        """Begin to see data loaders, with and without workers."""
        patches.replace(dataloader._BaseDataLoaderIter, "__next__", self._make_next)
        patches.replace(dataloader._BaseDataLoaderIter, "_next_index", self._make_next_index)

    def _make_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:  # noqa: N807
            recorder = self.recorder
            if recorder.is_off() or self._inside:
                return original(iterator)
            self._begin()
            before = recorder.clock.switch(DATA)
            try:
                batch = original(iterator)
            except StopIteration:
                if recorder.on_exhausted:
                    recorder.ask(recorder.on_exhausted, iterator)
                raise
            finally:
                self._inside = False
                recorder.clock.switch(before)
            self._note(iterator, batch)
            return batch

        return __next__

    def _make_next_index(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _next_index(iterator: Any) -> Any:
            index = original(iterator)
            if not self.recorder.is_off():
                self._pending.setdefault(iterator, deque()).append(index)
            return index

        return _next_index

    def _begin(self) -> None:
        """The next batch belongs to the next step: end the one whose optimizer has stepped."""
        recorder = self.recorder
        self._inside = True
        before = recorder.clock.switch(CLEW)
        try:
            if recorder.end_quietly():
                return
            with unheard():
                if not recorder.has_begun:
                    recorder.begin()
                recorder.before_event()
                if self.roots is not None:
                    self.roots.end_manual_step()
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, "data loader", step=recorder.step)
        finally:
            recorder.clock.switch(before)

    def _note(self, iterator: Any, batch: Any) -> None:
        """Remember where this batch came from; the model will be given it, or a part or a copy of it."""
        recorder = self.recorder
        before = recorder.clock.switch(CLEW)
        try:
            with unheard():
                self._note_origin(iterator, batch)
                recorder.ask(recorder.on_batch, iterator, batch)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            recorder.guard.fault(error, "data loader", step=recorder.step)
        finally:
            recorder.clock.switch(before)

    def _note_origin(self, iterator: Any, batch: Any) -> None:
        flight = self.recorder.flight
        flight.has_loader, flight.last_batch = True, batch
        flight.mark_start()
        position = self._positions.get(iterator, 0)
        self._positions[iterator] = position + 1
        pending = self._pending.get(iterator)
        index = pending.popleft() if pending else None
        addresses = frozenset(map(_address, list_leaves(batch)))
        self._origins.append(_Origin(_name_loader(iterator), position, _flat(index), addresses))

    # ---------------------------------------------------------------- what a root is given

    def record(self, entry: ModuleEntry, args: Any, kwargs: Any, *, tag: int) -> None:
        """Measure the tensors given to a root that no gradient flows back to: the data."""
        recorder = self.recorder
        given = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
        for path, leaf in walk(given):
            if leaf.grad_fn is not None or recorder.registry.owns(leaf):
                continue
            site = self._site(entry, path)
            ordinal = min(recorder.count(site, _KIND), MAX_CALLS - 1)
            row = recorder.measure(leaf, site, KIND_BATCH | tag | ordinal)
            self._keep(leaf, site=site, row=row, ordinal=ordinal, mode=int(bool(tag)))

    def _keep(self, leaf: torch.Tensor, *, site: int, row: int, ordinal: int, mode: int) -> None:
        recorder = self.recorder
        origin = self._find_origin(leaf)
        recorder.batches.append(
            Batch(
                leaf=recorder.sites[site].name,
                shape=tuple(leaf.shape),
                dtype=str(leaf.dtype).removeprefix("torch."),
                fingerprint=row,
                ordinal=ordinal,
                mode=mode,
                loader=origin.loader if origin else "",
                position=origin.position if origin else -1,
                indices=origin.indices if origin else (),
            )
        )

    def _find_origin(self, leaf: torch.Tensor) -> _Origin | None:
        address = _address(leaf)
        return next((origin for origin in reversed(self._origins) if address in origin.addresses), None)

    def _site(self, entry: ModuleEntry, path: str) -> int:
        path = path.removeprefix("[").replace("]", "", 1)
        root = self.recorder.sites[entry.site].root
        # A root without a prefix shows its class in brackets; its batch needs no owner either.
        owner = "" if entry.name.startswith("(") else f"{entry.name}."
        return self.recorder.sites.add(f"{owner}batch.{path}", "batch", root=root)


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage lies; a slice of a batch has the address of the batch."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return id(tensor)
    try:
        return int(tensor.untyped_storage().data_ptr())
    except RuntimeError:  # a wrapper without storage, such as a functorch tensor
        return id(tensor)


def _name_loader(iterator: Any) -> str:
    dataset = getattr(iterator, "_dataset", None)
    return type(dataset).__name__ if dataset is not None else ""


def _flat(index: Any) -> tuple[int, ...]:
    """Return dataset indices as numbers; samplers give lists, one number, or None for an iterable dataset."""
    if isinstance(index, int):
        return (index,)
    if isinstance(index, (list, tuple)):
        numbers = index[:_MOST_INDICES]
        if set(map(type, numbers)) == {int}:
            return tuple(numbers)
        return tuple(part for part in numbers if isinstance(part, int))
    return ()
