"""Rows that are the same in each step reach a part in the order, and as the values, that sorting them gives."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clew.store import arrange, part, tables
from clew.store.appender import Appender

FLOATS = [
    name
    for name, kind in zip(tables.STATS.schema.names, tables.STATS.schema.types, strict=True)
    if kind == pa.float32()
]


def make_flush(first, steps, sites, *, seed=0, mode=0, **others):
    """Return the columns of a flush in which each step has the same rows."""
    generator = np.random.default_rng(seed)
    rows = steps * len(sites)
    return {
        "step": np.repeat(np.arange(first, first + steps), len(sites)),
        "seq": np.tile(np.arange(len(sites), dtype=np.int32), steps),
        "site": np.tile(np.array(sites, np.int32), steps),
        "kind": np.tile((np.array(sites) % 4).astype(np.int8), steps),
        "ordinal": np.zeros(rows, np.int16),
        "mode": np.full(rows, mode, np.int8),
        "count": np.tile(np.array(sites, np.uint32) + 5, steps),
        "zero": generator.integers(0, 2**32, rows).astype(np.uint32),
        "negative": generator.integers(0, 9, rows).astype(np.uint32),
        **{name: generator.standard_normal(rows).astype(np.float32) for name in FLOATS},
        **others,
    }


def write_part(folder, flushes):
    """Seal flushes into one part, and return its rows and those of the tail."""
    table = Appender(folder, tables.STATS, part_rows=10**9)
    for columns in flushes:
        table.append(columns)
    [tail] = table.folder.iterdir()
    with pa.OSFile(str(tail)) as source:
        written = pa.concat_tables(
            [pa.Table.from_batches([batch]) for batch in pa.ipc.open_stream(source)]
        ).combine_chunks()
    table.rotate()
    table.seal_waiting()
    [sealed] = table.folder.iterdir()
    return written, pq.read_table(sealed), part.Part(tables.STATS, sealed)


def check(written, sealed, whole):
    keys = [(name, "ascending") for name in tables.STATS.sort_by]
    expected = written.take(pc.sort_indices(written, keys))
    for name in expected.column_names:
        assert sealed[name].combine_chunks() == expected[name].combine_chunks().cast(sealed[name].type), name
    assert sealed.schema.types == tables.STATS.schema.types
    assert np.array_equal(whole.steps, np.unique(written["step"].to_numpy()))
    index = part.read_index(whole.series)
    assert np.array_equal(np.repeat(index[:, 0], index[:, 2]), sealed["site"].to_numpy())
    assert np.array_equal(np.repeat(index[:, 1], index[:, 2]), sealed["kind"].to_numpy())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.lists(st.integers(0, 99), min_size=1, max_size=40, unique=True),
    st.booleans(),
    st.sampled_from([16, 100, arrange.TURNED_ROWS]),
)
def test_a_part_has_the_rows_of_its_tail_sorted(tmp_path_factory, heights, sites, changes_mode, turned_rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrange, "TURNED_ROWS", turned_rows)
        first, flushes = 0, []
        for index, height in enumerate(heights):
            mode = index % 2 if changes_mode else 1
            flushes.append(make_flush(first, height, sites, seed=index, mode=mode))
            first += height
        check(*write_part(tmp_path_factory.mktemp("part"), flushes))


def test_what_differs_in_one_step_only_is_no_repetition(tmp_path):
    flushes = [make_flush(0, 9, [4, 2, 7], seed=1), make_flush(9, 9, [4, 2, 7], seed=2)]
    flushes[0]["count"][10] += 1
    flushes[1]["mode"][4] = 1
    written, sealed, whole = write_part(tmp_path, flushes)
    check(written, sealed, whole)
    assert sealed["mode"].to_numpy().sum() == 1


def test_hashes_that_some_rows_lack_keep_their_places(tmp_path):
    hashes = np.arange(12, dtype=np.uint64)
    check(*write_part(tmp_path, [make_flush(0, 4, [4, 2, 7], hash=hashes)]))


def test_a_step_whose_rows_came_in_two_flushes_is_sealed(tmp_path):
    whole = make_flush(0, 4, [4, 2, 7])
    halves = [{name: column[span] for name, column in whole.items()} for span in (slice(0, 8), slice(8, 12))]
    check(*write_part(tmp_path, halves))


def test_a_piece_lies_where_the_one_before_it_lay():
    columns = make_flush(0, 8, list(range(20)))
    table = pa.table({name: pa.array(column) for name, column in columns.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrange, "TURNED_ROWS", 80)
        arrangement = arrange.find_arrangement(tables.STATS, table)
        assert isinstance(arrangement, arrange.Rectangle)
        places = [piece["zero"].buffers()[1].address for piece in arrangement.pieces(table)]
    assert len(places) == 2
    assert len(set(places)) == 1
