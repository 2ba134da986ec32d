"""Steps that are alike leave as one stretch, and say what their records would."""

import copy
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clew
from clew.api.progress import Progress
from clew.capture.assemble import KIND_SHIFT, SITE_SHIFT, Layout
from clew.capture.clock import PHASES
from clew.capture.draft import Draft, find_kin, join
from clew.capture.outlet import Outlet
from clew.doctor.case import Case
from clew.doctor.engine import Looks
from clew.model.record import Batch, Fault, RunInfo, Scalar, Site, StepRecord, Stretch
from clew.model.schema import HIST_BINS, KIND_INDEX, STAT_NAMES
from clew.model.sink import Tee
from clew.stats.rows import CutRows
from clew.store.columns import columns_of, divide_large, record_bytes
from clew.store.summary import Summary
from clew.store.writer import Writer

NOTHING = (Layout([], []), None, False)
STATS, BINS = len(STAT_NAMES), HIST_BINS
COPIES = [(3, 1)]
"""A row that was not measured: its tensor is that of an earlier one."""
LAYOUT = Layout(
    [
        site << SITE_SHIFT | KIND_INDEX[kind] << KIND_SHIFT
        for site, kind in enumerate(["output", "output", "grad_output", "output", "param", "grad", "grad"])
    ],
    COPIES,
)


def parts(step, *, due=False, batches=(), more=()):
    """Return what a step leaves: a loss, a rate, now and then the memory, and times of which some are 0."""
    rng = random.Random(step)
    scalars = [Scalar("loss", rng.random(), 0), Scalar("lr", 0.1, 0), Scalar("lr", 0.2, 1), *more]
    if step % 5 == 0:
        scalars.append(Scalar("memory.process", float(step), 0))
    times = [0.0 if name == "data" and step % 3 else rng.random() for name in PHASES]
    times[-1] = 0.0
    return (step, due, times, *NOTHING, scalars, list(batches))


def recorded(step, *, layout=LAYOUT, hashes=True, hists=True, bad=None):
    """Return what a step leaves that was recorded in full; ``bad``: what to put into which row and column."""
    rng, rows = np.random.default_rng(step), len(layout.keys)
    values = rng.random((rows, STATS)) * 100
    values[:, 1:4] = 0
    for row, _ in layout.copies:
        values[row] = np.nan
    if bad is not None:
        values[bad[0], bad[1]] = bad[2]
    cut = CutRows(
        bytearray(values.tobytes()),
        bytearray(rng.integers(0, 1 << 60, rows, np.uint64).tobytes()) if hashes else None,
        bytearray(rng.integers(0, 50, (rows, BINS), np.uint32).tobytes()) if hists else None,
    )
    return (*parts(step, due=True)[:3], layout, cut, False, *parts(step)[6:])


def finish(some):
    """Return the records of steps; a draft takes its numbers over."""
    return [
        Draft(*each[:4], copy.deepcopy(each[4]), each[5], list(each[6]), each[7]).finish(()) for each in some
    ]


class Keeper:
    """A sink that keeps what it gets."""

    def __init__(self, *, takes_stretches=True):
        self.takes_stretches = takes_stretches
        self.got = []

    def add_sites(self, sites):
        pass

    def put(self, record):
        self.got.append(record)

    put_stretch = put

    def update_info(self, info):
        pass

    def close(self, state, exit_code=None):
        pass


class Plain:
    """A sink that knows nothing of stretches."""

    def __init__(self):
        self.got = []

    def add_sites(self, sites):
        pass

    def put(self, record):
        self.got.append(record)

    def update_info(self, info):
        pass

    def close(self, state, exit_code=None):
        pass


@pytest.fixture
def some():
    return [parts(step) for step in range(40, 73)]


def rows(columns):
    names = ("step", "name", "ordinal", "value")
    return sorted(zip(*(list(columns["scalars"][name]) for name in names), strict=True))


def test_a_stretch_has_the_numbers_of_its_records(some):
    stretch, records = join(some), finish(some)
    assert (stretch.first, stretch.last, stretch.steps) == (40, 72, 33)
    assert rows(columns_of([stretch])) == rows(columns_of(records))
    steps = columns_of([stretch])["scalars"]["step"]
    assert (np.diff(steps) >= 0).all()


NAMES = st.sampled_from(["loss", "lr", "log.loss", "log.time.forward", "mine"])
STEP = st.lists(st.tuples(NAMES, st.floats(-10, 10), st.integers(0, 2)), max_size=6)


