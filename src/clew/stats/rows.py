"""The step buffer: tensors go in, rows of statistics come out, and nothing waits for a device in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clew.errors import UnsupportedTensor
from clew.model.schema import HIST_BINS, STAT_NAMES
from clew.stats import reference

from clew.stats.compiled import load_kernel

KERNEL = load_kernel()

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray


class Rows:
    """A growing table with one row of statistics per measured tensor.

    The caller numbers the rows. ``values`` (float64, one column per ``STAT_NAMES``), ``hashes`` (uint64) and
    ``hists`` (uint32, ``HIST_BINS`` columns) may be read after ``settle()``; they are replaced when the table grows, so
    do not keep references to them. ``hashes`` and ``hists`` are None unless asked for here; a row measured without
    a hash or a histogram has zeros there.
    """

    def __init__(self, *, hashes: bool = False, hists: bool = False, capacity: int = 256) -> None:
        self.threads = 0
        """How many threads a measurement may use; results do not depend on it."""
        self.values: NDArray[np.float64] = np.full((capacity, len(STAT_NAMES)), np.nan)
        self.hashes: NDArray[np.uint64] | None = np.zeros(capacity, np.uint64) if hashes else None
        self.hists: NDArray[np.uint32] | None = np.zeros((capacity, HIST_BINS), np.uint32) if hists else None
        self._find_addresses()

    def _find_addresses(self) -> None:
        self._capacity = len(self.values)
        self._values_at = self.values.ctypes.data
        self._hashes_at = 0 if self.hashes is None else self.hashes.ctypes.data
        self._hists_at = 0 if self.hists is None else self.hists.ctypes.data

    def measure(self, tensor: torch.Tensor, row: int, *, hash: bool = False, hist: bool = False) -> None:
        """Measure one tensor into a row; raises UnsupportedTensor when it has no readable values."""
        if row >= self._capacity:
            self.reserve(row + 1)
        if KERNEL is not None and KERNEL.measure(
            tensor,
            self._values_at + row * 112,
            self._hashes_at + row * 8 if hash and self._hashes_at else 0,
            self._hists_at + row * 512 if hist and self._hists_at else 0,
            self.threads,
        ):
            return
        if not tensor.device.type == "cpu":
            raise UnsupportedTensor("not yet")
        array = tensor.detach().numpy() if tensor.dtype.itemsize != 2 else tensor.detach().float().numpy()
        self.values[row] = reference.summarise(array)
        if self.hashes is not None:
            self.hashes[row] = reference.fingerprint(array) if hash else 0
        if self.hists is not None:
            self.hists[row] = reference.histogram(array) if hist else 0

    def measure_many(
        self, tensors: Sequence[torch.Tensor], first_row: int, *, hash: bool = False, hist: bool = False
    ) -> list[tuple[int, UnsupportedTensor]]:
        """Measure tensors into consecutive rows in one call.

        Returns the positions that could not be measured, with the reason; their rows hold NaN. Usually an empty list.
        """
        failures = []
        self.reserve(first_row + len(tensors))
        for position, tensor in enumerate(tensors):
            try:
                self.measure(tensor, first_row + position, hash=hash, hist=hist)
            except UnsupportedTensor as error:
                failures.append((position, error))
        return failures

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
        failures = []
        for position, (after, before) in enumerate(zip(new, old, strict=True)):
            try:
                after = after.detach()
                self.measure(after - before, first_row + position, hash=hash, hist=hist)
                before.copy_(after)
            except UnsupportedTensor as error:
                failures.append((position, error))
        return failures

    def merge_into(self, row: int, other: int) -> None:
        """Merge the statistics of another row into a row, as if both tensors had been measured as one."""
        self.values[row] = reference.merge(self.values[[row, other]])
        if self.hists is not None:
            self.hists[row] += self.hists[other]
        if self.hashes is not None:
            self.hashes[row] = reference.chain(int(self.hashes[row]), int(self.hashes[other]))

    def settle(self) -> None:
        """Bring the rows that other devices hold to the host: one copy per device, the only synchronisation."""

    def take(
        self, n: int
    ) -> tuple[NDArray[np.float64], NDArray[np.uint64] | None, NDArray[np.uint32] | None]:
        """Settle, and hand over the first ``n`` rows as arrays of the receiver's own; the table starts again."""
        self.settle()
        return (
            self.values[:n].copy(),
            None if self.hashes is None else self.hashes[:n].copy(),
            None if self.hists is None else self.hists[:n].copy(),
        )

    def reserve(self, n: int) -> None:
        """Make room for ``n`` rows; a measurement does it by itself."""
        if n > len(self.values):
            more = max(n, 2 * len(self.values)) - len(self.values)
            self.values = np.concatenate([self.values, np.full((more, len(STAT_NAMES)), np.nan)])
            if self.hashes is not None:
                self.hashes = np.concatenate([self.hashes, np.zeros(more, np.uint64)])
            if self.hists is not None:
                self.hists = np.concatenate([self.hists, np.zeros((more, HIST_BINS), np.uint32)])
            self._find_addresses()
