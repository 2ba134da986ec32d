"""Feeds a stored run to the doctor step by step, as it was fed while it went on."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.doctor.case import Case
from clew.doctor.engine import Doctor, Looks
from clew.doctor.watchpoint import Watcher, add_hits
from clew.model.record import Batch, Scalar, StepRecord
from clew.model.schema import KINDS, MODES, STAT_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from clew.doctor.rule import Rule
    from clew.model.finding import Diagnosis
    from clew.query import Run

_CHUNK_STEPS: Final = 256


def diagnose(
    run: Run,
    *,
    rules: Sequence[Rule] | None = None,
    watch: Iterable[str] = (),
) -> Diagnosis:
    """Return what the rules and watchpoints say about a stored run."""
    doctor = Doctor(rules)
    texts = list(watch)
    watchers = {rank: Watcher(texts) for rank in run.ranks} if texts else {}
    cases = [_open_case(run, rank) for rank in run.ranks]
    for case in cases:
        looks = Looks()
        looked = {note["step"] for note in run.notes("look", rank=case.rank)}
        for record in _feed(run, case):
            if watchers:
                watchers[case.rank].see(case, record, _histograms(run, case, record))
            # Live, looks are put off where they would cost too much: the same looks give the same answer.
            if record.step in looked if looked else looks.is_due(case, record):
                doctor.look(case)
        case.ended = run.state != "recording"
        case.died = run.state == "died"
    for case in cases:
        case.peers = tuple(cases) if len(cases) > 1 else ()
        doctor.look(case)
    return add_hits(doctor.diagnose(), watchers.values()) if watchers else doctor.diagnose()


def _histograms(run: Run, case: Case, record: StepRecord) -> Callable[[int], NDArray[Any] | None]:
    """Return a function from a row of a record to its histogram, read for all steps of a site at once."""

    def find(row: int) -> NDArray[Any] | None:
        site, kind = case.name(int(record.sites[row])), KINDS[int(record.kinds[row])]
        ordinal, mode = int(record.ordinals[row]), MODES[int(record.modes[row])]
        key = f"histograms {site} {kind} {ordinal} {mode}"
        known: dict[int, NDArray[Any]] | None = case.kept.get(key)
        if known is None:
            steps, counts = run.histograms(site, kind, rank=case.rank, ordinal=ordinal, mode=mode)
            known = case.kept[key] = dict(zip(steps.tolist(), counts, strict=True))
        return known.get(record.step)

    return find


def _open_case(run: Run, rank: int) -> Case:
    case = Case(rank=rank, info=run.info)
    case.add_sites(run.sites)
    case.verdicts = run.verdicts(rank=rank)
    return case


def _feed(run: Run, case: Case) -> Iterator[StepRecord]:
    """Add notes and records in the order of steps; a note of a step comes before its record, as it did live."""
    notes = iter(sorted(run.notes(rank=case.rank), key=lambda note: note["step"]))
    note = next(notes, None)
    for record in read_records(run, case.rank):
        while note is not None and note["step"] <= record.step:
            case.add_note(note)
            note = next(notes, None)
        case.add(record)
        yield record
    while note is not None:
        case.add_note(note)
        note = next(notes, None)


def read_records(run: Run, rank: int) -> Iterator[StepRecord]:
    """Yield the records of a rank in order of steps, without histograms."""
    scalars = _group_scalars(run, rank)
    batches = _group_batches(run, rank)
    steps = sorted({*scalars, *batches, *run.steps.tolist()})
    for start in range(0, len(steps), _CHUNK_STEPS):
        chunk = steps[start : start + _CHUNK_STEPS]
        tables = _read_rows(run, rank, slice(chunk[0], chunk[-1] + 1))
        for step in chunk:
            rows = tables.get(step, _NO_ROWS)
            if step in scalars or step in batches or len(rows["site"]):
                yield _make_record(step, rows, scalars.get(step, ()), batches.get(step, ()))


_NO_ROWS: Final[dict[str, Any]] = {
    "site": np.zeros(0, np.int32), "kind": np.zeros(0, np.int8), "ordinal": np.zeros(0, np.int16),
    "mode": np.zeros(0, np.int8), "values": np.zeros((0, len(STAT_NAMES))), "hash": None,
}  # fmt: skip


def _make_record(
    step: int, rows: dict[str, Any], scalars: Sequence[Scalar], batches: Sequence[Batch]
) -> StepRecord:
    return StepRecord(
        step=step,
        sites=rows["site"],
        kinds=rows["kind"],
        ordinals=rows["ordinal"],
        modes=rows["mode"],
        values=rows["values"],
        hashes=rows["hash"],
        scalars=tuple(scalars),
        batches=tuple(batches),
    )


def _read_rows(run: Run, rank: int, steps: slice) -> dict[int, dict[str, Any]]:
    table = run.stats(rank=rank, step=steps, columns=[*STAT_NAMES, "hash"])
    if not len(table):
        return {}
    columns: dict[str, NDArray[Any]] = {
        name: table.codes(name) for name in ("site", "kind", "ordinal", "mode", "hash")
    }
    columns["values"] = np.stack([table.codes(name).astype(np.float64) for name in STAT_NAMES], axis=1)
    at = table.codes("step")
    edges = np.flatnonzero(np.diff(at)) + 1
    bounds = [0, *edges.tolist(), len(at)]
    return {
        int(at[start]): {name: column[start:end] for name, column in columns.items()}
        for start, end in pairwise(bounds)
    }


def _group_scalars(run: Run, rank: int) -> dict[int, list[Scalar]]:
    found: dict[int, list[Scalar]] = {}
    for label, series in run.scalars(rank=rank).items():
        # The label already tells the second of a name from the first: it is what the case keeps them by.
        for step, value in series:
            found.setdefault(step, []).append(Scalar(label, value))
    return found


def _group_batches(run: Run, rank: int) -> dict[int, list[Batch]]:
    found: dict[int, list[Batch]] = {}
    for row in run.batches(rank=rank):
        batch = Batch(
            leaf=str(row["leaf"]),
            shape=tuple(row["shape"]),
            dtype=str(row["dtype"]),
            fingerprint=int(row["fingerprint"]),
            ordinal=int(row["ordinal"]),
            mode=0 if row["mode"] == "train" else 1,
            loader=str(row["loader"]),
            position=int(row["position"]),
            indices=tuple(row["indices"]),
        )
        found.setdefault(int(row["step"]), []).append(batch)
    return found
