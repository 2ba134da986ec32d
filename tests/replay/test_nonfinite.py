"""Without a recording: the lens around one's own code, and around one function that leaves nothing changed."""

import copy

import pytest
import torch
import torch._dynamo
from torch import nn

import clew


def line_with(mark):
    with open(__file__, encoding="utf-8") as file:
        return next(
            number for number, line in enumerate(file, 1) if f"# {mark}" in line and "line_with" not in line
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.root = Root()

    def forward(self, x):
        return self.root(self.norm(self.fc(x)) * x.abs().max())


class Root(nn.Module):
    def forward(self, h):
        return torch.sqrt(h.square())  # SQRT


class Log(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3, bias=False)
        self.end = LogEnd()

    def forward(self, x):
        return self.end(self.fc(x))


class LogEnd(nn.Module):
    def forward(self, h):
        return torch.log(h.abs())  # LOG


def test_the_forward_operation_raises_where_it_is():
    with pytest.raises(clew.NonFiniteError) as caught, clew.trace_nonfinite():
        Log()(torch.zeros(2, 4))
    verdict = caught.value.verdict
    assert (verdict.op, verdict.phase, verdict.site) == ("log", "forward", "end")
    assert verdict.source["line"] == line_with("LOG")
    assert (
        caught.value.what
        == f"log in end made -inf out of finite numbers at test_nonfinite.py:{line_with('LOG')}"
    )
    assert caught.value.where.endswith("return torch.log(h.abs())  # LOG")
    assert "clamp_min" in caught.value.next_step


def test_the_backward_operation_raises_and_names_the_forward_line():
    loss_of = Net()
    with pytest.raises(clew.NonFiniteError) as caught, clew.trace_nonfinite():
        loss_of(torch.zeros(2, 4)).sum().backward()
    verdict = caught.value.verdict
    assert (verdict.op, verdict.phase, verdict.site) == ("sqrt", "backward", "root")
    assert verdict.source["line"] == line_with("SQRT")


def test_deferred_blames_only_what_reached_the_loss():
    model = Log()
    with clew.trace_nonfinite(deferred=True) as trace:
        dead = torch.log(torch.zeros(3))
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
    assert trace.verdict is None
    assert torch.isinf(dead).all()
    with pytest.raises(clew.NonFiniteError, match="log in end"), clew.trace_nonfinite(deferred=True):
        torch.log(torch.zeros(3))
        model(torch.zeros(2, 4)).sum().backward()


def test_deferred_without_a_backward_looks_at_the_end():
    with clew.trace_nonfinite(deferred=True, raises=False) as trace:
        result = torch.zeros(3).log() * 2
    assert trace.verdict.op == "log"
    assert result.shape == (3,)


def test_collecting_goes_on_and_counts_each_fault_once():
    with clew.trace_nonfinite(raises=False) as trace:
        h = torch.log(torch.zeros(3)) * 2 + 1
        g = torch.exp(torch.full((2,), 1000.0)).sum()
    assert [finding.op for finding in trace.findings] == ["log", "exp"]
    assert torch.isinf(h).all()
    assert torch.isinf(g)
    assert str(trace.verdict).startswith("log made -inf out of finite numbers at test_nonfinite.py:")


def test_each_step_is_judged_by_itself():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with clew.trace_nonfinite(raises=False) as trace:
        for factor in (1.0, 0.0, 1.0, 0.0):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 2)).sum()
            torch.log(torch.tensor(factor))
            loss.backward()
            optimizer.step()
    assert [finding.step for finding in trace.findings] == [1, 3]


@pytest.mark.parametrize(
    "allowed", [{"allow": "end"}, {"allow": ["e*"]}, {"allow_ops": "log,exp"}, {"allow_ops": ["log"]}]
)
@pytest.mark.parametrize("deferred", [False, True])
def test_what_is_allowed_is_not_told(allowed, deferred):
    with clew.trace_nonfinite(deferred=deferred, **allowed) as trace:
        loss = Log()(torch.zeros(2, 4)).mean()
        loss.backward()
    assert trace.findings == []


def test_a_mask_is_no_fault():
    with clew.trace_nonfinite():
        scores = torch.zeros(2, 3).masked_fill(torch.tensor([True, False, False]), float("-inf"))
        assert torch.softmax(scores, -1).isfinite().all()


def test_data_that_came_in_bad_is_told_apart():
    x = torch.ones(2, 4)
    x[1, 2] = float("nan")
    with pytest.raises(clew.NonFiniteError, match="the data came in bad") as caught, clew.trace_nonfinite():
        nn.Sequential(nn.Linear(4, 3))(x)
    assert caught.value.verdict.phase == "data"


def test_the_user_s_own_exception_passes():
    with pytest.raises(ZeroDivisionError), clew.trace_nonfinite(deferred=True):
        torch.zeros(3).log()
        1 / 0  # noqa: B018


def test_values_are_the_same_under_the_trace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    twin = copy.deepcopy(model)
    x = torch.randn(5, 4)
    torch.manual_seed(1)
    model(x).sum().backward()
    torch.manual_seed(1)
    with clew.trace_nonfinite():
        twin(x).sum().backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


# ------------------------------------------------------------------------ one function


def make_step():
    """Return a model that has trained two steps, its optimizer, and a step that goes wrong."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x=None):
        optimizer.zero_grad()
        loss = model(torch.zeros(6, 4) if x is None else x).mean()
        torch.rand(1)
        loss.backward()
        optimizer.step()

    for _ in range(2):
        step(torch.randn(6, 4))
    return model, optimizer, step


def state_of(model, optimizer):
    """Return copies of everything a step changes."""
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), gradients, torch.get_rng_state()))


def is_same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_same, left, right))
    return left == right


@pytest.mark.parametrize("in_process", [False, True])
def test_a_function_is_explained_and_nothing_remains(in_process):
    model, optimizer, step = make_step()
    held = model(torch.ones(6, 4)).sum()  # a graph that must still be usable afterwards
    before = state_of(model, optimizer)
    identities = [p.grad for p in model.parameters()]
    verdict = clew.explain_nonfinite(step, in_process=in_process)
    assert (verdict.found, verdict.op, verdict.phase, verdict.site) == (True, "sqrt", "backward", "root")
    assert verdict.source["line"] == line_with("SQRT")
    assert verdict.symptom.startswith("gradient ")
    assert is_same(state_of(model, optimizer), before)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), identities, strict=True))
    held.backward()


@pytest.mark.parametrize("in_process", [False, True])
def test_a_good_step_leaves_nothing_either(in_process):
    model, optimizer, step = make_step()
    before = state_of(model, optimizer)
    verdict = clew.explain_nonfinite(
        lambda: step(torch.ones(6, 4) * torch.arange(6.0)[:, None] + 1), in_process=in_process
    )
    assert not verdict.found
    assert str(verdict) == "nothing was NaN or infinite"
    assert is_same(state_of(model, optimizer), before)


def test_a_function_that_raises_says_so():
    verdict = clew.explain_nonfinite(lambda: 1 / 0)
    assert not verdict.found
    assert str(verdict) == "it raised ZeroDivisionError: division by zero"


def test_only_a_function_can_be_explained():
    with pytest.raises(clew.ClewError, match="expected a function without arguments, got a Tensor"):
        clew.explain_nonfinite(torch.zeros(1))
