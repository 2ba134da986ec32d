"""Gates let quiet steps through without a line of clew's Python, and are gone where the compiler comes."""

import copy
import gc
import inspect
import pickle
import signal
import sys
import threading
import traceback
import types
import weakref
from pathlib import Path

import pytest
import torch
from torch._dynamo.mutation_guard import install_generation_tagging_init
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import clew
from clew.capture.clock import REST, StepClock
from clew.capture.torch import gates
from clew.capture.torch.gradients import GradientHooks

QUIET = 120
"""By this step of a loop that is recorded every 40th, nothing is new any more."""

OWN = str(Path(clew.__file__).parent)

pytestmark = [
    pytest.mark.skipif(gates.KERNEL is None, reason="the kernel was not built"),
    pytest.mark.usefixtures("nothing_was_compiled"),
]

install_generation_tagging_init()  # as the first call of something compiled does, for good


class Net(torch.nn.Module):
    """Two layers, and something that may happen between them."""

    def __init__(self, *, has_buffers):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        self.norm = torch.nn.BatchNorm1d(8) if has_buffers else torch.nn.Identity()
        self.between = lambda: None

    def forward(self, x):
        x = self.norm(self.first(x)).tanh()
        self.between()
        return self.second(x)


class Loop:
    """A plain training that can be taken step by step."""

    def __init__(self, *, has_buffers=False):
        torch.manual_seed(5)
        self.model = Net(has_buffers=has_buffers)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.x, self.y = torch.randn(16, 4), torch.randint(3, (16,))

    def step(self):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def steps(self, number):
        return [self.step() for _ in range(number)]

    def watch(self, folder, **settings):
        return clew.watch(
            self.model, self.optimizer, out=folder, name="run", every=40, status=False, **settings
        )


def recorder_of(watch):
    return watch._recording.session.recorder


def frames_of_clew(act):
    """Return the functions of clew that run while ``act`` does."""
    seen = []

    def see(frame, event, _arg):
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            seen.append(frame.f_code.co_name)

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return seen


def hooks():
    return [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]


def places():
    """Return what stands where torch calls clew in quiet steps."""
    return [
        vars(torch.nn.Module)["_call_impl"],
        vars(torch.nn.Module)["zero_grad"],
        vars(torch.optim.Optimizer)["zero_grad"],
        torch.autograd.backward,
        torch._C._nn.cross_entropy_loss,
        *hooks(),
    ]


def is_gate(thing):
    return "Gate" in type(getattr(thing, "__self__", thing)).__name__


@pytest.mark.parametrize("has_buffers", [False, True])
def test_a_quiet_step_runs_no_python_of_clew(tmp_path, has_buffers):
    loop = Loop(has_buffers=has_buffers)
    with loop.watch(tmp_path):
        seen = [frames_of_clew(loop.step) for _ in range(QUIET + 40)]
    assert sum(not each for each in seen[QUIET:]) >= 20
    plain = frames_of_clew(loop.step)
    assert not plain


def test_gates_come_and_go(tmp_path):
    loop = Loop()
    before = places()
    with loop.watch(tmp_path) as watch:
        loop.steps(QUIET)
        inside = places()
        watch.pause()
        assert places() == before
        watch.resume()
        loop.steps(QUIET)
    assert places() == before
    assert sum(map(is_gate, inside)) == 7


def test_a_finished_recording_is_let_go(tmp_path):
    loop = Loop()
    with loop.watch(tmp_path) as watch:
        loop.steps(QUIET)
        kept = weakref.ref(recorder_of(watch))
    del watch
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("way", ["function", "method"])
def test_compiling_takes_the_gates_away(tmp_path, way):
    loop, plain = Loop(), Loop()
    with loop.watch(tmp_path) as watch:
        losses = loop.steps(QUIET)
        assert any(map(is_gate, places()))
        if way == "function":
            loop.model.forward = torch.compile(loop.model.forward, backend="eager")
        else:
            loop.model.compile(backend="eager")
        assert not any(map(is_gate, places()))
        assert isinstance(vars(torch.nn.Module)["_call_impl"], types.FunctionType)
        losses += loop.steps(QUIET)
        watch.pause()
        watch.resume()
        assert not any(map(is_gate, places()))
        losses += loop.steps(10)
        assert not recorder_of(watch).guard.take()
    assert losses == plain.steps(2 * QUIET + 10)
    run = clew.open_run(tmp_path / "run")
    assert run.scalars()["loss"].values.tolist() == losses