@given(st.lists(STEP, min_size=2, max_size=12), st.integers(1, 11))
def test_whatever_a_script_logs_a_stretch_has_what_its_records_have(logged, cut):
    some = [
        (
            40 + at,
            False,
            [0.5, 0.0, at * 1.0, 0.0, 1.0, 2.0, 3.0],
            *NOTHING,
            [Scalar(*each) for each in step],
            [],
        )
        for at, step in enumerate(logged)
    ]
    mixed = [join(each) if len(each) > 1 else finish(each)[0] for each in (some[:cut], some[cut:]) if each]
    assert rows(columns_of(mixed)) == rows(columns_of(finish(some)))
    one, other = Case(), Case()
    for record in finish(some):
        one.add(record)
    for item in mixed:
        (other.add_stretch if isinstance(item, Stretch) else other.add)(item)
    assert one.scalars.keys() == other.scalars.keys()
    for name, series in one.scalars.items():
        assert series.steps.tolist() == other.scalars[name].steps.tolist()
        assert series.values.tolist() == other.scalars[name].values.tolist()
    summaries = Summary(), Summary()
    summaries[0].add(finish(some))
    summaries[1].add(mixed)
    assert summaries[0] == summaries[1] or has_losses_out_of_order(logged)


def has_losses_out_of_order(logged):
    """Return whether a script has logged losses of its own so that the last of a step is not that of the last pass."""
    found = [[ordinal for name, _, ordinal in step if name == "loss"] for step in logged]
    return any(ordinals != sorted(ordinals) for ordinals in found)


def test_a_table_takes_records_and_stretches_in_the_order_of_steps(some):
    mixed = [*finish(some[:3]), join(some[3:20]), *finish(some[20:21]), join(some[21:])]
    columns = columns_of(mixed)
    assert rows(columns) == rows(columns_of(finish(some)))
    assert (np.diff(columns["scalars"]["step"]) >= 0).all()


def test_a_summary_counts_both_alike(some):
    last = [Scalar("clew.partial", 1.0)]
    some.append(parts(73, more=last))
    one, other = Summary(), Summary()
    one.add(finish(some))
    other.add([join(some[:10]), *finish(some[10:12]), join(some[12:])])
    assert one == other
    assert (one.steps, one.first_step, one.last_step) == (33, 40, 73)


def test_a_case_and_its_looks_take_both_alike():
    every = [parts(step) for step in range(2600)]
    one, other = Case(), Case()
    one_looks, other_looks = Looks(), Looks()
    looked, looked_after = [], []
    for record in finish(every):
        one.add(record)
        if one_looks.is_due(one, record):
            looked.append(one.steps)
    for some in batched(every, 50):
        for piece in other_looks.cut(other, join(some)):
            other.add_stretch(piece)
            if other_looks.is_due_after(other, piece):
                looked_after.append(other.steps)
    assert (one.steps, one.step) == (other.steps, other.step)
    assert one.scalars.keys() == other.scalars.keys()
    for name, series in one.scalars.items():
        assert series.steps.tolist() == other.scalars[name].steps.tolist()
        assert series.values.tolist() == other.scalars[name].values.tolist()
    assert looked[-4:] == [1000, 1500, 2000, 2500]
    assert looked_after == looked


def batched(things, size):
    return [things[at : at + size] for at in range(0, len(things), size)]


def test_a_long_series_is_shortened_by_stretches_too():
    one, other = Case(), Case()
    every = [parts(step) for step in range(40_000)]
    for stretch in map(join, batched(every, 100)):
        one.add_stretch(stretch)
    for stretch in map(join, batched(every, 1000)):
        other.add_stretch(stretch)
    series, others = one.scalar("loss"), other.scalar("loss")
    assert len(series) < 20_000
    assert series.steps[:4096].tolist() == list(range(4096))
    assert series.steps[-4096:].tolist() == list(range(40_000 - 4096, 40_000))
    assert others.steps[-4096:].tolist() == series.steps[-4096:].tolist()


def test_a_loss_that_is_not_finite_is_an_alarm_in_a_stretch():
    case, looks = Case(), Looks()
    case.steps = 2001
    some = [parts(step) for step in range(2001, 2010)]
    some.append(parts(2010, more=[Scalar("loss", float("nan"), 1)]))
    stretch = join(some)
    case.add_stretch(stretch)
    assert looks.is_due_after(case, stretch)
    assert not looks.is_due_after(case, stretch)


