"""The compiled clock, tray and hook against their twins in Python."""

import gc
import math
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

import clew
from clew.capture import clock as clocks
from clew.capture.beat import Beat
from clew.capture.clock import CLEW, PHASES, StepClock
from clew.capture.torch import recorder as recorders
from clew.capture.torch.leaves import list_leaves
from clew.stats.rows import KERNEL

needs_kernel = pytest.mark.skipif(KERNEL is None, reason="no kernel was built, or it is switched off")


@needs_kernel
def test_both_clocks_add_up_to_the_time_that_passed():
    for made in (StepClock(), KERNEL.Clock(len(PHASES), CLEW)):
        assert made.phase == 0
        assert made.switch(3) == 0
        assert made.switch(CLEW) == 3
        made.charge(1.0)
        made.mark()
        made.switch(1)
        first = made.split()
        assert len(first) == len(PHASES)
        assert all(seconds >= 0 for seconds in first)
        made.charge(2.0)
        later = made.split()
        assert later[CLEW] >= 2.0
        assert later[1] < 0  # what was charged was taken from the phase that was going on
        made.restart()
        assert sum(made.split()) < 1.0


@needs_kernel
def test_a_clock_knows_its_phases_only():
    made = KERNEL.Clock(2, 1)
    with pytest.raises(IndexError):
        made.switch(2)
    with pytest.raises(ValueError, match="phases"):
        KERNEL.Clock(99, 0)


@needs_kernel
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_first_bad_tensor_is_found(bad):
    fine, spoiled, gone = torch.randn(50), torch.randn(7, 3), weakref.ref(torch.randn(2))
    spoiled[3, 1] = bad
    sparse, turned = torch.randn(3).to_sparse(), spoiled.t()

    def find(*tensors, of_gradients=False):
        return KERNEL.find_bad([gone, *map(weakref.ref, tensors)], of_gradients)

    assert find(fine, fine) == -1
    assert find(fine, spoiled, spoiled) == 2
    assert find(turned) == 1
    assert find(fine, sparse) == -2
    fine.grad = fine.clone()
    assert find(spoiled, fine, of_gradients=True) == -1
    spoiled.grad = spoiled.clone()
    assert find(fine, spoiled, of_gradients=True) == 2


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_bad_numbers_are_found_anywhere_and_extreme_ones_pass(dtype, bad):
    info = torch.finfo(dtype)
    extremes = torch.tensor([info.max, info.min, info.tiny, -info.tiny, 5e-324, -0.0, 0.0], dtype=dtype)
    numbers = torch.cat([extremes, torch.randn(30, dtype=dtype)])
    assert KERNEL.find_bad([weakref.ref(numbers)], False) == -1
    for place in range(len(numbers)):
        spoiled = numbers.clone()
        spoiled[place] = bad
        assert KERNEL.find_bad([weakref.ref(spoiled)], False) == 0


@needs_kernel
def test_a_number_is_read_where_it_lies():
    assert KERNEL.read_number(torch.tensor(1.5, requires_grad=True)) == 1.5
    assert KERNEL.read_number(torch.tensor([[2.5]], dtype=torch.float64)) == 2.5
    assert math.isnan(KERNEL.read_number(torch.tensor(math.nan)))
    for other in (
        torch.tensor(3),
        torch.zeros(2),
        torch.tensor(1.0, dtype=torch.bfloat16),
        torch.tensor(1.0).to_sparse(),
    ):
        assert KERNEL.read_number(other) is None
    assert KERNEL.read_number(torch.empty((), device="meta")) is None


@needs_kernel
def test_what_a_value_holds_is_weighed_as_by_its_leaves():
    x, y = torch.randn(3, 4), torch.arange(5)
    x.add_(1)
    value = {"args": (x, [x.t(), None, "word", 2]), "kwargs": {"y": y}}
    leaves = list_leaves(value)
    assert KERNEL.weigh(value) == (
        [leaf._version for leaf in leaves],
        sum(leaf.numel() * leaf.element_size() for leaf in leaves),
    )
    with torch.inference_mode():
        assert KERNEL.weigh((torch.zeros(2),)) == ([0], 8)
    for other in (object(), (x, {1, 2}), torch.zeros(2).to_sparse(), torch.empty(2, device="meta"), [x] * 65):
        assert KERNEL.weigh(other) is None


@needs_kernel
def test_frames_are_listed_with_their_places():
    frame, expected = sys._getframe(), []
    found = [(0, 0, frame.f_code)] * 500
    KERNEL.list_frames(frame, found)
    KERNEL.list_frames(frame, found)
    while frame is not None:
        expected.append((id(frame), frame.f_code))
        frame = frame.f_back
    assert [(key, code) for key, _, code in found] == expected
    assert found[1][1] == sys._getframe(1).f_lasti


