"""Every way to measure a tensor against the numpy reference: dtypes, values, layouts."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from measuring import FLOAT8, FLOATS, INTEGERS, LAYOUTS, WAYS, as_array, assert_row, check, measure, numbers

from clew.stats import reference, torch_path


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_numbers_in_any_layout(dtype, data):
    flat = data.draw(numbers(dtype))
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    check(LAYOUTS[layout](flat))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_with_everything_in_it(layout):
    torch.manual_seed(0)
    x = torch.randn(9000)
    x[::7], x[5::100], x[6::100], x[3::111] = 0.0, float("nan"), float("inf"), -float("inf")
    check(LAYOUTS[layout](x))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_8_bit_float(way, dtype):
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).repeat(20)
    row, hashed, hist = measure(every, way)
    expected = reference.summarise(as_array(every))
    assert_row(row, expected, narrow=True)
    np.testing.assert_array_equal(hist, reference.histogram(as_array(every)))
    assert hashed == measure(every, "torch")[1]
    one_nan = torch.where(every.float().isnan(), torch.tensor(float("nan")), every.float()).to(dtype)
    assert hashed == measure(one_nan, way)[1]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_wide_unsigned_integers(dtype):
    check(torch.arange(300).to(dtype))


@pytest.mark.parametrize("way", WAYS)
def test_every_half_converts_exactly(way):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        tensor = every.view(dtype)
        tensor = tensor[tensor.abs() < 1e15]  # the sums of all of them are dominated by a few
        check(tensor, way)
    bits = torch.arange(0, 0x7C00, dtype=torch.int16)
    row = measure(bits.view(torch.float16), way)[0]
    assert row[7:9].tolist() == [0.0, 65504.0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mean", [1.0, 1e3, 1e6, -3e7])
def test_the_deviation_survives_a_large_mean(way, mean):
    torch.manual_seed(0)
    x = (torch.randn(70_000, dtype=torch.float64) * abs(mean) * 1e-4 + mean).float()
    row, expected = measure(x, way)[0], reference.summarise(x.numpy())
    np.testing.assert_allclose(row[7:], expected[7:], rtol=2e-6)


def test_blocks_with_different_means_join():
    torch.manual_seed(0)
    levels = torch.tensor([0.0, 1e4, -5.0, 1e-6, 3.0, 3.0, 1e8, 0.0]).repeat_interleave(1024)
    check(levels + torch.randn(8192) * levels.abs() * 1e-3)
    check(levels)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e-20, 1e-17, 1e17, 1e20, 1e30, 3e37])
def test_squares_beyond_float32_keep_the_norm_right(way, scale):
    torch.manual_seed(0)
    x = (torch.randn(5000, dtype=torch.float64) * scale).float()
    row, expected = measure(x, way)[0], reference.summarise(x.numpy())
    np.testing.assert_allclose(row[10:], expected[10:], rtol=2e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [0.1, -7e-30, 1e30, 16777217.0, 1e-45])
def test_equal_elements_have_no_deviation(way, value):
    row = measure(torch.full((5000,), value), way)[0]
    assert row[7] == row[8] == np.float32(value)
    np.testing.assert_allclose(row[10], 0, atol=abs(value) * 1e-7)
    np.testing.assert_allclose(row[9], np.float32(value), rtol=1e-12)


@pytest.mark.parametrize("at", [0, 1, 777, 1023, 1024, 4999])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_anywhere_is_counted_and_left_out(at, bad):
    torch.manual_seed(0)
    x = torch.randn(5000)
    x[at] = bad
    check(x)


@pytest.mark.parametrize("block", range(5))
def test_one_strange_block_among_others_is_told_apart(block):
    torch.manual_seed(0)
    for value in (float("nan"), 1e-30, 1e30, 1e5, 0.0):
        x = torch.randn(5 * 1024 + 100)
        x[block * 1024 : (block + 1) * 1024] = value
        check(x)
        check(x * 1e-22)


def test_large_tensors_cross_every_boundary():
    torch.manual_seed(0)
    for size in (32 * 1024, 32 * 1024 + 1, 300_007):
        check(torch.randn(size))
    check((torch.randn(140_000) * 1e3).long())


def test_the_torch_path_joins_its_pieces():
    x = torch.arange(torch_path.PIECE + 300, dtype=torch.int32)
    row, hashed, hist = measure(x, "torch")
    expected, same_hash, same_hist = measure(x)
    assert_row(row, expected, narrow=False)
    assert hashed == same_hash and (hist == same_hist).all()


def test_every_instruction_set_gives_the_same_bits():
    torch.manual_seed(0)
    x = torch.randn(100_003) * 3 + 1
    x[5000:5010] = float("nan")
    x[40_000:60_000] *= 1e-25
    for tensor in (x, x.double(), x.half(), x.view(-1, 1)[::3], (x[:4000] * 10).to(torch.int16)):
        first, *others = [measure(tensor, way) for way in WAYS if way != "torch"]
        for other in others:
            assert first[0].tobytes() == other[0].tobytes()
            assert first[1] == other[1]
            assert first[2].tobytes() == other[2].tobytes()


@pytest.mark.parametrize("way", WAYS)
def test_subnormals_count_also_where_torch_flushes_them(way):
    subnormal = torch.from_numpy(np.full(100, 1e-40, np.float32))
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        row = measure(subnormal, way)[0]
        flushed = (torch.tensor(1e-40) * 1.0).item()
    finally:
        torch.set_flush_denormal(False)
    assert flushed == 0.0, "the setting of the user is still there"
    if way != "torch":
        assert row[4] == 0 and row[8] == subnormal[0].item()


SIGNS = {
    "all positive": lambda x: abs(x) + 0.01,
    "all negative": lambda x: -abs(x) - 0.01,
    "none negative": lambda x: x.clip(0),
    "none positive": lambda x: x.clip(None, 0),
    "negative zeros": lambda x: np.where(x > 0, x, np.float32(-0.0)),
    "positive zeros": lambda x: np.where(x < 0, x, np.float32(0.0)),
    "both zeros": lambda x: np.where(x > 1, x, np.where(x > 0, np.float32(-0.0), np.float32(0.0))),
    "both signs": lambda x: x,
}


@pytest.mark.parametrize("hashes", [False, True])
@pytest.mark.parametrize("length", [3, 16, 17, 64, 4096, 8192 + 112])
@pytest.mark.parametrize("signs", SIGNS)
def test_extremes_are_told_whatever_the_signs(signs, length, hashes):
    drawn = np.random.default_rng(length).standard_normal(length).astype(np.float32)
    x = SIGNS[signs](drawn)
    told = {way: measure(torch.from_numpy(x), way, hashes=hashes)[0] for way in WAYS}
    for row in told.values():
        assert (row[7], row[8]) == (x.min(), x.max())
    assert len({row[7:9].tobytes() for row in told.values()}) == 1, "a zero has the same sign in every way"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [64, 80, 129, 4096 + 112])
def test_signs_are_counted_whatever_the_bits(way, length):
    magnitudes = [
        0,
        1,
        5,
        0x80,
        0xFF,
        0x100,
        0x7FFF,
        0x8000,
        0xFFFF,
        0x10000,
        0x7FFFFF,
        0x3F800000,
        0x3F8000FF,
    ]
    bits = np.array([magnitude | sign for magnitude in magnitudes for sign in (0, 1 << 31)], np.uint32)
    # Beside them numbers of usual size, with which the sums are trusted and so are the counts that go with them.
    drawn = np.random.default_rng(length).choice(bits, length).view(np.float32)
    drawn[::2] = np.where(drawn[::2] >= 0, 1.5, -2.5)
    row = measure(torch.from_numpy(drawn), way)[0]
    assert row[4:7].tolist() == [(drawn == 0).sum(), (drawn < 0).sum(), (drawn > 0).sum()]
