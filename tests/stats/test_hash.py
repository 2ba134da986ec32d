"""The laws of the hash: what must be equal, what must differ."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring import BEST, LAYOUTS, WAYS, measure

from clew.stats import reference, spec
from clew.stats.rows import Rows


def hash_of(tensor, way=BEST):
    return measure(tensor, way)[1]


@pytest.fixture
def sample():
    return torch.randn(3000, generator=torch.Generator().manual_seed(0))


def test_the_hash_never_changes():
    """Recorded hashes are compared across versions: these numbers are part of the format."""
    assert reference.fingerprint(np.empty(0, np.float32)) == 0xF88DB399D47AAB91
    assert reference.fingerprint(np.arange(5000, dtype=np.float32)) == 0x8F0BEB35E463840F


@pytest.mark.parametrize("way", WAYS)
def test_layout_does_not_matter(sample, way):
    for make in LAYOUTS.values():
        tensor = make(sample)
        assert hash_of(tensor, way) == hash_of(tensor.contiguous(), way)


@pytest.mark.parametrize("way", WAYS)
def test_shape_does_not_matter_but_count_does(sample, way):
    assert hash_of(sample, way) == hash_of(sample.view(3, 1000), way)
    zeros = {hash_of(torch.zeros(n), way) for n in (0, 1, 2, 1023, 1024, 1025, 2048)}
    assert len(zeros) == 7


def test_width_matters():
    assert len({hash_of(torch.zeros(16, dtype=t)) for t in (torch.float32, torch.float64, torch.int8)}) == 3


@given(st.integers(0, 2999), st.integers(0, 31))
@settings(deadline=None)
def test_any_single_bit_matters(position, bit):
    bits = torch.arange(3000, dtype=torch.int32)
    changed = bits.clone()
    changed[position] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
    assert hash_of(bits) != hash_of(changed)


@given(st.integers(0, 2999), st.integers(0, 2999))
@settings(deadline=None)
def test_exchanging_two_elements_matters(first, second):
    x = torch.arange(3000.0)
    y = x.clone()
    y[first], y[second] = x[second], x[first]
    assert (hash_of(x) == hash_of(y)) == (first == second)


def test_order_and_sign_matter(sample):
    relatives = [
        sample,
        sample.flip(0),
        sample.roll(1),
        sample.roll(1024),
        -sample,
        sample.view(50, 60).t(),
        sample[torch.randperm(3000, generator=torch.Generator().manual_seed(1))],
        torch.cat([sample[1024:2048], sample[:1024], sample[2048:]]),
    ]
    assert len({hash_of(tensor) for tensor in relatives}) == len(relatives)


def test_both_zeros_differ():
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dtype", "nans"),
    [
        (torch.float32, np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF], np.uint32)),
        (torch.float64, np.array([0x7FF8 << 48, 0xFFF8 << 48, (0x7FF0 << 48) + 1], np.uint64)),
        (torch.float16, np.array([0x7E00, 0xFE00, 0x7C01, 0xFFFF], np.uint16)),
        (torch.bfloat16, np.array([0x7FC0, 0xFFC0, 0x7F81, 0xFFFF], np.uint16)),
    ],
)
def test_every_nan_is_the_same_nan(way, dtype, nans):
    tensors = []
    for nan in nans:
        bits = np.arange(5000).astype(nans.dtype)
        bits[4321] = nan
        tensors.append(torch.from_numpy(bits).view(dtype))
    assert len({hash_of(tensor, way) for tensor in tensors}) == 1
    assert len({hash_of(tensor[::2], way) for tensor in tensors}) == 1
    infinite = tensors[0].clone()
    infinite[4321] = float("inf")
    assert hash_of(infinite, way) != hash_of(tensors[0], way)


@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_what_counts(way):
    """Types without NaN hash like the integers with their bits, so the reference speaks for bfloat16 too."""
    x = torch.randn(3001, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert hash_of(x, way) == reference.fingerprint(x.view(torch.int16).numpy())


def test_hashes_do_not_collide_by_the_thousand():
    rows = Rows(hashes=True)
    rows.measure_many(torch.arange(20_000, dtype=torch.int32).split(1), 0, hash=True)
    assert len(set(rows.take(20_000)[1].tolist())) == 20_000


def test_chained_hashes_depend_on_order():
    assert spec.chain(1, 2) != spec.chain(2, 1)
    assert spec.chain(spec.chain(1, 2), 3) != spec.chain(1, spec.chain(2, 3))
