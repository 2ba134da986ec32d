"""Threads and processes: no bit of a result depends on them, and a forked child can measure."""

import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from measuring import WAYS, measured_by

from clew.errors import UsageError
from clew.stats import compiled, reference
from clew.stats.rows import Rows

pytestmark = pytest.mark.skipif(compiled.BUILT is None, reason="no kernel was built")

LARGE = 2_500_003


@pytest.fixture(scope="module")
def large():
    x = torch.randn(LARGE, generator=torch.Generator().manual_seed(0)) * 2 + 1
    x[1_000_000:1_000_100] = float("nan")
    return x


def measure_all(tensors, threads):
    rows = Rows(hashes=True, hists=True)
    rows.threads = threads
    rows.measure_many(tensors, 0, hash=True, hist=True)
    rows.measure(tensors[0], len(tensors), hash=True, hist=True)
    return [part.tobytes() for part in rows.take(len(tensors) + 1)]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "torch"])
def test_the_number_of_threads_changes_no_bit(way, large):
    tensors = [
        large,
        large[:1000],
        large[:0],
        large[:2_000_000].view(1000, 2000).t(),
        large.half(),
        large.int(),
    ]
    with measured_by(way):
        one, *more = [measure_all(tensors, threads) for threads in (1, 2, 3, 5)]
    for other in more:
        assert other == one


def test_updates_with_threads_change_no_bit(large):
    results = []
    for threads in (1, 2, 4):
        old = [large.roll(1), torch.zeros(3)]
        rows = Rows(hashes=True, hists=True)
        rows.threads = threads
        rows.measure_updates([large, torch.ones(3)], old, first_row=0, hash=True, hist=True)
        results.append([part.tobytes() for part in rows.take(2)])
        assert old[0].view(torch.int32).equal(large.view(torch.int32)) and old[1].tolist() == [1.0, 1.0, 1.0]
    assert results[0] == results[1] == results[2]


def test_no_thread_stays_behind(large):
    before = threading.active_count()
    measure_all([large], 2)
    assert threading.active_count() == before


def test_a_forked_child_measures_what_its_parent_did(large):
    parent = measure_all([large], 2)
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        child = os.fork()
    if child == 0:
        try:
            os.write(write_end, b"same" if measure_all([large], 2) == parent else b"else")
        finally:
            os._exit(0)
    os.close(write_end)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read_end, 4) == b"same"
    os.close(read_end)


def test_several_python_threads_measure_at_once(large):
    expected = measure_all([large], 1)
    results = []
    workers = [threading.Thread(target=lambda: results.append(measure_all([large], 1))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [expected] * 4


SCRIPT = """
import sys
sys.modules["clew.stats._kernel"] = None
import torch
from clew.stats import rows
table = rows.Rows(hashes=True, hists=True)
table.measure(torch.arange(5000.0), 0, hash=True, hist=True)
values, hashes, hists = table.take(1)
print(rows.KERNEL, values[0, 9], hashes[0], hists.sum())
"""


def test_without_a_kernel_torch_gives_the_same():
    array = np.arange(5000, dtype=np.float32)
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    counted = reference.histogram(array).sum()
    assert result.stdout.strip() == f"None 2499.5 {reference.fingerprint(array)} {counted}"


def test_the_environment_chooses_the_kernel(monkeypatch):
    monkeypatch.setenv("CLEW_KERNEL", "torch")
    assert compiled.load_kernel() is None
    monkeypatch.setenv("CLEW_KERNEL", WAYS[0])
    assert compiled.load_kernel() is compiled.BUILT
    monkeypatch.delenv("CLEW_KERNEL")
    assert compiled.load_kernel() is compiled.BUILT


def test_a_wrong_kernel_is_named_with_the_right_ones(monkeypatch):
    monkeypatch.setenv("CLEW_KERNEL", "avx")
    with pytest.raises(UsageError, match="CLEW_KERNEL is 'avx'") as caught:
        compiled.load_kernel()
    assert caught.value.next_step == "did you mean 'avx2'?"
    monkeypatch.setattr(compiled, "CHOICES", ("neon",))
    monkeypatch.setenv("CLEW_KERNEL", "neon")
    with pytest.raises(UsageError, match="which this processor cannot run") as caught:
        compiled.load_kernel()
    assert "plain" in caught.value.next_step


def test_definitions_and_reference_need_no_torch():
    code = "import sys, clew.stats.spec, clew.stats.reference; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
