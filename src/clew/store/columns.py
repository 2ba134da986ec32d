"""Step records as columns of numbers, the form in which tables take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def record_bytes(record: StepRecord | Stretch) -> int:
    """Return about how much memory a record holds until it is written."""
    if isinstance(record, Stretch):
        return 1024 + sum(values.nbytes + 64 for _, values in record.columns.values())
    return 1024 + 2 * int(record.values.nbytes) + (0 if record.hists is None else int(record.hists.nbytes))


def columns_of(items: Sequence[StepRecord | Stretch]) -> dict[str, Columns]:
    """Return the columns of each table for consecutive steps."""
    records = [item for item in items if isinstance(item, StepRecord)]
    return {
        "stats": _stats_columns([record for record in records if len(record.sites)]),
        "scalars": _scalar_columns(items),
        "batches": _batch_columns(records),
    }


def _stats_columns(records: Sequence[StepRecord]) -> Columns:
    if not records:
        return {"step": np.zeros(0, np.int64)}
    lengths = np.array([len(record.sites) for record in records])
    rows = int(lengths.sum())
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    return {
        "step": np.repeat(np.array([record.step for record in records], np.int64), lengths),
        "seq": np.arange(rows, dtype=np.int32) - np.repeat(starts, lengths),
        "site": _joined([record.sites for record in records], np.int32),
        "kind": _joined([record.kinds for record in records], np.int8),
        "ordinal": _joined([record.ordinals for record in records], np.int16),
        "mode": _joined([record.modes for record in records], np.int8),
        **turn([record.values for record in records]),
        "hash": _hashes(records),
        "hist": _histograms(records),
    }


def _joined(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype, copy=False)


def _hashes(records: Sequence[StepRecord]) -> NDArray[np.uint64] | None:
    if all(record.hashes is None for record in records):
        return None
    missing = (
        np.zeros(len(record), np.uint64) if record.hashes is None else record.hashes for record in records
    )
    return np.concatenate(list(missing))


def _histograms(records: Sequence[StepRecord]) -> tuple[NDArray[np.int64], NDArray[np.uint8]] | None:
    """Return the packed histograms of all rows; a row without one is empty."""
    counted = [record for record in records if record.hists is not None]
    if not counted:
        return None
    counts = [record.hists.reshape(len(record), HIST_BINS) for record in counted if record.hists is not None]
    ends, data = histogram.pack(np.concatenate(counts))
    if len(counted) == len(records):
        return ends, data
    lengths = np.zeros(sum(map(len, records)), np.int64)
    has_one = np.repeat([record.hists is not None for record in records], [len(record) for record in records])
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
