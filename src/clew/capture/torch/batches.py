"""Sees the batches: how long the loop waited for them, what they hold, and which samples they were made of."""

from __future__ import annotations

import functools
import weakref
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils.data import dataloader

from clew.capture.assemble import MAX_CALLS
from clew.capture.beat import Source
from clew.capture.clock import CLEW, DATA
from clew.capture.torch.gates import Gates
from clew.capture.torch.leaves import list_leaves, walk
from clew.capture.torch.recorder import KIND_BATCH
from clew.model.record import Batch
from clew.stats.readable import unheard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.registry import ModuleEntry
    from clew.capture.torch.roots import Roots

_KNOWN_BATCHES: Final = 8
"""Loader batches kept for recognition: frameworks fetch a batch or two ahead."""

_MOST_INDICES: Final = 4096


class _Origin(NamedTuple):
    """Where a loader batch came from; tensors are known by their addresses, never held."""

    loader: str
    position: int
    indices: tuple[int, ...] | bytes
    """Packed where they were plain: of few batches they are needed."""
    addresses: Collection[int]

    def list_indices(self) -> tuple[int, ...]:
        """Return the indices in the dataset of the samples that the batch was made of."""
        return tuple(array("q", self.indices)) if isinstance(self.indices, bytes) else self.indices


class _Source(Source):
    """An iterator of a loader: how many batches it has given, and the indices that others are made of meanwhile."""

    __slots__ = ()

    def __init__(self, iterator: Any, forget: Callable[[object], object]) -> None:
        self.ref = weakref.ref(iterator, forget)
        self.name = _name_loader(iterator)
        self.position = 0
        self.pending = []


