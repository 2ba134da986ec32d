"""What a step left, as it left it; made into a record later, when there is time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.capture.assemble import Columns, Layout, drop_unseen, merge_repeats
from clew.capture.clock import PHASES
from clew.model.record import Scalar, StepRecord, Stretch, StretchRows, new_tuple
from clew.model.schema import HIST_BINS, STAT_INDEX, STAT_NAMES
from clew.stats.built import BUILT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from clew.model.record import Batch, Column, Fault
    from clew.stats.rows import CutRows

_NO_VALUES: Final = np.zeros((0, len(STAT_NAMES)))
_RECORDED, _THINNED = Scalar("clew.recorded", 1.0), Scalar("clew.recorded", 0.0)
_COUNT, _L2 = STAT_INDEX["count"], STAT_INDEX["l2"]
_NAN, _NEG_INF = STAT_INDEX["nan"], STAT_INDEX["neg_inf"]
_TIMES: Final = tuple(f"time.{name}" for name in PHASES)
_MOST_ROWS: Final = 256
"""Steps of more rows go alone: what a record costs is little beside them, and to join them takes memory."""


Parts = tuple[int, bool, list[float], Layout, "CutRows | None", bool, list[Scalar], "list[Batch]"]
"""What a draft is made of."""


@dataclass(slots=True)
class Draft:
    """One step before it is a record. ``rows`` are its numbers as the kernel left them, or None without any."""

    step: int
    due: bool
    phases: list[float]
    layout: Layout
    rows: CutRows | None
    has_repeats: bool
    scalars: list[Scalar]
    batches: list[Batch]

    def finish(self, faults: tuple[Fault, ...]) -> StepRecord:
        """Return the record."""
        self.scalars += [
            new_tuple(Scalar, (name, value, 0))
            for name, value in zip(_TIMES, self.phases, strict=True)
            if value
        ]
        columns, layout, has_bad = self._assemble()
        # A due step of which nothing could be measured, say inside a transform of torch.func, is not one in full.
        self.scalars.append(_RECORDED if self.due and len(columns.keys) else _THINNED)
        return StepRecord(
            step=self.step,
            sites=layout.sites,
            kinds=layout.kinds,
            ordinals=layout.ordinals,
            modes=layout.modes,
            values=columns.values,
            hashes=columns.hashes,
            hists=columns.hists,
            has_bad=has_bad,
            scalars=tuple(self.scalars),
            batches=self._stamp_batches() if self.batches else (),
            faults=faults,
        )

    def _assemble(self) -> tuple[Columns, Layout, bool]:
        """Return the rows as they go into the record, what each is, and whether one has a NaN or an infinity."""
        layout, rows = self.layout, self.rows
        if rows is None:
            return Columns(layout.packed, _NO_VALUES, None, None), layout, False
        if BUILT is not None and not self.has_repeats:
            has_bad, norms = BUILT.settle(*rows, layout.copies, layout.grads_at, len(layout.grads))
            columns = Columns(layout.packed, *rows.to_arrays())
        else:
            columns, layout, has_bad, norms = self._settle_slowly(rows)
        if norms:
            self.scalars.append(Scalar("grad_norm", _add_norms(columns.values, layout.grads, norms)))
        return columns, layout, has_bad

    def _settle_slowly(self, rows: CutRows) -> tuple[Columns, Layout, bool, list[float]]:
        """Do as the kernel does; and leave rows out, or merge them."""
        layout = self.layout
        rows.repeat(layout.copies)  # several sites, one tensor
        columns = Columns(layout.packed, *rows.to_arrays())
        if self.has_repeats:
            columns = merge_repeats(drop_unseen(columns))
            layout = Layout(columns.keys.tolist(), [])
        has_bad = bool(np.count_nonzero(columns.values[:, _NAN : _NEG_INF + 1]))
        return columns, layout, has_bad, columns.values[:, _L2][layout.grads].tolist()

    def _stamp_batches(self) -> tuple[Batch, ...]:
        """Give each batch its fingerprint; until now it held the row that was being measured."""
        hashes = self.rows.to_arrays()[1] if self.rows is not None else None
        return tuple(
            replace(
                batch,
                fingerprint=int(hashes[batch.fingerprint])
                if hashes is not None and batch.fingerprint >= 0
                else 0,
            )
            for batch in self.batches
        )


def find_kin(parts: Parts) -> object:
    """Return what is the same for steps that may go together: nothing for those that have nothing but numbers, the
    layout for those that have rows; for a step that goes alone what is like nothing else.
    """
    _, due, _, layout, rows, has_repeats, _, batches = parts
    if not due and rows is None and not batches:
        return None
    is_alone = not due or rows is None or batches or has_repeats or len(layout.keys) > _MOST_ROWS
    return object() if is_alone else layout


def join(some: Sequence[Parts]) -> Stretch | None:
    """Return steps in a row that are kin as one stretch: records of each would cost several times that.

    None where a row has a NaN or an infinity: what looks for these looks at each step.
    """
    rows = _join_rows(some) if some[0][1] else None
    if some[0][1] and rows is None:
        return None
    columns = _join_scalars(some)
    grads = some[0][3].grads
    if rows is not None and len(grads):
        norms = zip(rows.values, rows.values[:, grads, _L2].tolist(), strict=True)
        found = [_add_norms(values, grads, each) for values, each in norms]
        columns["grad_norm", 0] = (columns["clew.recorded", 0][0], np.array(found, np.float64))
    return Stretch(some[0][0], some[-1][0], columns, rows)


def _join_rows(some: Sequence[Parts]) -> StretchRows | None:
    """Return the rows of steps of one layout; None where one is bad."""
    layout = some[0][3]
    cuts = [rows for _, _, _, _, rows, _, _, _ in some if rows is not None]
    values = _join_memory([rows.values for rows in cuts], layout, np.float64, (len(STAT_NAMES),))
    if values[:, :, _NAN : _NEG_INF + 1].any():
        return None
    hashes = [rows.hashes for rows in cuts if rows.hashes is not None]
    hists = [rows.hists for rows in cuts if rows.hists is not None]
    return StretchRows(
        layout.sites,
        layout.kinds,
        layout.ordinals,
        layout.modes,
        values,
        _join_memory(hashes, layout, np.uint64, ()) if hashes else None,
        _join_memory(hists, layout, np.uint32, (HIST_BINS,)) if hists else None,
    )


def _join_memory(pieces: list[bytearray], layout: Layout, dtype: Any, row: tuple[int, ...]) -> NDArray[Any]:
    """Return the rows of several steps as one array, and give rows what earlier ones have."""
    joined = np.frombuffer(bytearray().join(pieces), dtype).reshape(len(pieces), -1, *row)
    for at, earlier in layout.copies:  # several sites, one tensor
        joined[:, at] = joined[:, earlier]
    return joined


def _join_scalars(some: Sequence[Parts]) -> dict[tuple[str, int], Column]:
    """Return the numbers of steps in a row, a column each."""
    taken: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
    for step, _, _, _, _, _, scalars, _ in some:
        for name, value, ordinal in scalars:
            column = taken.get((name, ordinal))
            if column is None:
                column = taken[name, ordinal] = ([], [])
            column[0].append(step)
            column[1].append(value)
    every = [parts[0] for parts in some]
    steps = np.array(every, np.int64)
    columns: dict[tuple[str, int], Column] = {
        # A script may log a name several times a step.
        key: (steps if at == every else np.array(at, np.int64), np.array(values, np.float64))
        for key, (at, values) in taken.items()
    }
    times = np.array([parts[2] for parts in some], np.float64).T
    for name, values in zip(_TIMES, times, strict=True):
        if values.any():
            present = values != 0
            columns[name, 0] = (steps if present.all() else steps[present], values[present])
    columns["clew.recorded", 0] = (steps, np.full(len(steps), float(some[0][1])))
    return columns


def _add_norms(values: NDArray[np.float64], rows: NDArray[np.intp], norms: list[float]) -> float:
    """Return the norm of several gradients together, from theirs; an empty one has none."""
    total = math.hypot(*norms)
    if math.isfinite(total):
        return total
    present = values[rows[values[rows, _COUNT] > 0], _L2]
    return math.sqrt(float(np.square(present).sum()))