def test_progress_takes_both_alike(some):
    class Recorder:
        last_loss = 0.5

    one, other = Progress(), Progress()
    for record in finish(some):
        one.take(Recorder, record)
    other.take(Recorder, join(some))
    shown, shown_other = one.shown(), other.shown()
    rate, other_rate = shown.pop("steps_per_second"), shown_other.pop("steps_per_second")
    assert shown == pytest.approx(shown_other)
    assert other_rate == pytest.approx(1 / np.mean([sum(each[2]) for each in some]))
    assert rate > 0


def test_only_steps_with_nothing_but_numbers_go_together(some):
    sink, told = Keeper(), []
    batch = Batch("x", (2,), "float32", -1)
    some[10] = parts(50, due=True)
    some[20] = parts(60, batches=[batch])
    some[22] = parts(62, due=True)
    Outlet(sink, lambda sender, record: told.append((sender, record))).give("me", some, ())
    assert [(type(each), getattr(each, "step", None) or each.steps) for each in sink.got] == [
        (Stretch, 10),
        (StepRecord, 50),
        (Stretch, 9),
        (StepRecord, 60),
        (StepRecord, 61),
        (StepRecord, 62),
        (Stretch, 10),
    ]
    assert told == [("me", record) for record in sink.got]
    assert find_kin(some[10]) != find_kin(some[10])


def test_faults_go_with_the_first_record(some):
    sink, fault = Keeper(), Fault(40, "somewhere", "something")
    Outlet(sink).give(None, some, (fault,))
    assert [record.faults for record in sink.got] == [(fault,), *[()] * (len(some) - 1)]


@pytest.mark.parametrize(
    "sink",
    [
        Plain(),
        Keeper(takes_stretches=False),
        Tee(Keeper(), Plain()),
        Tee(Keeper(), Keeper(takes_stretches=False)),
    ],
    ids=["plain", "unwilling", "beside a plain one", "beside an unwilling one"],
)
def test_who_wants_every_step_gets_every_step(sink, some):
    Outlet(sink).give(None, [(*each[:6], list(each[6]), each[7]) for each in some], ())
    for each in getattr(sink, "sinks", (sink,)):
        assert [record.step for record in each.got] == list(range(40, 73))


def test_a_run_of_stretches_reads_as_one_of_records(tmp_path, some):
    for name, items in (("one", finish(some)), ("other", [join(some[:20]), join(some[20:])])):
        writer = Writer(tmp_path / name, RunInfo(name=name))
        for item in items:
            (writer.put_stretch if isinstance(item, Stretch) else writer.put)(item)
            if item is items[0]:
                writer.flush()
        writer.close("complete", 0)
    one, other = (clew.open_run(tmp_path / name).scalars() for name in ("one", "other"))
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].steps.tolist() == other[name].steps.tolist()
        assert one[name].values.tolist() == other[name].values.tolist()


# ---------------------------------------------------------------- steps with rows


@pytest.fixture
def whole():
    return [recorded(step) for step in range(40, 73)]


def as_lists(columns):
    return {
        table: {name: _as_list(column) for name, column in sorted(found.items())}
        for table, found in columns.items()
    }


def _as_list(column):
    if isinstance(column, tuple):
        return [part.tolist() for part in column]
    return column.tolist() if isinstance(column, np.ndarray) else column


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("hists", [True, False])
def test_a_stretch_of_recorded_steps_has_the_rows_of_its_records(hashes, hists):
    some = [recorded(step, hashes=hashes, hists=hists) for step in range(9)]
    mixed = [join(some[:4]), *finish(some[4:6]), join(some[6:])]
    one, other = as_lists(columns_of(finish(some))), as_lists(columns_of(mixed))
    assert one["stats"] == other["stats"]
    assert one["stats"]["step"] == [step for step in range(9) for _ in LAYOUT.keys]
    scalars = rows(columns_of(mixed))
    assert scalars == rows(columns_of(finish(some)))
    assert sum(name == "grad_norm" for _, name, _, _ in scalars) == 9


def test_rows_of_no_steps_and_of_some_go_into_one_table(whole):
    thin = [parts(step) for step in range(73, 80)]
    mixed = [join(whole), join(thin)]
    assert as_lists(columns_of(mixed))["stats"] == as_lists(columns_of(finish(whole)))["stats"]
    assert rows(columns_of(mixed)) == rows(columns_of(finish([*whole, *thin])))


