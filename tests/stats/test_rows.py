"""The step buffer as capture uses it."""

import numpy as np
import pytest
import torch
from measuring import BEST, WAYS, as_array, assert_row, measured_by

from clew.errors import UnsupportedTensor
from clew.model.schema import HIST_BINS, STAT_NAMES
from clew.stats import reference, spec
from clew.stats.rows import Rows


@pytest.fixture(params=WAYS)
def way(request):
    with measured_by(request.param):
        yield request.param


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return [torch.randn(n) * n for n in (1, 10, 1000, 5000)]


def test_a_row_measured_without_hash_or_histogram_has_zeros_there(way, tensors):
    rows = Rows(hashes=True, hists=True)
    rows.measure(tensors[2], 0, hash=True, hist=True)
    rows.measure(tensors[2], 1)
    values, hashes, hists = rows.take(2)
    assert (values[0] == values[1]).all()
    assert hashes[0] and not hashes[1]
    assert hists[0].sum() == 1000 and not hists[1].any()


def test_tables_that_were_not_asked_for_are_not_there(way, tensors):
    rows = Rows()
    rows.measure(tensors[0], 0, hash=True, hist=True)
    values, hashes, hists = rows.take(1)
    assert values.shape == (1, len(STAT_NAMES)) and hashes is None and hists is None


def test_taken_arrays_belong_to_the_receiver_and_the_table_starts_again(way, tensors):
    rows = Rows(hashes=True, hists=True)
    rows.measure(tensors[1], 0, hash=True, hist=True)
    first = rows.take(1)
    kept = [part.copy() for part in first]
    rows.measure(tensors[2], 0, hash=True, hist=True)
    rows.settle()
    for part, copy in zip(first, kept, strict=True):
        np.testing.assert_array_equal(part, copy)
    rows.take(1)
    assert np.isnan(rows.values[0]).all() and not rows.hashes[0] and not rows.hists[0].any()


def test_the_table_grows_and_keeps_its_rows(way, tensors):
    rows = Rows(hashes=True, hists=True, capacity=1)
    for row in range(20):
        rows.measure(tensors[row % 4], row, hash=True, hist=True)
    values, hashes, hists = rows.take(20)
    for row in range(20):
        array = as_array(tensors[row % 4])
        assert_row(values[row], reference.summarise(array), narrow=True)
        assert hashes[row] == reference.fingerprint(array)
        assert hists.shape == (20, HIST_BINS)


def test_many_equals_one_by_one(way, tensors):
    rows = Rows(hashes=True, hists=True)
    mixed = [*tensors, tensors[3].view(50, 100).t(), torch.arange(3), tensors[2].bool()]
    assert rows.measure_many(mixed, 2, hash=True, hist=True) == []
    for position, tensor in enumerate(mixed):
        rows.measure(tensor, 20 + position, hash=True, hist=True)
    values, hashes, hists = rows.take(30)
    for table in (values, hashes, hists):
        np.testing.assert_array_equal(table[2 : 2 + len(mixed)], table[20 : 20 + len(mixed)])


def test_many_reports_what_it_cannot_measure_and_measures_the_rest(way, tensors):
    rows = Rows(hashes=True)
    rows.values[:] = 5.0
    failures = rows.measure_many([tensors[0], torch.empty(3, device="meta"), tensors[1]], 0, hash=True)
    assert [position for position, _ in failures] == [1]
    assert "meta" in failures[0][1].what
    values, _, _ = rows.take(3)
    assert values[0, 0] == 1 and np.isnan(values[1]).all() and values[2, 0] == 10


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32], ids=str
)
def test_updates_are_differences_and_the_old_values_follow(way, dtype):
    torch.manual_seed(0)
    new = [(torch.randn(n) * 100).to(dtype) for n in (0, 1, 17, 6000)] + [torch.randn(60, 50).to(dtype).t()]
    old = [(torch.randn_like(t.double()) * 100).to(dtype) for t in new]
    kind = torch.float32 if dtype.is_floating_point and dtype.itemsize <= 4 else torch.float64
    changes = [(a.to(kind) - b.to(kind)).numpy() for a, b in zip(new, old, strict=True)]
    before = [t.clone() for t in new]
    rows = Rows(hashes=True, hists=True)
    assert rows.measure_updates(new, old, first_row=3, hash=True, hist=True) == []
    values, hashes, hists = rows.take(8)
    for position, change in enumerate(changes):
        assert_row(values[3 + position], reference.summarise(change), narrow=kind is torch.float32)
        assert hashes[3 + position] == reference.fingerprint(change)
        np.testing.assert_array_equal(hists[3 + position], reference.histogram(change))
        assert torch.equal(new[position], before[position]) and torch.equal(old[position], before[position])


def test_a_second_update_is_measured_from_the_first(way):
    new, old = torch.zeros(5000), torch.zeros(5000)
    rows = Rows()
    for step in range(3):
        new += 0.5
        rows.measure_updates([new], [old], first_row=step)
    values, _, _ = rows.take(3)
    assert values[:, 9].tolist() == [0.5, 0.5, 0.5] and values[:, 10].tolist() == [0.0, 0.0, 0.0]


def test_an_update_of_another_shape_is_refused(way):
    failures = Rows().measure_updates([torch.zeros(3)], [torch.zeros(4)], first_row=0)
    assert "shape changed from (4,) to (3,)" in failures[0][1].what


def test_as_many_old_tensors_as_new_ones():
    with measured_by(BEST), pytest.raises(ValueError, match="as many old"):
        Rows().measure_updates([torch.zeros(3)], [], first_row=0)


def test_merging_rows_is_measuring_the_whole(way):
    torch.manual_seed(0)
    parts = [torch.randn(n) + n for n in (0, 5, 300, 1000)] + [torch.full((4,), float("nan")), torch.randn(7)]
    rows = Rows(hashes=True, hists=True)
    rows.measure(parts[0], 0, hash=True, hist=True)
    chained = reference.fingerprint(as_array(parts[0]))
    for part in parts[1:]:
        rows.measure(
            part, 1, hash=True, hist=True
        )  # the same spare row each time, also while nothing has settled
        rows.merge_into(0, 1)
        chained = spec.chain(chained, reference.fingerprint(as_array(part)))
    values, hashes, hists = rows.take(2)
    whole = as_array(torch.cat(parts))
    np.testing.assert_allclose(values[0], reference.summarise(whole), rtol=1e-5)
    np.testing.assert_array_equal(hists[0], reference.histogram(whole))
    assert hashes[0] == chained


def test_settling_nothing_is_nothing(way):
    rows = Rows()
    rows.settle()
    rows.settle()
    assert rows.take(0)[0].shape == (0, len(STAT_NAMES))


def test_an_unknown_object_is_refused(way):
    with pytest.raises(UnsupportedTensor, match="list is not a tensor"):
        Rows().measure([1.0], 0)
