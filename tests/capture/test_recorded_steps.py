"""Recorded steps of a usual loop pass without Python of clew, and leave what the general way leaves."""

import re
import threading
from types import GeneratorType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.capture.test_gates import frames_of_clew, recorder_of
from tests.capture.test_quiet_steps import count_general, go_generally
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import clew
from clew.capture.torch import gates
from clew.capture.torch.recorder import Recorder
from clew.capture.torch.snapshot_names import list_of_type, list_of_type_slowly
from clew.model.schema import HIST_BINS, STAT_NAMES
from clew.stats.rows import CutRows

STEPS, USUAL = 170, 110
"""By the second of these, nothing is new in a loop any more."""
BASIC = "output,grad_output,param,grad"

pytestmark = [
    pytest.mark.skipif(gates.KERNEL is None, reason="the kernel was not built"),
    pytest.mark.usefixtures("nothing_was_compiled"),
]


class Net(torch.nn.Module):
    """Layers with a state of their own and chance in them, and something that may happen between them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8)
        self.second, self.spare = torch.nn.Linear(8, 3), torch.nn.Linear(8, 3)
        self.drop, self.same = torch.nn.Dropout(0.2), torch.nn.Identity()
        self.between = lambda x: x

    def forward(self, x):
        x = self.between(self.drop(self.norm(self.first(x)).relu()))
        return self.same(self.second(x) + self.spare(x))


class Loop:
    """A training in which ``act`` may do something strange at any step."""

    def __init__(self, act):
        torch.manual_seed(4)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 30)
        self.losses, self.act, self.at, self.recorder = [], act, 0, None

    def lose(self, model=None):
        x = torch.randn(12, 6)
        return F.cross_entropy((model or self.model)(x), x.argmax(1) % 3)

    def step(self):
        self.optimizer.zero_grad()
        loss = self.lose()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def train(self):
        for self.at in range(STEPS):
            (self.act(self) or Loop.step)(self)
            self.schedule.step()

    def watch(self, folder, name="run", **settings):
        return clew.watch(
            self.model, self.optimizer, out=folder, name=name, status=False, budget="off", **settings
        )

    def record(self, folder, name, **settings):
        with self.watch(folder, name, **settings) as watch:
            self.recorder = recorder_of(watch)
            self.train()
            assert (self.recorder.nested, self.recorder.seeing, self.recorder.rooted) == (0, 0, 0)
            faults = self.recorder.guard.take()
        assert not faults, faults
        return clew.open_run(folder / name)


def plainly(_loop):
    pass


def evaluate(loop):
    if loop.at % 50 == 40:
        loop.model.eval()
        with torch.no_grad():
            loop.lose()
        loop.model.train()


def add_a_group(loop):
    if loop.at == USUAL + 10:
        loop.extra = torch.nn.Linear(3, 3)
        loop.optimizer.add_param_group({"params": loop.extra.parameters(), "lr": 0.01})
        loop.model.same = loop.extra


def leave_a_part_out(loop):
    """A parameter has no gradient for some steps, is frozen for others."""
    if loop.at == USUAL + 5:
        loop.model.spare.weight.requires_grad_(False)
    loop.model.second.bias.requires_grad_(loop.at % 20 != 3)


def step_with_closures(loop):
    if loop.at % 16 != 9:
        return None

    def step(loop):
        def closure():
            loop.optimizer.zero_grad()
            loss = loop.lose()
            loss.backward()
            return loss

        loop.losses.append(loop.optimizer.step(closure).item())

    return step


def gather(loop):
    """Several passes before an update, and calls of the model more than once."""
    if loop.at % 16 not in (4, 5):
        return None

    def step(loop):
        loop.optimizer.zero_grad()
        for _ in range(2):
            (loop.lose() + loop.lose()).backward()
        loop.optimizer.step()

    return step


def fail_in_forward(loop):
    def fail(x):
        raise KeyError("mine")

    if loop.at % 16 == 7:
        loop.model.between = fail
        with pytest.raises(KeyError, match="mine"):
            loop.step()
        loop.model.between = lambda x: x


def fail_in_backward(loop):
    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no way back")

    if loop.at % 16 == 7:
        with pytest.raises(ValueError, match="no way back"):
            Refuse.apply(loop.lose()).backward()


def fail_in_the_update(loop):
    """An optimizer's step raises and is tried again."""
    if loop.at % 16 != 11:
        return None

    def fail(*_):
        raise OSError("once")

    def step(loop):
        loop.optimizer.zero_grad()
        loop.lose().backward()
        handle = loop.optimizer.register_step_pre_hook(fail)
        with pytest.raises(OSError, match="once"):
            loop.optimizer.step()
        handle.remove()
        loop.optimizer.step()

    return step