class BatchLens:
    """Turns loader batches and root inputs into records."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.roots: Roots | None = None
        self._origins: deque[_Origin] = deque(maxlen=_KNOWN_BATCHES)
        self._rest_of = (-1, 0)
        """The step and the batch, one of those that are kept, whose further parts were measured last."""
        self._sources: dict[int, _Source] = {}

    def install(self, patches: Patches) -> None:
        """Begin to see data loaders, with and without workers."""
        gates = Gates(self.recorder)
        fetch = functools.partial(
            gates.fetch,
            optimizers={} if self.roots is None else self.roots.optimizers.entries,
            origins=(self._origins, _Origin, self._sources),
            fail=self._fail,
            finish=self._finish,
        )
        index = functools.partial(gates.fetch_index, sources=self._sources)
        patches.replace(dataloader._BaseDataLoaderIter, "__next__", self._make_next, fetch)
        patches.replace(dataloader._BaseDataLoaderIter, "_next_index", self._make_next_index, index)

    def _make_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:  # noqa: N807
            recorder = self.recorder
            if recorder.is_off() or recorder.fetching:
                return original(iterator)
            before = recorder.clock.switch(CLEW)
            recorder.fetching = True
            try:
                self._begin()
                recorder.clock.switch(DATA)
                batch = original(iterator)
            except StopIteration:
                self._finish(iterator)
                raise
            finally:
                recorder.fetching = False
                recorder.clock.switch(before)
            self._finish(iterator, batch)
            return batch

        return __next__

    def _make_next_index(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _next_index(iterator: Any) -> Any:
            index = original(iterator)
            if not self.recorder.is_off():
                self._find_source(iterator).pending.append(index)
            return index

        return _next_index

    def _find_source(self, iterator: Any) -> _Source:
        key, sources = id(iterator), self._sources
        source = sources.get(key)
        if source is None:
            source = sources[key] = _Source(iterator, lambda _: sources.pop(key, None))
        return source

    def _begin(self) -> None:
        """The next batch belongs to the next step: end the one whose optimizer has stepped."""
        recorder = self.recorder
        try:
            if not recorder.end_quietly():
                with unheard():
                    if not recorder.has_begun:
                        recorder.begin()
                    recorder.before_event()
                    if self.roots is not None:
                        self.roots.end_manual_step()
            if recorder.flight.snapshots is not None:
                recorder.flight.snapshots.await_batch()
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._fail(error)

    def _finish(self, iterator: Any, *batch: Any) -> None:
        """Keep the batch that an iterator has given, and where it came from; without one it has come to its end."""
        recorder = self.recorder
        before = recorder.clock.switch(CLEW)
        try:
            self._tell(iterator, batch)
            if recorder.flight.snapshots is not None:
                recorder.flight.snapshots.add_batch(*batch)
        finally:
            recorder.clock.switch(before)

    def _tell(self, iterator: Any, batch: tuple[Any, ...]) -> None:
        recorder = self.recorder
        try:
            with unheard():
                if batch:
                    self._note(iterator, *batch)
                elif recorder.on_exhausted:
                    recorder.ask(recorder.on_exhausted, iterator)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.recorder.guard.fault(error, "data loader", step=self.recorder.step)

    def _note(self, iterator: Any, batch: Any) -> None:
        """Remember where this batch came from; the model will be given it, or a part or a copy of it."""
        recorder, flight, source = self.recorder, self.recorder.flight, self._find_source(iterator)
        flight.has_loader, flight.last_batch, flight.last_iterator = True, batch, source.ref
        flight.mark_start()
        position = source.position
        source.position += 1
        index = source.pending.pop(0) if source.pending else None
        addresses = frozenset(map(_address, list_leaves(batch)))
        self._origins.append(_Origin(source.name, position, _flat(index), addresses))
        recorder.ask(recorder.on_batch, iterator, batch)
        if not position:
            recorder.ask(recorder.on_first_batch, iterator, batch)

    # ---------------------------------------------------------------- what a root is given

    def record(self, entry: ModuleEntry, args: Any, kwargs: Any, *, tag: int) -> None:
        """Measure the tensors given to a root that no gradient flows back to: the data."""
        recorder = self.recorder
        given = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
        addresses = set()
        for path, leaf in walk(given):
            if leaf.grad_fn is not None or recorder.registry.owns(leaf):
                continue
            addresses.add(_address(leaf))
            self._measure(leaf, self._site(entry, path), tag)
        self._record_rest(entry, addresses, tag)

    def _record_rest(self, entry: ModuleEntry, given: set[int], tag: int) -> None:
        """Measure what else is in the loader's last batch, labels say, if the root was given a part of that; once."""
        recorder = self.recorder
        origin = self._origins[-1] if self._origins else None
        if origin is None or (recorder.serial, id(origin)) == self._rest_of:
            return
        if not any(address in origin.addresses for address in given):
            return
        self._rest_of = (recorder.serial, id(origin))
        for path, leaf in walk(recorder.flight.last_batch):
            if leaf.grad_fn is None and _address(leaf) not in given:
                root = recorder.sites[entry.site].root
                site = recorder.sites.add(f"loader.{_trim(path) or 'batch'}", "loader", root=root)
                self._measure(leaf, site, tag)

    def _measure(self, leaf: torch.Tensor, site: int, tag: int) -> None:
        recorder = self.recorder
        ordinal = min(recorder.count(site, KIND_BATCH | tag), MAX_CALLS - 1)
        row = recorder.measure(leaf, site, KIND_BATCH | tag | ordinal)
        origin = self._find_origin(leaf)
        recorder.batches.append(
            Batch(
                leaf=recorder.sites[site].name,
                shape=tuple(leaf.shape),
                dtype=str(leaf.dtype).removeprefix("torch."),
                fingerprint=row,
                ordinal=ordinal,
                mode=int(bool(tag)),
                loader=origin.loader if origin else "",
                position=origin.position if origin else -1,
                indices=origin.list_indices() if origin else (),
            )
        )

    def _find_origin(self, leaf: torch.Tensor) -> _Origin | None:
        address = _address(leaf)
        return next((origin for origin in reversed(self._origins) if address in origin.addresses), None)

    def _site(self, entry: ModuleEntry, path: str) -> int:
        root = self.recorder.sites[entry.site].root
        # A root without a prefix shows its class in brackets; its batch needs no owner either.
        owner = "" if entry.name.startswith("(") else f"{entry.name}."
        return self.recorder.sites.add(f"{owner}batch.{_trim(path)}", "batch", root=root)


def _trim(path: str) -> str:
    """Return a path without the brackets of its first part."""
    return path.removeprefix("[").replace("]", "", 1)


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