@given(st.integers(1, 32), st.booleans())
def test_a_stretch_is_its_two_parts(cut, has_rows):
    some = [(recorded if has_rows else parts)(step) for step in range(40, 73)]
    stretch = join(some)
    before, after = stretch.split(40 + cut)
    assert (before.first, before.last, after.first, after.last) == (40, 39 + cut, 40 + cut, 72)
    assert as_lists(columns_of([before, after])) == as_lists(columns_of([join(some[:cut]), join(some[cut:])]))
    assert as_lists(columns_of([before, after])) == as_lists(columns_of([stretch]))


@pytest.mark.parametrize("column", ["nan", "pos_inf", "neg_inf"])
@pytest.mark.parametrize("value", [1.0, np.nan], ids=["some", "not measured"])
def test_steps_with_something_bad_go_one_by_one(whole, column, value):
    whole[7] = recorded(47, bad=(4, STAT_NAMES.index(column), value))
    assert join(whole) is None
    sink = Keeper()
    Outlet(sink).give(None, whole, ())
    assert [record.step for record in sink.got] == list(range(40, 73))
    assert [record.step for record in sink.got if record.has_bad] == [47]


def test_only_steps_of_the_same_rows_go_together(whole):
    other = Layout([site << SITE_SHIFT for site in range(3)], [])
    many = Layout([site << SITE_SHIFT for site in range(300)], [])
    repeats = recorded(50)
    whole[10] = (*repeats[:5], True, *repeats[6:])
    whole[20:22] = [recorded(60, layout=other), recorded(61, layout=other)]
    whole[30:32] = [recorded(70, layout=many), recorded(71, layout=many)]
    whole[32] = parts(72)
    sink = Keeper()
    Outlet(sink).give(None, whole, ())
    assert [(type(each), getattr(each, "step", None) or each.steps) for each in sink.got] == [
        (Stretch, 10),
        (StepRecord, 50),
        (Stretch, 9),
        (Stretch, 2),
        (Stretch, 8),
        (StepRecord, 70),
        (StepRecord, 71),
        (StepRecord, 72),
    ]


def test_a_case_takes_recorded_steps_both_ways_alike():
    every = [recorded(step) for step in range(300)]
    one, other = Case(), Case()
    for record in finish(every):
        one.add(record)
    for some in batched(every, 45):
        other.add_stretch(join(some))
    assert (one.recorded, one.kinds, one.has_hashes) == (other.recorded, other.kinds, other.has_hashes)
    assert one.bad == other.bad == []
    for kind in ("output", "grad", "param"):
        for which in ({"first": 20}, {"last": 20}, {}):
            found, expected = other.rows(kind, **which), one.rows(kind, **which)
            assert len(expected) > 0
            assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_summary_and_progress_count_recorded_steps_both_ways_alike(whole):
    class Recorder:
        last_loss = 0.5

    whole += [parts(step) for step in range(73, 76)]
    mixed = [join(whole[:10]), *finish(whole[10:12]), join(whole[12:33]), join(whole[33:])]
    for with_rows in (True, False):
        one, other = Summary(), Summary()
        one.add(finish(whole), with_rows=with_rows)
        other.add(mixed, with_rows=with_rows)
        assert one == other
        assert (one.steps, one.full) == (36, 33 * with_rows)
    progress = Progress()
    for item in mixed:
        progress.take(Recorder, item)
    assert progress.measured == 33


def test_a_run_of_recorded_stretches_reads_as_one_of_records(tmp_path, whole):
    tables = []
    for name, items in (("one", finish(whole)), ("other", [join(whole[:20]), join(whole[20:])])):
        writer = Writer(tmp_path / name, RunInfo(name=name))
        writer.add_sites(Site(number, f"layer{number}", "module") for number in range(len(LAYOUT.keys)))
        for item in items:
            (writer.put_stretch if isinstance(item, Stretch) else writer.put)(item)
        writer.close("complete", 0)
        tables.append(clew.open_run(tmp_path / name).stats())
    one, other = tables
    assert len(one) == len(whole) * len(LAYOUT.keys)
    assert one.columns == other.columns
    for name in one.columns:
        assert np.array_equal(one[name], other[name], equal_nan=one[name].dtype.kind == "f"), name


def test_long_stretches_are_cut_where_little_is_allowed(whole):
    pieces = divide_large([join(whole), *finish([parts(73)])], 8000)
    assert all(record_bytes(piece) <= 8000 or getattr(piece, "steps", 1) == 1 for piece in pieces)
    assert len(pieces) > 4
    assert as_lists(columns_of(pieces)) == as_lists(columns_of([join(whole), *finish([parts(73)])]))