def take_turns(loop):
    """Another optimizer updates a part of the model in the same step."""
    if loop.at == 0:
        loop.other = torch.optim.SGD(loop.model.spare.parameters(), lr=0.01)
    if loop.at % 3 == 0:
        loop.other.step()


def hold_back(loop):
    """A model that no optimizer holds runs along."""
    if loop.at == 60:
        loop.frozen = torch.nn.Linear(8, 8)
        loop.model.between = loop.model.aside = torch.nn.Sequential(loop.frozen, torch.nn.Tanh())


def checkpoint_a_part(loop):
    if loop.at == 60:
        loop.model.between = lambda x: checkpoint(loop.model.same, x, use_reentrant=False)


def give_more_than_one_thing(loop):
    class Pair(torch.nn.Module):
        def forward(self, x):
            return {"values": x * 2, "more": [x, None]}

    if loop.at == 60:
        loop.model.pair = Pair()
        loop.model.between = lambda x: loop.model.pair(x)["values"]


def call_elsewhere(loop):
    """Another thread calls a part of the model while it runs."""
    if loop.at != USUAL + 20:
        loop.model.between = lambda x: x
        return

    def between(x):
        found = []
        thread = threading.Thread(target=lambda: found.append(loop.model.same(torch.ones(1, 8))))
        thread.start()
        thread.join()
        assert found
        return x

    loop.model.between = between


def ask_a_teacher(loop):
    """Now and then another model is called without gradients after the call of training."""
    if loop.at == 0:
        loop.teacher = torch.nn.Linear(6, 3)
    if loop.at % 30 != 25:
        return None

    def step(loop):
        loop.optimizer.zero_grad()
        loss = loop.lose()
        with torch.no_grad():
            loop.teacher(torch.ones(2, 6))
            loop.teacher(torch.zeros(2, 6))
        loss.backward()
        loop.optimizer.step()

    return step


def listen(loop):
    """A mode of the user's is on for some steps."""

    class Listen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, kinds, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    def step(loop):
        with Listen():
            loop.step()

    return step if loop.at % 16 == 2 else None


STRANGE = [
    plainly,
    evaluate,
    add_a_group,
    leave_a_part_out,
    step_with_closures,
    gather,
    fail_in_forward,
    fail_in_backward,
    fail_in_the_update,
    take_turns,
    hold_back,
    checkpoint_a_part,
    give_more_than_one_thing,
    call_elsewhere,
    ask_a_teacher,
    listen,
]


def numbers(run):
    """Return the numbers of a run that do not depend on its pace, nor on how many optimizers there were before."""
    found = {}
    for name, series in run.scalars().items():
        if not name.startswith(("time.", "memory.", "start_seconds")):
            of_groups = name.startswith(("lr", "group."))
            label = re.sub(r"\[\d+\]$", "", name) if of_groups else name
            found.setdefault(label, []).append(list(zip(*series, strict=True)))
    return found


ABOUT_UPDATES = [
    plainly,
    add_a_group,
    leave_a_part_out,
    step_with_closures,
    fail_in_the_update,
    take_turns,
    checkpoint_a_part,
]


def end_of(loop):
    """Return what a training leaves: its losses, weights, buffers and the state of chance."""
    state = {name: each.clone() for name, each in loop.model.state_dict().items()}
    return loop.losses, {**state, "random": torch.get_rng_state()}


