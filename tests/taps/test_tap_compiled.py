"""Taps inside torch.compile(fullgraph=True): alive, without a graph break, and saying so where that cannot be."""

import io
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import torch._dynamo
from fake_session import recording

import clew
from clew.capture.torch.uncompiled import mark_own_functions

NAN = float("nan")


# The first compilation of a process replaces functions of torch and starts a thread: let it be this one.
torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


class Head(torch.nn.Module):
    def forward(self, x):
        x = clew.print(x, "in head", summarize=2)
        x = clew.check.shape(x, "B 4", "hidden")
        x = clew.check.rank(clew.check.dtype(x, torch.float32), 2)
        return clew.check.finite(x.log(), "logits")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Identity(), Head()])
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_print_and_checks_live_in_the_graph(backend, capsys):
    net = Net()
    run = compiled(net, backend)
    run(torch.ones(2, 4)).sum().backward()
    assert net.scale.grad.tolist() == [2.0] * 4
    run(torch.full((2, 4), 2.0))
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("in head:  float32[2, 4]") for line in lines)
    assert ["min 1" in lines[0], "min 2" in lines[1]] == [True, True]
    assert all("(blocks.1, " in line and "test_tap_compiled.py:" in line for line in lines)
    with pytest.raises(clew.CheckError) as caught:
        run(torch.tensor([[1.0, 1.0, -1.0, 0.0]]))
    error = caught.value
    assert str(error).startswith(
        "logits must be finite: 2 of 4 elements are not\n  [0, 2] = nan, [0, 3] = -inf"
    )
    assert error.details["site"] == "blocks.1"
    assert error.where.endswith('return clew.check.finite(x.log(), "logits")')
    assert torch._dynamo.utils.counters["graph_break"] == {}


def test_the_same_numbers_with_and_without_taps():
    def train(tapped):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 4)

        def step(x):
            y = net(x)
            if tapped:
                y = clew.check.in_range(clew.check.finite(y), -100, 100)
                y = clew.tap(y, lambda t: None)
            return torch.nn.functional.dropout(y, 0.5).square().sum()

        run = compiled(step)
        for _ in range(2):
            run(torch.rand(3, 4)).backward()
        torch._dynamo.reset()
        return net.weight.grad.numpy().tobytes(), torch.get_rng_state().numpy().tobytes()

    assert train(True) == train(False)


EVERY_CHECK = {
    "finite": (lambda x: clew.check.finite(x / 0), r"must be finite"),
    "positive": (lambda x: clew.check.positive(x - 2), r"must be positive"),
    "equal": (lambda x: clew.check.equal(x, x + 1), r"must equal the other"),
    "less": (lambda x: clew.check.less(x, 0.5), r"must be less than 0\.5"),
    "less a size": (lambda x: clew.check.less(x * 10, x.shape[0]), r"must be less than 3"),
    "less_equal": (lambda x: clew.check.less_equal(x, x - 1), r"must be at most the other"),
    "in_range": (lambda x: clew.check.in_range(x, 2, 3), r"must be in \[2, 3\]"),
    "integer": (lambda x: clew.check.integer(x / 2), r"must be whole numbers"),
    "rank": (lambda x: clew.check.rank(x, (3, 4)), r"must have rank 3 or 4"),
    "dtype": (lambda x: clew.check.dtype(x, "integer"), r"must have dtype integer"),
    "shape of another": (lambda x: clew.check.shape(x.t(), (x.shape[0], "C")), r"dimension 0 is 4, not 3"),
    "shape": (lambda x: clew.check.shape(x, "3 5"), r"dimension 1 is 4, not 5"),
    "non_decreasing": (lambda x: clew.check.non_decreasing(-x.cumsum(1)), r"must be non-decreasing"),
    "probabilities": (lambda x: clew.check.probabilities(x * 1), r"must sum to 1"),
    "rows_differ": (lambda x: clew.check.rows_differ(x * 1), r"all 3 rows are the same"),
    "that": (lambda x: clew.check.that((x > 2).any(), show=[x]), r"must be true"),
}


@pytest.mark.parametrize("name", EVERY_CHECK)
def test_every_check_fails_in_compiled_code(name):
    function, message = EVERY_CHECK[name]
    with pytest.raises(clew.CheckError, match=message):
        compiled(function, "eager", dynamic=True)(torch.ones(3, 4))


