"""The reference itself, against numbers worked out by hand and against numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew.model.schema import HIST_BINS, STAT_INDEX, STAT_NAMES
from clew.stats import reference, spec

NAN, INF = np.nan, np.inf


def row_of(array, dtype=np.float32):
    return dict(zip(STAT_NAMES, reference.summarise(np.array(array, dtype)), strict=True))


def test_a_row_worked_out_by_hand():
    row = row_of([3.0, -4.0, 0.0, -0.0, NAN, INF, -INF, -INF])
    assert [row[name] for name in STAT_NAMES[:7]] == [8, 1, 1, 2, 2, 3, 2]
    assert row["min"] == -4 and row["max"] == 3 and row["abs_max"] == 4
    assert row["mean"] == -0.25 and row["abs_mean"] == 1.75 and row["l2"] == 5
    assert row["std"] == pytest.approx(np.std([3, -4, 0, 0]))


@pytest.mark.parametrize("array", [[], [NAN, NAN], [INF, -INF, NAN]])
def test_without_finite_elements_the_values_are_nan(array):
    row = reference.summarise(np.array(array, np.float32))
    assert row[0] == len(array)
    assert np.isnan(row[7:]).all()


def test_complex_numbers_are_measured_as_their_parts():
    row = row_of([3 + 4j, 0 - 1j], np.complex64)
    assert row["count"] == 4 and row["zero"] == 1 and row["min"] == -1 and row["l2"] == pytest.approx(26**0.5)


def test_bool_and_integers_are_numbers():
    assert row_of([True, False, True], bool)["mean"] == pytest.approx(2 / 3)
    assert row_of([-128, 127], np.int8)["min"] == -128
    assert row_of([2**40], np.int64)["max"] == 2.0**40


def test_bins_follow_sign_and_exponent():
    hist = reference.histogram(np.array([1.0, 1.5, 2.0, -2.0, 0.0, NAN, INF, 2.0**-40, 2.0**40, -(2.0**-40)]))
    filled = {int(i): int(hist[i]) for i in np.flatnonzero(hist)}
    assert filled == {33: 2, 34: 1, 64 + 34: 1, 0: 1, 63: 1, 64: 1}


def test_a_large_array_is_sampled_once_in_eight_without_favouring_positions():
    positions = reference.sampled_positions(128 * 4096)
    assert len(positions) == 16 * 4096
    assert len(set(positions.tolist())) == len(positions)
    per_offset = np.bincount(positions % 128, minlength=128)
    assert per_offset.min() > 0.95 * per_offset.mean() and per_offset.max() < 1.05 * per_offset.mean()
    assert all(positions[16 * g] % 128 == spec.sample_offset(g) for g in range(50))


@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans())
def test_merging_parts_gives_the_row_of_the_whole(seed, parts, with_bad):
    generator = np.random.default_rng(seed)
    whole = generator.standard_normal(500) * 10.0 ** generator.integers(-10, 10) + generator.integers(-5, 5)
    if with_bad:
        whole[generator.integers(0, 500, 60)] = generator.choice([NAN, INF, -INF, 0.0], 60)
    pieces = np.split(whole, np.sort(generator.integers(0, 500, parts)))
    rows = [reference.summarise(piece) for piece in pieces]
    expected = reference.summarise(whole)
    for order in (rows, rows[::-1], [reference.merge(rows[:2]), reference.merge(rows[2:])]):
        np.testing.assert_allclose(
            reference.merge(order), expected, rtol=1e-9, atol=1e-12 * abs(expected[12])
        )
    hists = [reference.histogram(piece) for piece in pieces]
    np.testing.assert_array_equal(reference.merge_histograms(hists), reference.histogram(whole))


def test_merging_nothing_is_an_empty_row():
    assert reference.merge([])[0] == 0 and np.isnan(reference.merge([])[7:]).all()


def test_a_histogram_that_no_longer_fits_stays_at_the_limit():
    full = np.full(HIST_BINS, 2**32 - 2, np.uint32)
    assert (reference.merge_histograms([full, full]) == 2**32 - 1).all()


@given(st.integers(0, 2**32), st.sampled_from(["normal", "positive", "sparse", "constant"]))
def test_quantiles_are_within_a_factor_of_two(seed, kind):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(3000) * 10.0 ** generator.integers(-6, 6)
    x = {"normal": x, "positive": np.abs(x), "sparse": np.where(x > 0, x, 0), "constant": np.full(9, -3.0)}[
        kind
    ]
    row, hist = reference.summarise(x), reference.histogram(x)
    estimates = [reference.quantile(hist, row, q) for q in np.linspace(0, 1, 21)]
    assert estimates == sorted(estimates)
    assert estimates[0] >= x.min() and estimates[-1] <= x.max()
    for q, estimate in zip(
        (0.1, 0.25, 0.75, 0.9), (estimates[2], estimates[5], estimates[15], estimates[18]), strict=True
    ):
        low, high = np.quantile(x, [max(0, q - 0.01), min(1, q + 0.01)])
        near = sorted([low / 2, low * 2, high / 2, high * 2])
        assert near[0] <= estimate <= near[-1]


def test_a_quantile_of_nothing_is_nan():
    assert np.isnan(reference.quantile(np.zeros(HIST_BINS, np.uint32), reference.summarise(np.empty(0)), 0.5))


def test_rows_follow_the_schema():
    assert STAT_INDEX["l2"] == reference.L2 and STAT_INDEX["std"] == reference.STD