def assert_same_end(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, each in one[1].items():
        assert torch.equal(each, other[1][name]), name


@pytest.mark.parametrize(
    ("act", "kinds"), [(act, BASIC) for act in STRANGE] + [(act, None) for act in ABOUT_UPDATES]
)
def test_both_ways_leave_the_same(tmp_path, monkeypatch, act, kinds):
    settings = {"kinds": kinds} if kinds else {"hashes": True, "histograms": True}
    ends, plain = count_general(monkeypatch), Loop(act)
    plain.train()
    expected_end = end_of(plain)
    loop = Loop(act)
    run = loop.record(tmp_path, "usual", **settings)
    assert len(ends) < STEPS - 30  # others have ended by the short way
    assert_same_end(end_of(loop), expected_end)
    go_generally(monkeypatch)
    loop = Loop(act)
    expected = loop.record(tmp_path, "general", **settings)
    assert_same_end(end_of(loop), expected_end)
    assert numbers(run) == numbers(expected)
    rows = list(run.stats())
    assert len(rows) > STEPS
    assert repr(rows) == repr(list(expected.stats()))  # in which a NaN is like another


def test_a_recorded_step_runs_hardly_any_python_of_clew(tmp_path):
    loop = Loop(plainly)
    loop.model.norm = torch.nn.Identity()  # the state of a normalisation is copied at the end of every step
    with loop.watch(tmp_path, kinds=BASIC):
        seen = [frames_of_clew(loop.step) for _ in range(USUAL + 60)]
    assert sum(set(each) <= {"cut_rows", "fits", "cut"} for each in seen[USUAL:]) >= 30


def test_an_exception_inside_a_recorded_call_goes_on_as_it_is(tmp_path):
    loop, traces = Loop(plainly), []
    with loop.watch(tmp_path, kinds=BASIC) as watch:
        recorder = recorder_of(watch)
        for _ in range(USUAL):
            loop.step()

        def fail(_):
            assert not recorder.rooted, "seen by the short way"

        loop.model.between = fail
        for _ in range(20):
            try:
                loop.step()
            except (AssertionError, TypeError) as error:
                traces.append(error)
            assert (recorder.nested, recorder.rooted) == (0, 0)
    assert any(isinstance(each, AssertionError) for each in traces)


def test_compiling_inside_a_recorded_call(tmp_path):
    loop, compiled = Loop(plainly), []

    def compile_once(x):
        if loop.recorder.rooted and loop.at > USUAL and not compiled:
            compiled.append(torch.compile(lambda x: x, backend="eager"))
        return x

    loop.model.between = compile_once
    run = loop.record(tmp_path, "run", kinds=BASIC)
    assert compiled
    assert len(run.series("second", "output", "l2").values) == STEPS
    assert len(run.series("first", "grad_output", "l2").values) == STEPS


def test_a_gradient_of_a_class_of_the_users_is_not_asked(tmp_path):
    heard = []

    class Heard(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            heard.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    loop = Loop(plainly)
    with loop.watch(tmp_path, kinds=BASIC) as watch:
        for _ in range(USUAL):
            loop.step()
        asked = []
        for _ in range(6):
            loop.optimizer.zero_grad()
            loop.lose().backward()
            weight = loop.model.first.weight
            weight.grad = weight.grad.as_subclass(Heard)
            handle = loop.optimizer.register_step_pre_hook(lambda *_: asked.append(len(heard)))
            before = len(heard)
            loop.optimizer.step()
            asked[-1] -= before
            handle.remove()
            loop.optimizer.zero_grad()
        assert not recorder_of(watch).guard.take()
    assert asked == [0] * 6


class Injected(ArithmeticError):
    """A fault inside clew."""


def inject(loop, monkeypatch, what, error):
    """Have a method of the recorder, or one who listens to it, raise once; it is called before the next step ends."""
    recorder, original = loop.recorder, getattr(loop.recorder, what)

    def fail(*args, **kwargs):
        monkeypatch.setattr(recorder, what, original)
        raise error

    monkeypatch.setattr(recorder, what, [fail] if what == "on_each_loss" else fail)
    if what == "describe":
        entry = next(iter(recorder.registry.tensors.values()))
        recorder.sites.shapes[entry.site] = ()


@pytest.mark.parametrize(
    ("what", "where"), [("describe", "before the optimizer step"), ("cut_rows", "end of step")]
)
def test_a_fault_by_the_short_way_is_told_with_its_place(tmp_path, monkeypatch, what, where):
    faults, at = [], USUAL + 20

    def act(loop):
        if loop.at == at:
            inject(loop, monkeypatch, what, Injected())
            loop.recorder.layout = type(loop.recorder.layout)([], [])  # the rows are others than before
        if loop.at == at + 5:
            faults.extend(loop.recorder.guard.take())

    loop = Loop(act)
    ends = count_general(monkeypatch)
    run = loop.record(tmp_path, "run", kinds=BASIC)
    assert len(ends) < STEPS - 30
    told = faults + list(run.faults())
    assert [(fault.where, fault.error.split(":")[0]) for fault in told] == [(where, "Injected")]
    assert len(loop.losses) == STEPS
    values = run.series("second", "output", "l2")
    assert np.isfinite(values.values).all()
    assert len(values.values) >= STEPS - 1


@pytest.mark.parametrize("what", ["describe", "cut_rows", "on_each_loss"])
def test_an_interrupt_reaches_the_user_and_leaves_nothing_behind(tmp_path, monkeypatch, what):
    caught = []

    def act(loop):
        if loop.at % 16 == 8 and loop.at > USUAL:
            inject(loop, monkeypatch, what, KeyboardInterrupt())
            loop.recorder.layout = type(loop.recorder.layout)([], [])
            try:
                loop.step()
            except KeyboardInterrupt:
                caught.append(loop.at)
            recorder = loop.recorder
            assert (recorder.nested, recorder.rooted, recorder.updating, recorder.in_backward) == (0, 0, 0, 0)
            assert recorder.lock.acquire(blocking=False)
            recorder.lock.release()
            assert torch.is_grad_enabled()

    Loop(act).record(tmp_path, "run", kinds=BASIC)
    assert len(caught) == len([at for at in range(USUAL + 1, STEPS) if at % 16 == 8])


def test_a_finding_is_handed_over_at_once(tmp_path, monkeypatch):
    handed, original = [], Recorder.hand_over

    def hand_over(self):
        handed.append(self.step)
        original(self)

    def spoil(loop):
        if loop.at == USUAL + 22:
            loop.model.between = lambda x: x * float("inf")

    monkeypatch.setattr(Recorder, "hand_over", hand_over)
    Loop(spoil).record(tmp_path, "run", kinds=BASIC)
    assert set(range(USUAL + 22, USUAL + 26)) <= set(handed)


# ---------------------------------------------------------------- twins


def draw_rows(seed, rows):
    draw = np.random.default_rng(seed)
    values = draw.normal(size=(rows, len(STAT_NAMES)))
    values[:, 1:4] = draw.random((rows, 3)) < 0.02
    values[draw.random(values.shape) < 0.02] = np.nan
    hashes, hists = draw.integers(0, 99, rows, np.uint64), draw.integers(0, 99, (rows, HIST_BINS), np.uint32)
    return [bytearray(each.tobytes()) for each in (values, hashes, hists)]


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.booleans(), st.data())
def test_rows_are_settled_as_by_the_twin(seed, rows, has_rest, data):
    places = st.integers(0, rows - 1)
    copies = data.draw(st.lists(st.tuples(places, places), max_size=4))
    chosen = np.array(data.draw(st.lists(places, max_size=5)), np.intp)
    fast, slow = (draw_rows(seed, rows)[: 3 if has_rest else 1] for _ in range(2))
    fast, slow = (CutRows(*each, *[None] * (3 - len(each))) for each in (fast, slow))
    has_bad, norms = gates.KERNEL.settle(*fast, copies, chosen.ctypes.data, len(chosen))
    slow.repeat(copies)
    values = slow.to_arrays()[0]
    assert fast == slow
    assert has_bad == bool(np.count_nonzero(values[:, 1:4]))
    assert repr(norms) == repr(values[chosen, STAT_NAMES.index("l2")].tolist())


def test_rows_that_are_not_there_are_refused():
    values, chosen = bytearray(8 * len(STAT_NAMES)), np.array([1], np.intp)
    with pytest.raises(IndexError):
        gates.KERNEL.settle(values, None, None, [(0, 1)], 0, 0)
    with pytest.raises(IndexError):
        gates.KERNEL.settle(values, None, None, [], chosen.ctypes.data, 1)
    with pytest.raises(TypeError):
        gates.KERNEL.settle(b"", None, None, [], 0, 0)


def test_things_of_a_type_are_listed_as_by_the_twin():
    things = [(each for each in "ab"), 1, True, [], None]
    for kind in (GeneratorType, int, bool, str):
        assert list_of_type(things, kind) == list_of_type_slowly(things, kind)


def test_a_draft_is_the_same_without_the_kernel(tmp_path, monkeypatch):
    run = Loop(plainly).record(tmp_path, "kernel", kinds=BASIC)
    monkeypatch.setattr("clew.capture.draft.BUILT", None)
    expected = Loop(plainly).record(tmp_path, "none", kinds=BASIC)
    assert numbers(run)["grad_norm"] == numbers(expected)["grad_norm"]
    assert repr(list(run.stats())) == repr(list(expected.stats()))
