"""``clew.dump``: values in flight as numbered files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import clew
from clew.errors import UsageError


def _files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_each_call_has_a_number_and_the_value_goes_on(tmp_path):
    for step in range(3):
        x = torch.full((2, 3), float(step), requires_grad=True)
        assert clew.dump(x, tmp_path / "x.npy") is x
    assert _files(tmp_path) == ["x.000000.npy", "x.000001.npy", "x.000002.npy"]
    np.testing.assert_array_equal(np.load(tmp_path / "x.000002.npy"), np.full((2, 3), 2, np.float32))


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "x.000000.npy").write_text("older")
    clew.dump(torch.ones(2), tmp_path / "x")
    assert (tmp_path / "x.000000.npy").read_text() == "older"
    assert np.load(tmp_path / "x.000001.npy").tolist() == [1, 1]


def test_calls_are_chosen_as_in_print(tmp_path):
    for step in range(10):
        clew.dump(torch.tensor(step), tmp_path / "x", every=2, first_n=2, when=lambda t: t > 2)
    assert [int(np.load(tmp_path / name)) for name in _files(tmp_path)] == [4, 6]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64])
def test_any_type_is_saved(tmp_path, dtype):
    clew.dump(torch.ones(3).to(dtype), tmp_path / "x")
    assert np.load(tmp_path / "x.000000.npy").tolist() == [1, 1, 1]


def test_views_keep_their_values(tmp_path):
    clew.dump(torch.tensor([1 + 2j]).conj(), tmp_path / "c")
    clew.dump(torch.arange(6).reshape(2, 3).t(), tmp_path / "t")
    assert np.load(tmp_path / "c.000000.npy").tolist() == [1 - 2j]
    assert np.load(tmp_path / "t.000000.npy").tolist() == [[0, 3], [1, 4], [2, 5]]


def test_wrong_counts_and_values_without_elements_are_errors(tmp_path):
    with pytest.raises(UsageError, match=r"clew\.dump cannot count"):
        clew.dump(torch.ones(1), tmp_path / "x", every=0)
    with pytest.raises(UsageError, match="no values"):
        clew.dump(torch.ones(1, device="meta"), tmp_path / "x")
