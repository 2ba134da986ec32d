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

    from clew.model.record import StretchRows
    from clew.store.tables import Columns


_HASH_MASK = (1 << 64) - 1


class _Piece(NamedTuple):
    """The rows of a step, or of several that left the same ones."""

    steps: range
    rows: StepRecord | StretchRows

    @property
    def values(self) -> NDArray[np.float64]:
        """The statistics of all rows, step after step."""
        return self.rows.values.reshape(-1, self.rows.values.shape[-1])

    def repeat(self, column: NDArray[Any]) -> NDArray[Any]:
        """Return what each row has in every step, for all rows."""
        return column if len(self.steps) == 1 else np.tile(column, len(self.steps))


def _cut_pieces(items: Sequence[StepRecord | Stretch]) -> list[_Piece]:
    """Return the rows of those that have any."""
    pieces = []
    for item in items:
        if isinstance(item, Stretch):
            if item.rows is not None:
                pieces.append(_Piece(range(item.first, item.last + 1), item.rows))
        elif len(item.sites):
            pieces.append(_Piece(range(item.step, item.step + 1), item))
    return pieces


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
        "stats": _stats_columns(_cut_pieces(items)),
        "scalars": _scalar_columns(items),
        "batches": _batch_columns(records),
    }


def _stats_columns(pieces: Sequence[_Piece]) -> Columns:
    if not pieces:
        return {"step": np.zeros(0, np.int64)}
    steps = np.array([step for piece in pieces for step in piece.steps], np.int64)
    lengths = np.repeat([len(piece.rows.sites) for piece in pieces], [len(piece.steps) for piece in pieces])
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    return {
        "step": np.repeat(steps, lengths),
        "seq": np.arange(lengths.sum(), dtype=np.int32) - np.repeat(starts, lengths),
        "site": _joined([piece.repeat(piece.rows.sites) for piece in pieces], np.int32),
        "kind": _joined([piece.repeat(piece.rows.kinds) for piece in pieces], np.int8),
        "ordinal": _joined([piece.repeat(piece.rows.ordinals) for piece in pieces], np.int16),
        "mode": _joined([piece.repeat(piece.rows.modes) for piece in pieces], np.int8),
        **turn([piece.values for piece in pieces]),
        "hash": _hashes(pieces),
        "hist": _histograms(pieces),
    }


def _joined(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype, copy=False)


def _hashes(pieces: Sequence[_Piece]) -> NDArray[np.uint64] | None:
    if all(piece.rows.hashes is None for piece in pieces):
        return None
    return np.concatenate(
        [
            np.zeros(len(piece.values), np.uint64)
            if piece.rows.hashes is None
            else piece.rows.hashes.reshape(-1)
            for piece in pieces
        ]
    )


def _histograms(pieces: Sequence[_Piece]) -> tuple[NDArray[np.int64], NDArray[np.uint8]] | None:
    """Return the packed histograms of all rows; a row without one is empty."""
    counts = [piece.rows.hists.reshape(-1, HIST_BINS) for piece in pieces if piece.rows.hists is not None]
    if not counts:
        return None
    ends, data = histogram.pack(np.concatenate(counts))
    if len(counts) == len(pieces):
        return ends, data
    sizes = [len(piece.values) for piece in pieces]
    lengths = np.zeros(sum(sizes), np.int64)
    has_one = np.repeat([piece.rows.hists is not None for piece in pieces], sizes)
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