def test_what_was_compiled_before_keeps_gates_away(tmp_path, monkeypatch):
    monkeypatch.undo()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    loop = Loop()
    with loop.watch(tmp_path):
        assert not any(map(is_gate, places()))
        loop.steps(3)
    torch._dynamo.reset()


def test_compiling_inside_a_quiet_call(tmp_path):
    loop, plain = Loop(), Loop()
    with loop.watch(tmp_path) as watch:
        recorder = recorder_of(watch)
        losses = loop.steps(QUIET)
        compiled = []

        def compile_once():
            if recorder.inside and not compiled:
                compiled.append(torch.compile(lambda x: x, backend="eager"))

        loop.model.between = compile_once
        losses += loop.steps(20)
        assert compiled
        assert not any(map(is_gate, places()))
        assert not recorder.inside
    assert losses == plain.steps(len(losses))
    assert clew.open_run(tmp_path / "run").scalars()["loss"].values.tolist() == losses


def test_export_by_the_compiler_goes_through(tmp_path):
    loop = Loop()
    with loop.watch(tmp_path):
        loop.steps(QUIET)
        given = torch.randn(2, 8)
        exported = torch.export.export(loop.model.second, (given,), strict=True)
        loop.steps(5)
        assert torch.equal(exported.module()(given), loop.model.second(given))


def test_an_exception_inside_a_quiet_call_goes_on_as_it_is(tmp_path):
    loop, plain = Loop(), Loop()
    failed = 0

    with loop.watch(tmp_path) as watch:
        recorder = recorder_of(watch)

        def fail_in_quiet_calls():
            # Which calls are quiet depends on the machine's pace too.
            if recorder.inside:
                raise KeyError("mine")

        losses = loop.steps(QUIET)
        for _ in range(QUIET):
            loop.model.between = fail_in_quiet_calls
            try:
                losses.append(loop.step())
            except KeyError as error:
                failed += 1
                frames = traceback.extract_tb(error.__traceback__)
                assert not any(frame.filename.startswith(OWN) for frame in frames)
            assert not recorder.inside
            assert not recorder.nested
            loop.model.between = lambda: None
            losses += loop.steps(7 if failed < 3 else 0)
    assert failed
    assert losses == plain.steps(len(losses))
    assert clew.open_run(tmp_path / "run").scalars()["loss"].values.tolist() == losses


def test_a_backward_that_raises_in_a_quiet_step(tmp_path):
    loop = Loop()

    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no way back")

    with loop.watch(tmp_path) as watch:
        losses = loop.steps(QUIET)
        with pytest.raises(ValueError, match="no way back"):
            Refuse.apply(loop.model(loop.x).sum()).backward()
        assert recorder_of(watch).in_backward == 0
        losses += loop.steps(20)
    assert clew.open_run(tmp_path / "run").scalars()["loss"].values.tolist() == losses


