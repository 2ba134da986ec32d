"""The compiled ways of the store give what their slow twins give."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clew.model.schema import COUNT_STATS, STAT_INDEX, STAT_NAMES
from clew.stats.built import BUILT
from clew.store import arrange, checksum, narrow

pytestmark = pytest.mark.skipif(BUILT is None, reason="the kernel was not built")

NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True, width=64),
    st.sampled_from([0.0, -0.0, 1e-46, -1e-46, 1e-40, -1e-40, 1e39, -1e39, 3.5e38, 1.0, -2.5]),
)
COUNTS = st.one_of(st.just(0), st.integers(0, 1000), st.integers(0, 2**40))


@st.composite
def pieces_of_rows(draw):
    counts = [STAT_INDEX[name] for name in COUNT_STATS]
    pieces = []
    for length in draw(st.lists(st.integers(0, 70), min_size=1, max_size=4)):
        rows = np.ones((length, len(STAT_NAMES)))
        rows[:, counts] = draw(st.sampled_from([0, 3, 2**32 - 1, 2**32]))
        for _ in range(min(length, 5)):
            row = draw(st.integers(0, length - 1))
            rows[row] = draw(st.lists(NUMBERS, min_size=len(STAT_NAMES), max_size=len(STAT_NAMES)))
            rows[row, counts] = draw(st.lists(COUNTS, min_size=len(counts), max_size=len(counts)))
        pieces.append(rows)
    return pieces


@settings(max_examples=150, deadline=None)
@given(pieces_of_rows())
def test_rows_become_the_same_columns(pieces):
    quick, slow = narrow.turn(pieces), narrow.turn_slowly(pieces)
    assert quick.keys() == slow.keys()
    for name, column in slow.items():
        if column is None:
            assert quick[name] is None
            continue
        assert quick[name].dtype == column.dtype, name
        assert np.array_equal(quick[name], column, equal_nan=column.dtype.kind == "f"), name
        is_number = ~np.isnan(column)
        assert np.array_equal(np.signbit(quick[name][is_number]), np.signbit(column[is_number])), name


def test_rows_as_a_recording_has_them_go_the_quick_way():
    rows = np.frombuffer(bytes(8 * 3 * len(STAT_NAMES))).reshape(3, -1)
    assert not rows.flags.writeable
    assert narrow._is_plain(rows)


def test_rows_that_do_not_lie_one_after_another_are_turned_as_well():
    rows = np.random.default_rng(0).uniform(0, 9, (40, 2 * len(STAT_NAMES)))[::2, ::2]
    quick, slow = narrow.turn([rows]), narrow.turn_slowly([rows])
    assert all(np.array_equal(quick[name], slow[name]) for name in slow)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 400), st.integers(0, 20), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_the_checksum_is_that_of_zlib(size, start, before, seed):
    data = np.random.default_rng(seed).integers(0, 256, size + start, np.uint8).tobytes()
    expected = zlib.crc32(data[start:], before)
    address = np.frombuffer(data, np.uint8).ctypes.data + start
    assert BUILT.crc32(address, size, before) in (expected, None)
    assert checksum.crc32(memoryview(data)[start:], before) == expected


def test_the_checksum_of_much_is_that_of_zlib():
    data = np.random.default_rng(0).integers(0, 256, 3_000_001, np.uint8).tobytes()
    for size in (checksum._LARGE - 1, checksum._LARGE, checksum._LARGE + 63, len(data)):
        assert checksum.crc32(data[:size], 7) == zlib.crc32(data[:size], 7)
    assert checksum.crc32(data[:-1] + b"x") != checksum.crc32(data)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    st.integers(1, 50),
    st.sampled_from([np.uint8, np.int16, np.uint32, np.float32, np.int64]),
    st.data(),
)
def test_rectangles_are_turned_alike(heights, width, dtype, data):
    generator = np.random.default_rng(sum(heights) * width)
    rectangles = [generator.integers(0, 120, (height, width)).astype(dtype) for height in heights]
    first = data.draw(st.integers(0, width - 1))
    wanted = slice(first, data.draw(st.integers(first + 1, width)))
    quick, slow = np.zeros((2, wanted.stop - first, sum(heights)), dtype)
    arrange.turn(rectangles, wanted, quick)
    arrange.turn_slowly(rectangles, wanted, slow)
    assert np.array_equal(quick, slow)
    assert np.array_equal(slow, np.concatenate(rectangles)[:, wanted].T)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any), st.integers(1, 50))
def test_counts_become_wider_while_they_are_turned(heights, width):
    generator = np.random.default_rng(sum(heights) * width)
    rectangles = [generator.integers(0, 2**32, (height, width), np.uint32) for height in heights]
    turned = np.zeros((width, sum(heights)), np.int64)
    arrange.turn(rectangles, slice(0, width), turned)
    assert np.array_equal(turned, np.concatenate(rectangles).T)
