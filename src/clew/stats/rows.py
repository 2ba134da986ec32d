"""The step buffer: tensors go in, rows of statistics come out, and nothing waits for a device in between."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np
import torch

from clew.errors import UnsupportedTensor
from clew.model.schema import HIST_BINS, STAT_NAMES
from clew.stats import reference, spec, torch_path
from clew.stats.compiled import load_kernel
from clew.stats.readable import Reading, read, subtract, undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

ROW_BYTES: Final = 8 * len(STAT_NAMES)
HIST_BYTES: Final = 4 * HIST_BINS

KERNEL: Final = load_kernel()


class _Waiting(NamedTuple):
    """A row that a device still holds: what to do with its packed numbers once they are on the host."""

    row: int
    device: torch.device
    packed: torch.Tensor
    elements: int
    zeros: int
    hash: bool
    hist: bool


class _Merge(NamedTuple):
    """A merge that waits until the rows it needs have arrived."""

    row: int
    other: int


class CutRows(NamedTuple):
    """Rows as they lay in memory."""

    values: bytearray
    hashes: bytearray | None
    hists: bytearray | None

    def repeat(self, copies: list[tuple[int, int]]) -> None:
        """Give rows what earlier rows have, each pair a row and the earlier one."""
        for part, width in ((self.values, ROW_BYTES), (self.hashes, 8), (self.hists, HIST_BYTES)):
            if part is not None:
                for row, earlier in copies:
                    part[row * width : (row + 1) * width] = part[earlier * width : (earlier + 1) * width]

    def to_arrays(
        self,
    ) -> tuple[NDArray[np.float64], NDArray[np.uint64] | None, NDArray[np.uint32] | None]:
        """Return the statistics, hashes and histograms, a row each; they are the receiver's own."""
        return (
            np.frombuffer(self.values, np.float64).reshape(-1, len(STAT_NAMES)),
            None if self.hashes is None else np.frombuffer(self.hashes, np.uint64),
            None if self.hists is None else np.frombuffer(self.hists, np.uint32).reshape(-1, HIST_BINS),
        )