def test_modes_of_the_user_hear_what_they_hear_without_clew(tmp_path):
    class Listen(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.heard = []

        def __torch_function__(self, function, kinds, args=(), kwargs=None):
            self.heard.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    heard = []
    for is_watched in (False, True):
        loop, listen = Loop(), Listen()
        if is_watched:
            with loop.watch(tmp_path):
                loop.steps(QUIET)
                with listen:
                    loop.steps(3)
        else:
            loop.steps(QUIET)
            with listen:
                loop.steps(3)
        heard.append(listen.heard)
    assert heard[0] == heard[1]
    assert heard[0]


def test_another_thread_calls_the_model_during_a_quiet_call(tmp_path):
    loop, plain = Loop(), Loop()
    outputs = []

    def call_elsewhere():
        thread = threading.Thread(target=lambda: outputs.append(loop.model.second(torch.ones(1, 8))))
        thread.start()
        thread.join()

    with loop.watch(tmp_path) as watch:
        losses = loop.steps(QUIET)
        loop.model.between = call_elsewhere
        losses += loop.steps(10)
        assert not recorder_of(watch).inside
    assert len(outputs) == 10
    assert losses == plain.steps(QUIET + 10)


def test_what_stands_there_answers_like_the_function(tmp_path):
    loop = Loop()
    with loop.watch(tmp_path):
        loop.steps(QUIET)
        assert torch.autograd.backward.__name__ == "backward"
        assert torch.nn.Module._call_impl.__name__ == "_call_impl"
        assert loop.model._call_impl.__self__ is loop.model
        assert loop.optimizer.zero_grad.__name__ == "zero_grad"
        assert torch.nn.Module._call_impl(loop.model, loop.x).shape == (16, 3)
        assert vars(torch.nn.Module)["_call_impl"](loop.model, loop.x).shape == (16, 3)


def test_two_recordings_at_once(tmp_path):
    loop, plain = Loop(), Loop()
    with (
        loop.watch(tmp_path / "one") as outer,
        loop.watch(tmp_path / "two"),
    ):
        losses = loop.steps(QUIET)
        assert any(map(is_gate, places()))
        del outer
    assert losses == plain.steps(QUIET)
    for name in ("one", "two"):
        assert clew.open_run(tmp_path / name / "run").scalars()["loss"].values.tolist() == losses


def test_gates_refuse_what_they_are_not_made_for():
    with pytest.raises(TypeError, match="compiled clock and owner"):
        gates.KERNEL.LossGate(original=len, general=len, beat=object())
    with pytest.raises(TypeError, match="cannot create"):
        gates.KERNEL.GatedCall()
    for kind in (
        "CallGate",
        "PassGate",
        "StepGate",
        "IdleGate",
        "LookGate",
        "LossGate",
        "FetchGate",
        "IndexGate",
    ):
        with pytest.raises(TypeError, match="a gate needs 'original'"):
            getattr(gates.KERNEL, kind)()


def record_all(folder, name, **settings):
    """Train with everything recorded, through a module that returns what it was given, and one called twice."""
    torch.manual_seed(2)
    part = torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(part, torch.nn.Identity(), part, torch.nn.ReLU(inplace=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with clew.watch(model, optimizer, out=folder, name=name, status=False, budget="off", **settings) as watch:
        for step in range(40):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if step == 30:
                model.eval()
                model(torch.randn(2, 4))
                model.train()
        assert not recorder_of(watch).seeing
        assert not recorder_of(watch).guard.take()
    return clew.open_run(folder / name)


@pytest.mark.parametrize("kinds", ["output,grad_output,param,grad", "input,output"])
def test_recorded_steps_are_the_same_without_gates(tmp_path, monkeypatch, kinds):
    run = record_all(tmp_path, "gates", kinds=kinds, hashes=True)
    monkeypatch.setattr(gates, "KERNEL", None)
    expected = record_all(tmp_path, "none", kinds=kinds, hashes=True)
    rows = list(run.stats())
    assert len(rows) > 100
    assert repr(rows) == repr(list(expected.stats()))  # in which a NaN is like another


def test_an_output_that_clew_fails_at_ends_that_site_alone(tmp_path, monkeypatch):
    loop, plain = Loop(), Loop()
    with clew.watch(
        loop.model, loop.optimizer, out=tmp_path, name="run", status=False, budget="off"
    ) as watch:
        losses = loop.steps(30)
        recorder = recorder_of(watch)
        entry = recorder.registry.modules[id(loop.model.first)]

        def fail(*_):
            raise ZeroDivisionError

        monkeypatch.setattr(recorder, "describe", fail)
        recorder.sites.shapes[entry.site] = ()  # so that it is described again
        losses += loop.steps(10)
        assert entry.off
    assert losses == plain.steps(40)
    run = clew.open_run(tmp_path / "run")
    assert len(run.series("second", "output", "l2").values) == 40
    assert len(run.series("first", "output", "l2").values) == 31


def test_numbers_of_the_user_may_have_our_names(tmp_path):
    loop = Loop()
    with loop.watch(tmp_path) as watch:
        losses = []
        for step in range(QUIET + 80):
            losses.append(loop.step())
            watch.log(loss=-1.0, lr=step, twice=1.0)
            watch.log(twice=2.0)
        assert not recorder_of(watch).guard.take()
    run = clew.open_run(tmp_path / "run")
    scalars = run.scalars()
    assert scalars["loss"].values.tolist() == losses
    assert scalars["log.loss"].values.tolist() == [-1.0] * len(losses)
    assert scalars["twice"].values.tolist() == [1.0, 2.0] * len(losses)
    assert scalars["lr"].values.tolist() == [0.001] * len(losses)
    assert scalars["log.lr"].values.tolist() == list(range(len(losses)))
    assert set(scalars["clew.recorded"].values.tolist()) == {0.0, 1.0}


def interrupt(*_):
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("when", ["explaining", "failed backward", "output"])
def test_ctrl_c_while_clew_is_at_work_reaches_the_user(tmp_path, monkeypatch, when):
    loop = Loop()
    settings = {"every": 1} if when == "output" else {"every": 40}
    is_time, original = [], GradientHooks.watch
    monkeypatch.setattr(GradientHooks, "watch", lambda *args: interrupt() if is_time else original(*args))
    with clew.watch(loop.model, loop.optimizer, out=tmp_path, name="run", status=False, **settings) as watch:
        recorder = recorder_of(watch)
        loop.steps(QUIET)
        if when == "explaining":
            recorder.on_bad = interrupt
            for parameter in loop.model.parameters():
                parameter.register_hook(lambda gradient: gradient * float("inf"))
        elif when == "failed backward":
            monkeypatch.setattr("clew.capture.torch.backward.list_leaves", interrupt)
            loop.model.first.weight.register_hook(lambda gradient: gradient / "no number")
        else:
            is_time.append(True)
            # A call more than ever before: its gradient is to be waited for.
            loop.model.between = lambda: loop.model.second(torch.zeros(1, 8))
        with pytest.raises(KeyboardInterrupt):
            loop.steps(30)
        assert (recorder.inside, recorder.nested, recorder.seeing, recorder.in_backward) == (0, 0, 0, 0)
        recorder.on_bad = None


def test_a_complex_loss_is_no_fault(tmp_path):
    loop = Loop()
    with loop.watch(tmp_path) as watch:
        recorder = recorder_of(watch)
        for step in range(QUIET + 40):
            loop.optimizer.zero_grad()
            loss = loop.model(loop.x).square().mean() - 5
            if step > QUIET and step % 3 == 0:
                torch.complex(loss, torch.tensor(0.0)).backward(torch.tensor(1 + 0j))
            else:
                loss.backward()
            loop.optimizer.step()
        assert not recorder.guard.take()
        assert "complex" in recorder.unseen["loss"]
    run = clew.open_run(tmp_path / "run")
    assert len(run.scalars()["lr"].values) == QUIET + 40
    assert 0 < len(run.scalars()["loss"].values) < QUIET + 40


def test_one_recording_inside_another_leaves_the_compiler_its_way(tmp_path):
    loop = Loop()
    with loop.watch(tmp_path / "outer"):
        loop.steps(QUIET)
        with loop.watch(tmp_path / "inner"):
            loop.steps(20)
            compiled = torch.compile(loop.model.second, backend="eager", fullgraph=True)
            compiled(torch.ones(2, 8))
        assert not any(map(is_gate, places()))
        torch.compile(loop.model.first, backend="eager", fullgraph=True)(torch.ones(2, 4))
        loop.steps(5)


def test_a_backward_without_a_root_ends(tmp_path):
    loop = Loop()
    for with_gates in (True, False):
        with loop.watch(tmp_path / str(with_gates)) as watch:
            if not with_gates:
                watch._recording.session._patches.uncover()
            loop.steps(QUIET)
            with pytest.raises(TypeError):
                torch.autograd.backward(None)
            assert recorder_of(watch).in_backward == 0


def test_gates_are_copied_and_pickled_as_functions_are(tmp_path):
    loop = Loop()
    with loop.watch(tmp_path):
        loop.steps(QUIET)
        for function in (torch.autograd.backward, torch._C._nn.mse_loss):
            assert is_gate(function)
            assert copy.copy(function) is function
            assert copy.deepcopy({"kept": function})["kept"] is function
        assert pickle.loads(pickle.dumps(torch.autograd.backward)) is torch.autograd.backward
        assert pickle.dumps(torch._C._nn.mse_loss)
        assert inspect.signature(torch.autograd.backward).parameters


@pytest.mark.parametrize("with_gates", [True, False])
def test_an_exception_inside_a_step_leaves_the_clock_to_the_rest(tmp_path, with_gates):
    loop = Loop()

    def fail():
        raise ArithmeticError("in the closure")

    with loop.watch(tmp_path) as watch:
        if not with_gates:
            watch._recording.session._patches.uncover()
        loop.steps(QUIET)
        with pytest.raises(ArithmeticError):
            loop.optimizer.step(fail)
        loop.steps(3)
        assert recorder_of(watch).clock.phase == REST


def test_another_clock_in_the_place_of_ours_takes_the_general_way(tmp_path):
    loop, plain = Loop(), Loop()
    with loop.watch(tmp_path) as watch:
        losses = loop.steps(QUIET)
        recorder_of(watch).clock = StepClock()
        losses += loop.steps(10)
    assert losses == plain.steps(len(losses))
    assert clew.open_run(tmp_path / "run").scalars()["loss"].values.tolist() == losses
