"""The numbers of a difference: by hand, against the slow twin, and joined over blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clew.compare import metric
from clew.compare.checkpoint_measure import PAIR_TYPES
from clew.compare.tolerance import (
    DIFFERENT,
    ROUNDING,
    SAME,
    is_accepted_by_referee,
    judge,
    loosest,
    tolerance_of,
)

_pair = pytest.importorskip("clew.compare._pair")


def test_numbers_that_can_be_checked_by_hand():
    a = np.array([3.0, 4.0, 0.0, -1.0])
    b = np.array([3.0, 4.5, 0.0, -2.0])
    found = metric.compare(a, b)
    assert (found.count, found.different, found.nonfinite) == (4, 2, 0)
    assert (found.max_abs, found.max_abs_at, found.max_rel) == (1.0, 3, 1.0)
    assert found.relative_l2 == pytest.approx(math.sqrt(1.25) / math.sqrt(26))
    assert found.cosine == pytest.approx((9 + 18 + 2) / math.sqrt(26) / math.sqrt(33.25))
    assert (found.greater, found.less, found.bias) == (1, 1, 0.0)
    assert (found.share_within_1e3, found.share_within_5e3) == (0.5, 0.5)
    assert (found.a_abs_max, found.b_abs_max) == (4.0, 4.5)


def test_equal_nans_and_infinities_are_equal():
    a = np.array([np.nan, np.inf, -np.inf, 1.0, np.nan, 2.0])
    b = np.array([np.nan, np.inf, np.inf, 1.0, 0.0, np.nan])
    found = metric.compare(a, b)
    assert (found.different, found.nonfinite) == (3, 3)
    assert (found.max_abs, found.relative_l2, found.cosine) == (0.0, 0.0, 1.0)
    assert metric.compare(a, a).is_same


def test_noise_around_zero_is_no_huge_relative_error():
    rng = np.random.default_rng(0)
    a = rng.standard_normal(1000).astype(np.float32)
    a[0] = 0.0
    b = a.copy()
    b[0] = 1e-9
    found = metric.compare(a, b)
    assert found.max_rel < 1e-3
    assert found.share_within_1e3 == 1.0
    # The same tensors a million times smaller are judged the same.
    tiny = metric.compare(a * np.float32(1e-6), b * np.float32(1e-6))
    assert tiny.max_rel == pytest.approx(found.max_rel, rel=1e-3)


def test_bias_tells_noise_from_drift():
    rng = np.random.default_rng(0)
    a = rng.standard_normal(10_000)
    assert metric.compare(a, a + 1e-6 * rng.standard_normal(10_000)).bias < 0.05
    assert metric.compare(a, a + 1e-6).bias > 0.99


def test_zero_empty_and_unequal_shapes():
    zero = np.zeros(3)
    assert metric.compare(zero, zero).cosine == 1.0
    assert metric.compare(zero, np.ones(3)).cosine == 0.0
    assert metric.compare(zero, np.ones(3)).relative_l2 == math.inf
    assert metric.compare(zero[:0], zero[:0]).is_same
    with pytest.raises(ValueError, match="cannot be compared element by element"):
        metric.compare(zero, zero[:2])


def test_integers_are_equal_only_when_they_are():
    big = np.array([2**53, 5])
    assert metric.compare(big, big).is_same
    assert metric.compare(big, big + np.array([1, 0])).different == 1


def test_complex_numbers_are_their_parts():
    a = np.array([1 + 2j])
    assert metric.compare(a, a + 1j).max_abs == 1.0
    assert metric.compare(a, a).count == 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ulps_count_representable_numbers(dtype):
    one = np.array([1.0, -1.0, 0.0, 0.0], dtype)
    after = np.nextafter(one, dtype(2))
    assert metric.ulp_distance(one, after).tolist() == [1, 1, 1, 1]
    assert metric.ulp_distance(np.array([-0.0], dtype), np.array([0.0], dtype)).tolist() == [0]
    smallest = np.nextafter(dtype(0), dtype(1))
    assert metric.ulp_distance(np.array([-smallest]), np.array([smallest])).tolist() == [2]


def run_compiled(a, b, dtype: str, floor: float):
    sums = np.empty(len(metric.SUM_NAMES))
    _pair.measure(
        PAIR_TYPES.index(dtype), a.ctypes.data, b.ctypes.data, len(a), floor, True, sums.ctypes.data
    )
    return sums


def widen(raw, dtype: str):
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32) if dtype == "float16" else raw


COUNTS = metric.SUM_NAMES.index("error_squares")


def assert_close(fast, slow, dtype):
    """Counts and ULPs equal; sums within the rounding of float32 sums."""
    for index, name in enumerate(metric.SUM_NAMES):
        x, y = fast[index], slow[index]
        if name in ("within_1e3", "within_5e3"):
            # The product of tolerance and size is rounded differently: elements on the edge may go either way.
            assert abs(x - y) <= 1 + 1e-3 * slow[0], name
        elif index < COUNTS or name in ("max_ulp", "a_abs_max", "b_abs_max"):
            assert x == y, name
        elif name != "max_abs_at":
            scale = math.sqrt(slow[10]) * math.sqrt(slow[11]) if name == "products" else abs(y)
            assert x == pytest.approx(y, rel=1e-5, abs=1e-5 * scale + 1e-300), name


SPECIALS = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-40, 3e38, -3e38, 1.0, 65504.0, 6e-8, 1e-20]


@pytest.mark.parametrize("dtype", PAIR_TYPES)
@pytest.mark.parametrize("count", [0, 1, 15, 16, 511, 512, 513, 5000])
@pytest.mark.parametrize("kind", ["noise", "equal", "special", "tiny", "huge", "opposite"])
def test_the_compiled_sums_equal_their_slow_twin(dtype, count, kind):
    rng = np.random.default_rng(count)
    a = rng.standard_normal(count)
    b = a + 1e-3 * rng.standard_normal(count) * (rng.random(count) < 0.7)
    if kind == "equal":
        b = a.copy()
    elif kind == "special":
        chosen = rng.random(count) < 0.05
        a[chosen] = rng.choice(SPECIALS, chosen.sum())
        chosen = rng.random(count) < 0.05
        b[chosen] = rng.choice(SPECIALS, chosen.sum())
    elif kind in ("tiny", "huge"):
        a, b = (x * (1e-30 if kind == "tiny" else 1e25) for x in (a, b))
    elif kind == "opposite":
        b = -a
    with np.errstate(all="ignore"):
        carrier = {"bfloat16": np.float32}.get(dtype) or np.dtype(dtype)
        x, y = a.astype(carrier), b.astype(carrier)
    if dtype == "bfloat16":
        x, y = ((each.view(np.uint32) >> 16).astype(np.uint16) for each in (x, y))
    floor = tolerance_of(dtype).small * (metric.abs_max(widen(x, dtype)) or 1.0)
    fast = run_compiled(x, y, dtype, floor)
    slow = metric.measure(widen(x, dtype), widen(y, dtype), floor=floor, bits=(x, y))
    assert_close(fast, slow, dtype)
    at = int(fast[metric.SUM_NAMES.index("max_abs_at")])
    if slow[metric.SUM_NAMES.index("finite")]:
        with np.errstate(all="ignore"):
            error = abs(float(widen(y, dtype)[at]) - float(widen(x, dtype)[at]))
        assert error == pytest.approx(slow[metric.SUM_NAMES.index("max_abs")], rel=1e-6)
    else:
        assert at == -1


def test_ulps_are_left_out_when_not_asked_for():
    a = np.arange(600, dtype=np.float32)
    sums = np.empty(len(metric.SUM_NAMES))
    _pair.measure(0, a.ctypes.data, a.ctypes.data, len(a), 1e-6, False, sums.ctypes.data)
    found = metric.describe(sums)
    assert (found.max_ulp, found.mean_ulp, found.ulp_share_over_32) == (None, None, None)
    assert metric.describe(metric.merge([sums, metric.measure(a, a, floor=1.0)])).max_ulp is None


def test_every_half_against_every_neighbour():
    raw = np.arange(2**16, dtype=np.uint16)
    other = np.roll(raw, 1)
    for dtype in ("float16", "bfloat16"):
        carrier = raw.view(np.float16) if dtype == "float16" else raw
        shifted = other.view(np.float16) if dtype == "float16" else other
        fast = run_compiled(carrier, shifted, dtype, 1e-3)
        with np.errstate(all="ignore"):
            slow = metric.measure(widen(carrier, dtype), widen(shifted, dtype), floor=1e-3, bits=(raw, other))
        assert_close(fast, slow, dtype)


floats = hnp.arrays(
    np.float32,
    st.integers(0, 200),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 1.0, -1.0]),
)


@settings(max_examples=60, deadline=None)
@given(floats, st.integers(1, 50), st.randoms(use_true_random=False))
def test_sums_of_blocks_join_to_the_sums_of_the_whole(a, size, chance):
    b = a.copy()
    for index in range(len(b)):
        if chance.random() < 0.3:
            b[index] = chance.choice([0.0, 2.5, np.float32(a[index]) + np.float32(1)])
    whole = metric.measure(a, b, floor=1e-6)
    parts = [metric.measure(a[i : i + size], b[i : i + size], floor=1e-6) for i in range(0, len(a), size)]
    joined = metric.merge(parts)
    np.testing.assert_allclose(joined, whole, rtol=1e-12)


def make_pair(error, *, dtype=np.float32, count=10_000):
    rng = np.random.default_rng(1)
    a = rng.standard_normal(count).astype(dtype)
    return a, (a * (1 + error * rng.standard_normal(count))).astype(dtype)


def test_verdicts_know_their_dtype():
    a, b = make_pair(1e-7)
    assert judge(metric.compare(a, a), "float32") == SAME
    assert judge(metric.compare(a, b), "float32") == ROUNDING
    a, b = make_pair(1e-3)
    assert judge(metric.compare(a, b), "float32") == DIFFERENT
    assert judge(metric.compare(a, b), "bfloat16") == ROUNDING
    scaled = metric.compare(a, a * np.float32(1.001))
    assert judge(scaled, "float32") == DIFFERENT


def test_one_wrong_element_among_many_is_no_rounding():
    a, _ = make_pair(0.0, count=1_000_000)
    b = a.copy()
    b[7] += 0.0005
    found = metric.compare(a, b)
    assert found.relative_l2 < tolerance_of("float32").relative
    assert judge(found, "float32") == DIFFERENT
    b[7] = np.nan
    assert judge(metric.compare(a, b), "float32") == DIFFERENT


def test_measured_noise_widens_the_tolerance():
    a, noisy = make_pair(1e-4)
    _, different = make_pair(1e-2)
    noise = metric.compare(a, noisy)
    assert judge(noise, "float32") == DIFFERENT
    assert judge(noise, "float32", noise=noise) == ROUNDING
    assert judge(metric.compare(a, different), "float32", noise=noise) == DIFFERENT


def test_integers_have_no_rounding_and_the_coarser_type_judges():
    found = metric.compare(np.arange(5), np.arange(5) + 1)
    assert judge(found, "int64") == DIFFERENT
    assert loosest("float32", "bfloat16") == "bfloat16"
    assert tolerance_of("complex64") == tolerance_of("float32")


def test_the_referee_accepts_what_is_as_near_to_the_truth():
    rng = np.random.default_rng(0)
    exact = rng.standard_normal(5000)
    reference = exact + 1e-6 * rng.standard_normal(5000)
    assert is_accepted_by_referee(exact + 1.5e-6 * rng.standard_normal(5000), reference, exact)
    assert not is_accepted_by_referee(exact + 4e-6 * rng.standard_normal(5000), reference, exact)
    assert is_accepted_by_referee(
        exact + 2.8e-6 * rng.standard_normal(5000), reference, exact, dtype="float16"
    )