class Rows:
    """A growing table with one row of statistics per measured tensor.

    The caller numbers the rows. ``values`` (float64, one column per ``STAT_NAMES``), ``hashes`` (uint64) and ``hists``
    (uint32, ``HIST_BINS`` columns) may be read after ``settle()``; they are replaced when the table grows, so do not
    keep them. ``hashes`` and ``hists`` are None unless asked for here; a row measured without a hash or a histogram
    has zeros there. Measuring changes nothing: no operation is recorded, no tensor, counter or random state touched;
    a tensor in this process's memory is read by address.
    """

    def __init__(self, *, hashes: bool = False, hists: bool = False, capacity: int = 256) -> None:
        self.threads = 0
        """How many threads a measurement may use, 0 for as many as torch; results do not depend on it."""
        self.values: NDArray[np.float64] = np.full((capacity, len(STAT_NAMES)), np.nan)
        self.hashes: NDArray[np.uint64] | None = np.zeros(capacity, np.uint64) if hashes else None
        self.hists: NDArray[np.uint32] | None = np.zeros((capacity, HIST_BINS), np.uint32) if hists else None
        self.on_moved: Callable[[], None] = _nobody
        """Called when the table has moved to another place in memory."""
        self._log: list[_Waiting | _Merge] = []
        self._outgrown: list[object] = []
        self._find_addresses()

    def _find_addresses(self) -> None:
        self._capacity = len(self.values)
        self._values_at = self.values.ctypes.data
        self._hashes_at = 0 if self.hashes is None else self.hashes.ctypes.data
        self._hists_at = 0 if self.hists is None else self.hists.ctypes.data
        self.on_moved()

    @property
    def capacity(self) -> int:
        """How many rows there is room for."""
        return self._capacity

    @property
    def row_bytes(self) -> int:
        """How much memory a row takes, with its hash and its histogram."""
        return ROW_BYTES + (self.hashes is not None) * 8 + (self.hists is not None) * HIST_BYTES

    def locate(self) -> tuple[int, int, int]:
        """Return the addresses of the first row, its hash and its histogram; 0 for what is not kept."""
        return self._values_at, self._hashes_at, self._hists_at

    def measure(self, tensor: torch.Tensor, row: int, *, hash: bool = False, hist: bool = False) -> None:
        """Measure one tensor into a row; raises UnsupportedTensor when it has no readable values."""
        if row >= self._capacity:
            self.reserve(row + 1)
        if KERNEL is None or not KERNEL.measure(
            tensor,
            self._values_at + row * ROW_BYTES,
            self._hashes_at + row * 8 if hash and self._hashes_at else 0,
            self._hists_at + row * HIST_BYTES if hist and self._hists_at else 0,
            self.threads,
        ):
            self._measure_other(tensor, row, hash=hash, hist=hist)

    def measure_many(
        self, tensors: Sequence[torch.Tensor], first_row: int, *, hash: bool = False, hist: bool = False
    ) -> list[tuple[int, UnsupportedTensor]]:
        """Measure tensors into consecutive rows in one call.

        Returns the positions that could not be measured, with the reason; their rows are NaN. Usually empty.
        """
        self.reserve(first_row + len(tensors))
        left = range(len(tensors))
        if KERNEL is not None:
            with torch._C.DisableTorchFunction():  # no mode of the user shall see the kernel's questions
                addresses = self._find_row(first_row, hash=hash, hist=hist)
                left = KERNEL.measure_many(tensors, *addresses, self.threads)
        return [
            (position, failure)
            for position in left
            if (failure := self.try_measure(tensors[position], first_row + position, hash=hash, hist=hist))
        ]

    def measure_updates(
        self,
        new: Sequence[torch.Tensor],
        old: Sequence[torch.Tensor],
        *,
        first_row: int,
        hash: bool = False,
        hist: bool = False,
    ) -> list[tuple[int, UnsupportedTensor]]:
        """Measure ``new - old`` into consecutive rows and overwrite ``old`` with ``new``, in one pass over memory.

        ``old`` are buffers of the caller (clones of ``new`` at the start). Failures as in ``measure_many``.
        """
        if first_row + len(new) > self._capacity:
            self.reserve(first_row + len(new))
        left = range(len(new))
        if KERNEL is not None:
            with torch._C.DisableTorchFunction():
                addresses = self._find_row(first_row, hash=hash, hist=hist)
                left = KERNEL.measure_updates(new, old, *addresses, self.threads)
            if not left:
                return []
        return [
            (position, failure)
            for position in left
            if (
                failure := self._try_update(
                    new[position], old[position], first_row + position, hash=hash, hist=hist
                )
            )
        ]

    def _find_row(self, row: int, *, hash: bool, hist: bool) -> tuple[int, int, int]:
        """Return the addresses of a row, its hash and its histogram; 0 for what is not wanted."""
        return (
            self._values_at + row * ROW_BYTES,
            self._hashes_at + row * 8 if hash and self._hashes_at else 0,
            self._hists_at + row * HIST_BYTES if hist and self._hists_at else 0,
        )

    def try_measure(
        self, tensor: torch.Tensor, row: int, *, hash: bool, hist: bool
    ) -> UnsupportedTensor | None:
        """Measure a tensor; return the error instead of raising it, and leave NaN in its row."""
        try:
            self.measure(tensor, row, hash=hash, hist=hist)
        except UnsupportedTensor as error:
            self._clear(row)
            return error
        return None

    def _try_update(
        self, new: torch.Tensor, old: torch.Tensor, row: int, *, hash: bool, hist: bool
    ) -> UnsupportedTensor | None:
        """Measure a difference as ``try_measure`` does, and overwrite the old values."""
        try:
            with undisturbed():
                change = subtract(new, old)
                old.copy_(new)
        except UnsupportedTensor as error:
            self._clear(row)
            return error
        return self.try_measure(change, row, hash=hash, hist=hist)

    def _clear(self, row: int) -> None:
        self.values[row] = np.nan
        if self.hashes is not None:
            self.hashes[row] = 0
        if self.hists is not None:
            self.hists[row] = 0

    def _measure_other(self, tensor: torch.Tensor, row: int, *, hash: bool, hist: bool) -> None:
        """Measure a tensor that is not simply memory: another device, another layout, a subclass."""
        hash, hist = hash and self.hashes is not None, hist and self.hists is not None
        addresses = self._find_row(row, hash=hash, hist=hist)
        with torch._C.DisableTorchFunction():
            if KERNEL is not None and KERNEL.measure(tensor, *addresses, self.threads):
                return  # only a mode of the user stood in the way
        with undisturbed():
            reading = read(tensor)
            if KERNEL is not None and KERNEL.measure(reading.values, *addresses, self.threads):
                if reading.zeros or reading.places:
                    self._complete(row, reading, hash=hash)
                return
            self._log.append(self._leave_on_device(reading, row, hash=hash, hist=hist))

    def _leave_on_device(self, reading: Reading, row: int, *, hash: bool, hist: bool) -> _Waiting:
        """Start the measurement where the tensor is; hashes of the places of stored values come last."""
        packed = torch_path.measure(reading.values, hash=hash, hist=hist)
        if hash and reading.places:
            places = [torch_path.fingerprint(place.reshape(-1)).reshape(1) for place in reading.places]
            packed = torch.cat([packed, *places])
        elements = reading.values.numel()
        return _Waiting(
            row, packed.device, packed, elements=elements, zeros=reading.zeros, hash=hash, hist=hist
        )

    def _complete(self, row: int, reading: Reading, *, hash: bool) -> None:
        """Add to the row of a sparse tensor's stored values the zeros it does not store, to its hash their places."""
        self._add_zeros(row, reading.zeros)
        if hash and self.hashes is not None:
            for place in reading.places:
                other = torch_path.fingerprint(place.reshape(-1))
                self.hashes[row] = spec.chain(int(self.hashes[row]), int(other) & spec.MASK_64)

    def _add_zeros(self, row: int, zeros: int) -> None:
        nothing = np.zeros(len(STAT_NAMES))
        nothing[reference.COUNT] = nothing[reference.ZERO] = zeros
        self.values[row] = reference.merge([self.values[row], nothing])

    def merge_into(self, row: int, other: int) -> None:
        """Merge the statistics of another row into a row, as if both tensors had been measured as one.

        Histograms are added and hashes chained. May be called before ``settle()``: then it happens there, in order.
        """
        if self._log:
            self._log.append(_Merge(row, other))
        else:
            self._merge(row, other)

    def _merge(self, row: int, other: int) -> None:
        if KERNEL is not None:
            wanted = {"hash": True, "hist": True}
            KERNEL.merge(*self._find_row(row, **wanted), *self._find_row(other, **wanted))
            return
        self.values[row] = reference.merge([self.values[row], self.values[other]])
        if self.hashes is not None:
            self.hashes[row] = spec.chain(int(self.hashes[row]), int(self.hashes[other]))
        if self.hists is not None:
            self.hists[row] = reference.merge_histograms([self.hists[row], self.hists[other]])

    def settle(self) -> None:
        """Bring the rows that other devices hold to the host: one copy per device, the only synchronisation."""
        if not self._log:
            return
        log, self._log = self._log, []
        numbers = iter(_fetch([entry for entry in log if isinstance(entry, _Waiting)]))
        for entry in log:
            if isinstance(entry, _Merge):
                self._merge(entry.row, entry.other)
            else:
                self._write(entry, next(numbers))

    def _write(self, entry: _Waiting, packed: NDArray[np.int64]) -> None:
        """Write what came from a device into the row it belongs to."""
        found = torch_path.unpack(
            packed, entry.elements, device_type=entry.device.type, hash=entry.hash, hist=entry.hist
        )
        self.values[entry.row] = found.row
        if entry.zeros:
            self._add_zeros(entry.row, entry.zeros)
        if entry.hash and self.hashes is not None:
            self.hashes[entry.row] = reduce(
                spec.chain, [p & spec.MASK_64 for p in found.rest.tolist()], found.hash
            )
        if entry.hist and self.hists is not None:
            self.hists[entry.row] = found.hist

    def take(
        self, n: int
    ) -> tuple[NDArray[np.float64], NDArray[np.uint64] | None, NDArray[np.uint32] | None]:
        """Settle, and hand over the first ``n`` rows as arrays of the receiver's own; the table starts again."""
        return self.cut(n).to_arrays()

    def cut(self, n: int) -> CutRows:
        """Do as ``take`` does and leave it for later to make arrays of the memory."""
        if self._log:
            self.settle()
        if n > self._capacity:
            self.reserve(n)
        if self._outgrown:
            self._outgrown.clear()
        if KERNEL is not None:
            return CutRows(*KERNEL.take(n, self._values_at, self._hashes_at, self._hists_at))
        return CutRows(
            _cut(self.values[:n], np.nan),
            None if self.hashes is None else _cut(self.hashes[:n], 0),
            None if self.hists is None else _cut(self.hists[:n], 0),
        )

    def reserve(self, n: int) -> None:
        """Make room for ``n`` rows; a measurement does it by itself."""
        if n <= self._capacity:
            return
        # Another thread may be in the kernel with the old addresses: the memory stays until the step is over.
        self._outgrown += [self.values, self.hashes, self.hists]
        rows = max(n, 2 * self._capacity)
        self.values = _grow(self.values, rows, np.nan)
        self.hashes = None if self.hashes is None else _grow(self.hashes, rows, 0)
        self.hists = None if self.hists is None else _grow(self.hists, rows, 0)
        self._find_addresses()


def _fetch(entries: list[_Waiting]) -> list[NDArray[np.int64]]:
    """Return the packed numbers of each entry on the host, after one copy from each device."""
    fetched: dict[int, NDArray[np.int64]] = {}
    with undisturbed():
        for device in {entry.device for entry in entries}:
            local = [(i, entry) for i, entry in enumerate(entries) if entry.device == device]
            host = torch.cat([entry.packed for _, entry in local]).cpu().numpy()
            start = 0
            for i, entry in local:
                fetched[i] = host[start : (start := start + entry.packed.numel())]
    return [fetched[i] for i in range(len(entries))]


def _nobody() -> None:
    pass


_Number = TypeVar("_Number", bound=np.generic)


def _cut(rows: NDArray[_Number], empty: float) -> bytearray:
    """Return a copy of the rows' memory and empty them."""
    copy = bytearray(rows.tobytes())
    rows[...] = empty
    return copy


def _grow(table: NDArray[_Number], rows: int, empty: float) -> NDArray[_Number]:
    """Return a longer table with the same first rows."""
    longer = np.full((rows, *table.shape[1:]), empty, table.dtype)
    longer[: len(table)] = table
    return longer