def test_names_bind_across_compiled_calls():
    def step(x):
        clew.check.shape(x, "B D", "x")
        clew.check.shape(torch.cat([x, x]), "B D", "twice")
        return x

    with pytest.raises(clew.CheckError, match=r"dimension 0 is 6, but B = 3 since x at .*test_tap_compiled"):
        compiled(step)(torch.ones(3, 4))


def test_a_condition_is_part_of_the_graph(capsys):
    run = compiled(lambda x: clew.print(x * 2, "x", when=lambda t: t.max() > 10, first_n=1) + 1)
    for value in (1.0, 6.0, 7.0):
        run(torch.tensor([value]))
    (line,) = capsys.readouterr().out.splitlines()
    assert "min 12" in line


def test_prints_can_go_to_a_stream_or_a_file(tmp_path):
    stream = io.StringIO()
    path = str(tmp_path / "lines.txt")
    compiled(lambda x: clew.print(clew.print(x, "a", file=stream), "b", file=path) + 1)(torch.ones(1))
    assert stream.getvalue().startswith("a:")
    assert (tmp_path / "lines.txt").read_text().startswith("b:")


def test_a_tap_may_do_anything_but_replace():
    seen = []

    def look(t):
        seen.append(float(t.numpy().mean()))

    x = torch.ones(2, requires_grad=True)
    compiled(lambda x: clew.tap(x * 3, look).sin())(x).sum().backward()
    assert seen == [3.0]
    assert x.grad is not None
    with pytest.raises(clew.ClewError, match="compiled code cannot take it") as caught:
        compiled(lambda x: clew.tap(x * 3, torch.zeros_like))(x)
    assert caught.value.next_step == "write clew.tap(x, fn, replace=True), or replace=False to only look"
    compiled(lambda x: clew.tap(x * 3, torch.zeros_like, replace=False))(x)


def test_a_traced_tap_replaces():
    run = compiled(lambda x: clew.tap(x * 3, lambda t: t * 0 + 7, replace=True) + 1)
    assert run(torch.ones(2)).tolist() == [8.0, 8.0]


def test_failures_in_compiled_code_are_recorded():
    run = compiled(lambda x: clew.check.positive(x, "scale", warn=True) + 1)
    with recording() as session:
        session.step = 3
        run(torch.tensor([-1.0]))
    note = session.notes[0][1]
    assert note["step"] == 3
    assert "test_tap_compiled.py:" in note["source"]


def test_inside_vmap_and_checkpoint():
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(3, 2, requires_grad=True)
    assert compiled(torch.vmap(lambda row: clew.check.finite(row * 2)))(x).sum() == 12
    run = compiled(
        lambda x: checkpoint(lambda y: clew.check.finite(y.sin(), "y").cos(), x, use_reentrant=False)
    )
    run(x).sum().backward()
    with pytest.raises(clew.CheckError, match="y must be finite"):
        run(x.detach() / 0)


def test_numpy_and_numbers_in_compiled_code():
    assert compiled(lambda x: clew.check.finite(x.numpy()) + 1)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert compiled(lambda x: x * clew.check.finite(2.0))(torch.ones(1)).item() == 2.0


def test_exported_programs_have_no_taps_and_that_is_said(capsys):
    for strict in (False, True):
        program = torch.export.export(Net(), (torch.ones(2, 4),), strict=strict)
        assert "clew" not in str(program.graph)
    assert capsys.readouterr().err == (
        "clew: taps (clew.print, clew.check, clew.tap) are left out of exported programs\n"
    )


def test_hooks_set_before_compiling_are_compiled_in():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    run = compiled(net)
    with clew.checks(run, {"*": "finite", "0.weight": "finite"}) as on:
        run(torch.ones(1, 2))
    assert on.sites == ("(Sequential)", "0", "1", "0.weight")
    assert on.calls == 5  # three outputs, and the weight before the call and at the end
    before = on.calls
    run(torch.ones(1, 2))
    assert on.calls == before