@needs_kernel
def test_a_copy_is_stale_when_the_tensor_has_changed_or_has_another_form():
    tensors = [torch.randn(2, 3) for _ in range(4)]
    copies = [tensor.clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    assert KERNEL.list_stale(tensors, copies, versions) == []
    tensors[1].zero_()
    tensors[2].data = tensors[2].data.double()
    tensors[3].data = torch.randn(3, 2)
    assert KERNEL.list_stale(tensors, copies, versions) == [1, 2, 3]
    assert KERNEL.list_stale(tensors[:1], [None], versions[:1]) == [0]


def _record(folder, monkeypatch, *, short):
    torch.manual_seed(3)
    shared = torch.nn.Linear(6, 6)
    model = torch.nn.Sequential(shared, torch.nn.ReLU(), torch.nn.Sequential(shared), torch.nn.GLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not short:
        monkeypatch.setattr(recorders.Recorder, "_make_tray", lambda _: None)
        monkeypatch.setattr(recorders, "make_clock", clocks.StepClock)
    with clew.watch(model, optimizer, out=str(folder), name="run", budget="off") as run:
        for step in range(4):
            optimizer.zero_grad()
            # Two calls in a step, of other shapes, and a tensor that comes in parts.
            halves = model(torch.randn(4 + step, 6)).chunk(3, dim=1)
            (halves[1].square().mean() + model(torch.randn(2, 6)).mean()).backward()
            optimizer.step()
    return clew.open_run(run.path)


@needs_kernel
def test_the_short_way_leaves_the_same_rows(tmp_path, monkeypatch):
    short = _record(tmp_path / "short", monkeypatch, short=True)
    slow = _record(tmp_path / "slow", monkeypatch, short=False)
    assert short.faults() == slow.faults() == []
    assert [(s.name, s.shape, s.order) for s in short.sites] == [
        (s.name, s.shape, s.order) for s in slow.sites
    ]
    ours, theirs = short.stats(), slow.stats()
    assert ours.columns == theirs.columns
    for column in ours.columns:
        np.testing.assert_array_equal(ours[column], theirs[column])
    assert {"output", "grad_output", "param", "grad", "update"} <= set(ours["kind"])


class _Owner(Beat):
    """What a tray asks of its recorder."""

    def __init__(self):
        self.keys, self.copies, self.faults = [], [], []
        self.asleep, self.due = False, True
        self.slow, self.described = [], []

    def measure_slowly(self, _tensor, site, tag):
        self.slow.append((site, tag))
        return -1

    def describe(self, site, tensor):
        self.described.append((site, tuple(tensor.shape)))

    def fault_at_gradient(self, error, key):
        self.faults.append((str(error), key))


def _make_hook(owner, keys):
    lock = KERNEL.Latch()
    tray = KERNEL.Tray(owner, [None] * 4, lock, KERNEL.Clock(len(PHASES), CLEW))
    return tray, KERNEL.Hook(tray, keys, 0.0), lock


@needs_kernel
def test_a_hook_sleeps_with_its_owner_and_leaves_what_is_not_memory_to_it():
    owner = _Owner()
    _, hook, _ = _make_hook(owner, [1 << 32 | 5])
    assert hook(None) is None
    owner.asleep = True
    hook(torch.randn(3))
    owner.asleep, owner.due = False, False
    hook(torch.randn(3))
    assert owner.slow == []
    owner.due = True
    hook(torch.randn(3))  # no room was given to it
    assert owner.slow == [(1, 5)]
    assert owner.keys == []


@needs_kernel
def test_a_fault_in_a_hook_is_told_and_an_interrupt_passes():
    owner = _Owner()
    _, hook, lock = _make_hook(owner, [7 << 32])

    def fail(*_):
        raise ValueError("broken")

    owner.measure_slowly = fail
    assert hook(torch.randn(3)) is None
    assert owner.faults == [("broken", 7 << 32)]

    def interrupt(*_):
        raise KeyboardInterrupt

    owner.measure_slowly = interrupt
    with pytest.raises(KeyboardInterrupt):
        hook(torch.randn(3))
    assert lock.acquire(blocking=False)  # it was given back
    lock.release()


@needs_kernel
def test_a_tray_and_its_owner_go_together():
    owner = _Owner()
    tray, hook, _ = _make_hook(owner, [0])
    owner.tray, owner.hook = tray, hook
    gone = weakref.ref(owner)
    del owner, tray, hook
    gc.collect()
    assert gone() is None


@needs_kernel
def test_a_latch_is_a_lock_that_its_holder_may_take_again():
    for lock in (KERNEL.Latch(), threading.RLock()):
        answers = []

        def ask(lock=lock, answers=answers, **how):
            answers.append(lock.acquire(**how))
            if answers[-1]:
                lock.release()

        def ask_elsewhere(ask=ask, **how):
            thread = threading.Thread(target=ask, kwargs=how)
            thread.start()
            thread.join()

        with lock:
            assert lock.acquire(blocking=False)
            ask_elsewhere(blocking=False)
            lock.release()
            ask_elsewhere(timeout=0.01)
        ask_elsewhere(timeout=5.0)
        assert answers == [False, False, True]
        with pytest.raises(RuntimeError):
            lock.release()


@needs_kernel
def test_a_latch_keeps_threads_from_each_other():
    lock, counts = KERNEL.Latch(), [0]

    def count():
        for _ in range(2000):
            with lock:
                seen = counts[0]
                sum(range(20))
                counts[0] = seen + 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [8000]
