"""Histograms survive being packed, whatever their counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clew.model.schema import HIST_BINS
from clew.store import histogram

COUNTS = st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1))
ROWS = st.lists(st.dictionaries(st.integers(0, HIST_BINS - 1), COUNTS, max_size=12), max_size=4)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_packing_gives_back_every_count(rows):
    counts = np.zeros((len(rows), HIST_BINS), np.uint32)
    for row, bins in zip(counts, rows, strict=True):
        for place, count in bins.items():
            row[place] = count
    offsets, data = histogram.pack(counts)
    assert np.array_equal(histogram.unpack(offsets, data), counts)
    slow_offsets, slow_data = histogram.pack_slowly(counts)
    assert np.array_equal(offsets, slow_offsets)
    assert bytes(data) == bytes(slow_data)


def test_rows_without_a_histogram_come_back_empty_between_others():
    counts = np.zeros((2, HIST_BINS), np.uint32)
    counts[0, 5], counts[1, 127] = 200, 2**32 - 1
    offsets, data = histogram.pack(counts)
    gap = np.array([0, 0, offsets[1], offsets[1], offsets[2]])
    restored = histogram.unpack(gap, data)
    assert restored[1, 5] == 200
    assert restored[3, 127] == 2**32 - 1
    assert restored.sum() == 200 + 2**32 - 1


def test_a_usual_histogram_takes_few_bytes():
    counts = np.zeros((1, HIST_BINS), np.uint32)
    counts[0, 20:32] = counts[0, 84:96] = 100
    _, data = histogram.pack(counts)
    assert len(data) == 16 + 2 * 24


def test_damaged_bytes_are_refused():
    counts = np.ones((1, HIST_BINS), np.uint32)
    offsets, data = histogram.pack(counts)
    with pytest.raises(ValueError, match="damaged"):
        histogram.unpack(np.array([0, offsets[1] - 1]), data[:-1])