def test_a_model_compiled_before_the_hooks_runs_uncompiled_and_says_so(capsys):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    run = compiled(net)
    run(torch.ones(1, 2))
    net[0].weight.data.fill_(NAN)
    with pytest.raises(clew.CheckError, match=r"^0 must be finite"), clew.checks(run):
        run(torch.ones(1, 2))
    assert "it runs uncompiled until they are removed" in capsys.readouterr().err
    torch._dynamo.utils.counters.clear()
    torch._dynamo.reset()
    run(torch.ones(1, 2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_gradients_are_seen_inside_compiled_code():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    run, seen = compiled(net), []
    with clew.on("*", lambda g, site: seen.append((site, tuple(g.shape))), phase="backward", model=run):
        run(torch.ones(1, 2)).sum().backward()
    assert sorted(seen) == [("(Sequential)", (1, 1)), ("0", (1, 2)), ("1", (1, 2)), ("2", (1, 1))]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    table = {"1@grad": ("in_range", 0, 0)}
    with pytest.raises(clew.CheckError, match=r"^1@grad must be in"), clew.checks(run, table):
        run(torch.ones(1, 2)).sum().backward()
    assert torch._dynamo.utils.counters["graph_break"] == {}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own doing
def test_checks_in_a_backward_of_the_users_own():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return clew.check.finite(x, "x") * 2

        @staticmethod
        def backward(ctx, gradient):
            return clew.check.less(gradient, 1, "gradient") * 2

    with pytest.raises(clew.CheckError, match="gradient must be less than 1"):
        compiled(lambda x: Double.apply(x * 1))(torch.ones(2, requires_grad=True)).sum().backward()


def test_regions_that_would_lose_a_tap_leave_it_out_and_say_so(capsys):
    def choose(x):
        return torch.cond(x.sum() > 0, lambda x: clew.check.finite(x / 0), lambda x: x * 1, (x,))

    x = torch.ones(2, requires_grad=True)
    compiled(choose)(x).sum().backward()
    assert "taps inside torch.cond are left out of compiled code" in capsys.readouterr().err


def test_on_without_a_model_sees_no_compiled_code_and_says_so(capsys):
    # A recording keeps the compiler away from clew's own functions; taps are not among them.
    mark_own_functions()
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    net.compile(backend="aot_eager", fullgraph=True)
    with clew.on("*", lambda t: None):
        net(torch.ones(1, 2))
    assert "clew.on without a model sees no compiled code" in capsys.readouterr().err


# Nothing but matrix products: the compiler calls those of torch and needs no C++ compiler, which would take a minute.
INDUCTOR = textwrap.dedent("""
    import torch, clew

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = torch.nn.Linear(4, 4, bias=False)
            self.fc2 = torch.nn.Linear(4, 4, bias=False)

        def forward(self, x):
            x = clew.print(self.fc1(x), "hidden", first_n=1)
            x = clew.tap(x, lambda t: print("tapped", tuple(t.shape)))
            return clew.check.finite(self.fc2(x), "logits")

    net = Net()
    run = torch.compile(net, fullgraph=True)
    x = torch.rand(2, 4)
    run(x).sum().backward()
    grad, net.fc1.weight.grad = net.fc1.weight.grad, None
    print = lambda *_: None
    torch.compiler.set_stance("force_eager")
    net(x).sum().backward()
    assert torch.equal(grad, net.fc1.weight.grad)
    torch.compiler.set_stance("default")
    del print
    net.fc2.weight.data[1, 1] = float("nan")
    try:
        run(x)
    except clew.CheckError as error:
        print(error)
    assert not torch._dynamo.utils.counters["graph_break"]
""")


def test_with_the_default_backend(tmp_path):
    script = tmp_path / "net.py"
    script.write_text(INDUCTOR)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("hidden:  float32[2, 4]")
    assert lines[1] == "tapped (2, 4)"
    assert "logits must be finite: 2 of 8 elements are not" in lines
    assert "  [0, 1] = nan, [1, 1] = nan" in lines
    assert any(line.endswith('clew.check.finite(self.fc2(x), "logits")') for line in lines)


def test_dump_saves_when_the_graph_runs(tmp_path):
    path = str(tmp_path / "deep" / "x")

    @compiled
    def f(x):
        return clew.dump(x * 2, path, when=lambda t: t.sum() > 5) + 1

    for value in (1.0, 2.0, 3.0):
        f(torch.full((2,), value))
    saved = sorted((tmp_path / "deep").iterdir())
    assert [np.load(file)[0] for file in saved] == [4, 6]
