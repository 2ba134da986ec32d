"""What the statistics tests share: every way to measure a tensor, tensors of every kind, and how close is close."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from hypothesis import strategies as st

from clew.model.schema import STAT_INDEX
from clew.stats import compiled, reference, rows, spec

WAYS = (*((*compiled.BUILT.variants(), "asked") if compiled.BUILT else ()), "torch")
"""The kernel's variants, the best of them where tensors are asked for want of an exchange table, torch operations."""
BEST = WAYS[-3] if len(WAYS) > 2 else "torch"

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@contextlib.contextmanager
def measured_by(way: str):
    """Measure by one variant of the kernel, or by torch operations, inside the block."""
    kernel = rows.KERNEL
    try:
        if way == "torch":
            rows.KERNEL = None
        elif way == "asked":
            compiled.tell_of_torch(compiled.BUILT, has_exchange=False)
        else:
            compiled.BUILT.select(way)
        yield
    finally:
        rows.KERNEL = kernel
        if compiled.BUILT:
            compiled.BUILT.select("")
            if way == "asked":
                compiled.tell_of_torch(compiled.BUILT)


def measure(tensor, way=BEST, *, threads=0, hashes=True):
    """Return row, hash and histogram of one tensor; or the row alone, by loops that have nothing else to do."""
    with measured_by(way):
        table = rows.Rows(hashes=hashes, hists=hashes, capacity=1)
        table.threads = threads
        table.measure(tensor, 0, hash=hashes, hist=hashes)
        values, hashed, hists = table.take(1)
    return (values[0], int(hashed[0]), hists[0]) if hashes else (values[0], None, None)


def as_array(tensor):
    """Return the numbers of a tensor in an array that numpy can hold."""
    tensor = tensor.detach()
    wide = tensor.to(torch.float32) if tensor.dtype in (*FLOAT8, torch.bfloat16) else tensor
    return wide.numpy()


def assert_row(actual, expected, *, narrow: bool):
    """Compare a row with the reference: counts and extremes exactly, sums within the promise of ``spec``."""
    sums, spread = (spec.SUM_TOLERANCE, spec.SPREAD_TOLERANCE) if narrow else (1e-12, 1e-7)
    names = {name: (actual[i], expected[i]) for name, i in STAT_INDEX.items()}
    for name in (
        "count",
        "nan",
        "pos_inf",
        "neg_inf",
        "zero",
        "negative",
        "positive",
        "min",
        "max",
        "abs_max",
    ):
        np.testing.assert_equal(*names[name], err_msg=name)
    scale = names["abs_mean"][1]
    assert np.isnan(scale) == np.isnan(names["mean"][0])
    if np.isnan(scale):
        assert np.isnan(actual[7:]).all()
        return
    for name in ("abs_mean", "l2"):
        np.testing.assert_allclose(*names[name], rtol=sums, err_msg=name)
    np.testing.assert_allclose(*names["mean"], rtol=0, atol=sums * scale, err_msg="mean")
    tiny = 1e-14 * names["abs_max"][1]
    np.testing.assert_allclose(*names["std"], rtol=spread, atol=tiny, err_msg="std")


SPECIALS = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1e-45, -1e-40, 1e-38, 3e38, -3e38, 1e-7, 6e4)


@st.composite
def numbers(draw, dtype):
    """Draw a flat array of up to a few blocks: some scale, some offset, some special values, in one dtype."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from([0, 1, 2, 15, 16, 17, 60, 1000, 1024, 1030, 2048, 4096, 4097, 9000, 13_000]))
    if dtype in INTEGERS:
        limit = 2 if dtype is torch.bool else draw(st.sampled_from([2, 100, 2**31 - 1]))
        return torch.from_numpy(generator.integers(-limit, limit, size)).to(dtype)
    scale = 10.0 ** draw(st.sampled_from([-40, -30, -20, -8, -2, 0, 0, 0, 3, 20, 36]))
    offset = draw(st.sampled_from([0.0, 0.0, 1.0, 300.0, -1e5]))
    x = (generator.standard_normal(size) + offset) * scale
    for special in draw(st.lists(st.sampled_from(SPECIALS), max_size=4)):
        x[generator.random(size) < draw(st.sampled_from([0.001, 0.3, 1.0]))] = special
    with np.errstate(over="ignore"):
        return torch.from_numpy(x.astype(np.float64 if dtype is torch.float64 else np.float32)).to(dtype)


def _expand(x):
    return x[:40, None].expand(-1, 3)


def _overlap(x):
    return x.as_strided((x.numel() // 2, 2), (1, 1)) if x.numel() > 2 else x


LAYOUTS = {
    "contiguous": lambda x: x,
    "every other": lambda x: x[::2],
    "offset": lambda x: x[1:],
    "transposed": lambda x: x[: x.numel() // 8 * 8].view(8, -1).t(),
    "permuted": lambda x: x[: x.numel() // 12 * 12].view(2, 3, 2, -1).permute(2, 0, 3, 1),
    "sliced": lambda x: x[: x.numel() // 10 * 10].view(-1, 10)[:, 2:7],
    "channels last": lambda x: (
        x[: x.numel() // 24 * 24].view(2, 3, 4, -1).contiguous(memory_format=torch.channels_last)
    ),
    "flipped": lambda x: x.flip(0),
    "expanded": _expand,
    "stretched": lambda x: x[:1].expand(5000) if x.numel() else x,
    "overlapping": _overlap,
    "scalar": lambda x: x[0] if x.numel() else x,
}


def check(tensor, *ways):
    """Assert that row, hash and histogram of a tensor equal the reference's, by each way."""
    array = as_array(tensor)
    expected = reference.summarise(array), reference.fingerprint(array), reference.histogram(array)
    for way in ways or WAYS:
        row, hashed, hist = measure(tensor, way)
        assert_row(row, expected[0], narrow=tensor.dtype in {torch.float32, torch.float16, torch.bfloat16})
        np.testing.assert_array_equal(hist, expected[2], err_msg=way)
        assert hashed == expected[1] or tensor.dtype is torch.bfloat16, way
