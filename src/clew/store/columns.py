"""Step records as columns of numbers, the form in which tables take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clew.model.record import StepRecord, Stretch
from clew.model.schema import HIST_BINS
from clew.store import histogram
from clew.store.narrow import turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from clew.store.tables import Columns


_HASH_MASK = (1 << 64) - 1


class _Piece(NamedTuple):
    """The rows of a step, or of several that left the same ones; one after another in ``values`` and what follows."""

    steps: range
    sites: NDArray[np.int32]
    kinds: NDArray[np.int8]
    ordinals: NDArray[np.int16]
    modes: NDArray[np.int8]
    values: NDArray[np.float64]
    hashes: NDArray[np.uint64] | None
    hists: NDArray[np.uint32] | None

    @classmethod
    def of(cls, item: StepRecord | Stretch) -> _Piece:
        """Return the rows of a step, or of several."""
        rows = item.rows if isinstance(item, Stretch) else item
        assert rows is not None  # whoever has none is left out
        first, last = (item.first, item.last) if isinstance(item, Stretch) else (item.step, item.step)
        return cls(
            range(first, last + 1),
            rows.sites,
            rows.kinds,
            rows.ordinals,
            rows.modes,
            rows.values.reshape(-1, rows.values.shape[-1]),
            None if rows.hashes is None else rows.hashes.reshape(-1),
            None if rows.hists is None else rows.hists.reshape(-1, HIST_BINS),
        )

    def repeat(self, column: NDArray[Any]) -> NDArray[Any]:
        """Return what each row has in every step, for all rows."""
        return column if len(self.steps) == 1 else np.tile(column, len(self.steps))


def record_bytes(record: StepRecord | Stretch) -> int:
    """Return about how much memory a record holds until it is written."""
    if isinstance(record, Stretch):
        numbers = 1024 + sum(values.nbytes + 64 for _, values in record.columns.values())
        return numbers + (0 if record.rows is None else record.rows.nbytes + int(record.rows.values.nbytes))
    return 1024 + 2 * int(record.values.nbytes) + (0 if record.hists is None else int(record.hists.nbytes))


def divide(record: StepRecord | Stretch) -> list[StepRecord | Stretch]:
    """Return the two halves of a stretch; one step stays as it is."""
    if isinstance(record, Stretch) and record.steps > 1:
        return list(record.split(record.first + record.steps // 2))
    return [record]


def divide_large(records: Sequence[StepRecord | Stretch], most_bytes: int) -> list[StepRecord | Stretch]:
    """Return records with long stretches in pieces, as small as asked for if one step is."""
    small: list[StepRecord | Stretch] = []
    for record in records:
        halves = divide(record) if record_bytes(record) > most_bytes else [record]
        small += halves if len(halves) == 1 else divide_large(halves, most_bytes)
    return small


def columns_of(items: Sequence[StepRecord | Stretch]) -> dict[str, Columns]:
    """Return the columns of each table for consecutive steps."""
    records = [item for item in items if isinstance(item, StepRecord)]
    return {
        "stats": _stats_columns([_Piece.of(item) for item in items if _has_rows(item)]),
        "scalars": _scalar_columns(items),
        "batches": _batch_columns(records),
    }


def _has_rows(item: StepRecord | Stretch) -> bool:
    return item.rows is not None if isinstance(item, Stretch) else len(item.sites) > 0


def _stats_columns(pieces: Sequence[_Piece]) -> Columns:
    if not pieces:
        return {"step": np.zeros(0, np.int64)}
    steps = np.array([step for piece in pieces for step in piece.steps], np.int64)
    lengths = np.repeat([len(piece.sites) for piece in pieces], [len(piece.steps) for piece in pieces])
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    return {
        "step": np.repeat(steps, lengths),
        "seq": np.arange(lengths.sum(), dtype=np.int32) - np.repeat(starts, lengths),
        "site": _joined([piece.repeat(piece.sites) for piece in pieces], np.int32),
        "kind": _joined([piece.repeat(piece.kinds) for piece in pieces], np.int8),
        "ordinal": _joined([piece.repeat(piece.ordinals) for piece in pieces], np.int16),
        "mode": _joined([piece.repeat(piece.modes) for piece in pieces], np.int8),
        **turn([piece.values for piece in pieces]),
        "hash": _hashes(pieces),
        "hist": _histograms(pieces),
    }


def _joined(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype, copy=False)


def _hashes(pieces: Sequence[_Piece]) -> NDArray[np.uint64] | None:
    if all(piece.hashes is None for piece in pieces):
        return None
    missing = (
        np.zeros(len(piece.values), np.uint64) if piece.hashes is None else piece.hashes for piece in pieces
    )
    return np.concatenate(list(missing))


def _histograms(pieces: Sequence[_Piece]) -> tuple[NDArray[np.int64], NDArray[np.uint8]] | None:
    """Return the packed histograms of all rows; a row without one is empty."""
    counts = [piece.hists for piece in pieces if piece.hists is not None]
    if not counts:
        return None
    ends, data = histogram.pack(np.concatenate(counts))
    if len(counts) == len(pieces):
        return ends, data
    sizes = [len(piece.values) for piece in pieces]
    lengths = np.zeros(sum(sizes), np.int64)
    has_one = np.repeat([piece.hists is not None for piece in pieces], sizes)
    lengths[has_one] = np.diff(ends)
    return np.concatenate(([0], np.cumsum(lengths))), data


def _scalar_columns(items: Sequence[StepRecord | Stretch]) -> Columns:
    """Return the numbers of all steps, step by step."""
    records = [item for item in items if isinstance(item, StepRecord)]
    flat = [scalar for record in records for scalar in record.scalars]
    counts = [len(record.scalars) for record in records]
    steps = [np.repeat(np.array([record.step for record in records], np.int64), counts)]
    # No zip(*flat): its iterators, one for each number, would have Python's garbage collected at every flush.
    names = [scalar[0] for scalar in flat]
    values = [np.array([scalar[1] for scalar in flat], np.float64)]
    ordinals = [np.array([scalar[2] for scalar in flat], np.int16)]
    if len(records) == len(items) and (steps[0][1:] >= steps[0][:-1]).all():
        return {"step": steps[0], "name": names, "ordinal": ordinals[0], "value": values[0]}
    for item in items:
        if not isinstance(item, Stretch):
            continue
        for (name, ordinal), (at, column) in item.columns.items():
            steps.append(at)
            names += [name] * len(at)
            ordinals.append(np.full(len(at), ordinal, np.int16))
            values.append(column)
    step = np.concatenate(steps)
    order = np.argsort(step, kind="stable")
    return {
        "step": step[order],
        "name": [names[row] for row in order.tolist()],
        "ordinal": np.concatenate(ordinals)[order],
        "value": np.concatenate(values)[order],
    }


def _batch_columns(records: Sequence[StepRecord]) -> Columns:
    rows = [(record.step, seq, batch) for record in records for seq, batch in enumerate(record.batches)]
    batches = [batch for _, _, batch in rows]
    return {
        "step": np.array([step for step, _, _ in rows], np.int64),
        "seq": np.array([seq for _, seq, _ in rows], np.int32),
        "leaf": [batch.leaf for batch in batches],
        "ordinal": np.array([batch.ordinal for batch in batches], np.int16),
        "mode": np.array([batch.mode for batch in batches], np.int8),
        "shape": [list(batch.shape) for batch in batches],
        "dtype": [batch.dtype for batch in batches],
        "fingerprint": np.array([batch.fingerprint & _HASH_MASK for batch in batches], np.uint64),
        "loader": [batch.loader for batch in batches],
        "position": np.array([batch.position for batch in batches], np.int64),
        "indices": [list(batch.indices) for batch in batches],
    }


def unmark(rows: dict[str, Any]) -> dict[str, Any]:
    """Return scalars of steps as if none had been recorded in full: their statistics are left out."""
    marks = [name == "clew.recorded" for name in rows["name"]]
    return {**rows, "value": np.where(marks, 0.0, rows["value"])}
