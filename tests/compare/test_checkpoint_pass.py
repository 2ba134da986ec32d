"""Two tensors in files, measured in one pass: the same numbers as from arrays in memory, whatever the files do."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from clew.compare import checkpoint_measure, metric
from clew.compare.checkpoint import diff_checkpoints
from clew.compare.checkpoint_measure import is_one_pass, measure_pair
from clew.errors import CheckpointBroken
from clew.store.checkpoint import read_checkpoint
from clew.store.checkpoint_bytes import FileBytes
from clew.store.checkpoint_dtype import ELEMENT_TYPES, widen
from clew.store.checkpoint_tensor import StoredTensor
from clew.store.tensors import write_tensors

pytestmark = pytest.mark.skipif(
    not hasattr(checkpoint_measure._pair, "measure_files"), reason="the compiled loops are not built"
)


def store(path, values, dtype, *, offset=0):
    """Write numbers in a type, after as many bytes of something else, and return the tensor."""
    element = ELEMENT_TYPES[dtype]
    if dtype == "bfloat16":
        raw = (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        raw = np.asarray(values).astype(element.carrier)
    path.write_bytes(b"\x7f" * offset + raw.tobytes())
    return StoredTensor("weight", element, (len(values),), FileBytes(path, offset, raw.nbytes))


def by_numpy(a, b):
    """The same numbers, slowly; with the floor that the first elements give."""
    x, y = (np.asarray(widen(each.load(), each.element), np.float64) for each in (a, b))
    head = np.abs(x[: 1 << 16])
    scale = head[np.isfinite(head)].max(initial=0.0) or 1.0
    floor = checkpoint_measure.tolerance_of(a.dtype).small * scale
    return metric.describe(metric.measure_numbers(x, y, floor=floor))


def make_values(kind, count):
    rng = np.random.default_rng(7)
    values = rng.standard_normal(count)
    if kind == "odd":
        values[::97] = np.nan
        values[5] = np.inf
        values[11::301] *= 1e-42
    return values


@pytest.mark.parametrize("kind", ["plain", "odd"])
@pytest.mark.parametrize(
    "dtypes",
    [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")],
    ids="-".join,
)
def test_one_pass_gives_the_numbers_of_numpy(tmp_path, dtypes, kind):
    # Longer than a window, from places in the files that begin no page.
    count = (5 << 20) // 4 + 13
    values = make_values(kind, count)
    others = values.copy()
    others[count // 3 :] += 1e-3
    a = store(tmp_path / "a", values, dtypes[0], offset=48)
    b = store(tmp_path / "b", others, dtypes[1], offset=4096 + 8)
    assert is_one_pass(a, b)
    found, expected = metric.describe(measure_pair(a, b)), by_numpy(a, b)
    for name in ("count", "different", "nonfinite", "greater", "less", "max_abs_at"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("max_abs", "max_rel", "relative_l2", "cosine", "a_abs_max", "b_l2", "share_within_1e3"):
        assert math.isclose(getattr(found, name), getattr(expected, name), rel_tol=2e-5), name


def test_equal_files_are_equal_and_close_ones_are_counted_in_ulps(tmp_path):
    values = make_values("plain", 300_000).astype(np.float32)
    a = store(tmp_path / "a", values, "float32")
    assert metric.describe(measure_pair(a, store(tmp_path / "b", values, "float32"))).is_same
    next_ones = np.nextafter(values, np.float32(np.inf), dtype=np.float32)
    found = metric.describe(measure_pair(a, store(tmp_path / "c", next_ones, "float32")))
    assert (found.max_ulp, found.mean_ulp, found.different) == (1.0, 1.0, len(values))


def test_a_file_that_is_cut_while_it_is_compared_is_an_error_and_not_the_end(tmp_path):
    values = make_values("plain", 3 << 20)
    a, b = (store(tmp_path / name, values, "float32") for name in "ab")
    with (tmp_path / "b").open("r+b") as file:
        file.truncate(5 << 20)
    with pytest.raises(CheckpointBroken, match="ends before the data") as caught:
        measure_pair(a, b)
    assert caught.value.where == str(tmp_path / "b")
    assert not metric.describe(measure_pair(a, a)).different


def test_a_place_between_two_elements_goes_the_other_way(tmp_path):
    a = store(tmp_path / "a", [1.0, 2.0, 3.0], "float32", offset=3)
    assert not is_one_pass(a, a)
    b = replace(a, source=FileBytes(tmp_path / "a", 3, 12))
    assert metric.describe(measure_pair(a, b)).is_same


def test_parts_of_a_large_tensor_that_are_equal_count_beside_those_that_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_measure, "PIECE_BYTES", 1 << 12)
    numbers = np.arange(1, 5000)
    for dtype in (np.float32, np.int64):
        first, second = numbers.astype(dtype), numbers.astype(dtype)
        second[-1] += 1
        for name, each in (("a", first), ("b", second)):
            write_tensors(tmp_path / f"{name}.safetensors", {"x": each})
        found = diff_checkpoints(*(read_checkpoint(tmp_path / f"{name}.safetensors") for name in "ab"))
        (change,) = found.changed
        assert change.difference.different == 1
        assert math.isclose(change.difference.a_l2, math.sqrt(float((numbers**2).sum())), rel_tol=1e-6)
