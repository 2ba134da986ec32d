"""Values inside a model by name, all from one and the same execution."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # replaces torch.manual_seed when it is first loaded
import torch.nn.functional as F
from torch import nn

import clew
from clew.errors import UsageError


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.bn = nn.BatchNorm1d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.act(self.bn(self.fc(x)))


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.add_module("block-0", Block(width))
        self.add_module("block-1", Block(width))
        self.rnn = nn.LSTM(width, 3)
        self.fc = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        for number in range(2):
            x = getattr(self, f"block-{number}")(x)
        out, _ = self.rnn(x)
        return self.fc(self.drop(out))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def loss():
    target = torch.tensor([0, 1, 0, 1, 0, 1])
    return lambda output: F.cross_entropy(output, target)


def snapshot(model, optimizer=None):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    steps = {}
    if optimizer is not None:
        for index, values in enumerate(optimizer.state.values()):
            steps.update({(index, key): torch.as_tensor(value).clone() for key, value in values.items()})
    return state, grads, steps, torch.get_rng_state()


def assert_unchanged(before, after):
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert all(before[1][name] is after[1][name] for name in before[1])
    assert before[2].keys() == after[2].keys()
    assert all(torch.equal(before[2][key], after[2][key]) for key in before[2])
    assert torch.equal(before[3], after[3])


def test_activations_parameters_and_gradients_by_pattern(model, x, loss):
    before = snapshot(model)
    values = clew.fetch(model, x, ["block-*.bn", "fc.weight@grad", "fc.weight", "output", "loss"], loss=loss)
    assert_unchanged(before, snapshot(model))
    assert list(values) == ["fc.weight", "block-0.bn", "block-1.bn", "output", "loss", "fc.weight@grad"]
    assert torch.equal(values["fc.weight"], model.fc.weight)
    assert values["block-0.bn"].min() < 0, "the value before the in-place ReLU wrote over it"
    assert not values["block-0.bn"].requires_grad
    assert values["loss"] == loss(values["output"])


def test_everything_is_of_the_same_execution(x, loss):
    model = Net()
    torch.manual_seed(7)
    values = clew.fetch(model, x, ["drop", "fc", "fc@grad", "fc.weight@grad", "fc.bias@grad"], loss=loss)
    assert torch.allclose(F.linear(values["drop"], model.fc.weight, model.fc.bias), values["fc"])
    assert torch.allclose(values["fc.weight@grad"], values["fc@grad"].T @ values["drop"])
    torch.manual_seed(7)
    loss(model(x)).backward()
    assert torch.equal(model.fc.weight.grad, values["fc.weight@grad"])
    assert torch.equal(model.fc.bias.grad, values["fc.bias@grad"])


def test_gradients_at_activations(model, x, loss):
    values = clew.fetch(model, x, ["block-0@grad", "block-1.add@grad", "output@grad", "rnn*"], loss=loss)
    assert values["block-0@grad"].shape == (6, 4)
    assert values["output@grad"].shape == (6, 2)
    assert {name for name in values if name.startswith("rnn[")} == {"rnn[0]", "rnn[1][0]", "rnn[1][1]"}


def test_before_and_after_the_step(model, x, loss):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss(model(x)).backward()
    optimizer.step()
    before = snapshot(model, optimizer)
    names = ["fc.weight@before", "fc.weight@after", "fc.weight@grad", "fc"]
    values = clew.fetch(model, x, names, loss=loss, optimizer=optimizer)
    assert_unchanged(before, snapshot(model, optimizer))
    assert torch.equal(values["fc.weight@before"], model.fc.weight)
    assert not torch.equal(values["fc.weight@after"], values["fc.weight@before"])
    moved = values["fc.weight@after"] - values["fc.weight@before"]
    assert moved.abs().max() <= 0.11


def test_a_first_step_leaves_no_state_behind(model, x, loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    clew.fetch(model, x, "fc.weight@after", loss=loss, optimizer=optimizer)
    assert len(optimizer.state) == 0
    assert model.fc.weight.grad is None


def test_sgd_moves_by_the_gradient_of_the_same_execution(model, x, loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    values = clew.fetch(
        model, x, ["fc.weight@before", "fc.weight@after", "fc.weight@grad"], loss=loss, optimizer=optimizer
    )
    expected = values["fc.weight@before"] - 0.5 * values["fc.weight@grad"]
    assert torch.allclose(values["fc.weight@after"], expected)


def test_a_kept_step_is_the_users_own_step(x, loss):
    def make():
        torch.manual_seed(0)
        model = Net()
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    plain, fetched = make(), make()
    torch.manual_seed(5)
    loss(plain[0](x)).backward()
    plain[1].step()
    torch.manual_seed(5)
    values = clew.fetch(fetched[0], x, "fc.weight@after", loss=loss, optimizer=fetched[1], keep_step=True)
    for name, tensor in plain[0].state_dict().items():
        assert torch.equal(tensor, fetched[0].state_dict()[name]), name
    assert torch.equal(values["fc.weight@after"], fetched[0].fc.weight)


def test_calls_operations_and_nested_outputs():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            h = self.fc(x)
            return {"sum": self.fc(h.tanh()) + x, "list": [h]}

    values = clew.fetch(Twice(), torch.ones(2, 3), ["fc", "fc#1", "tanh", "add", "output"])
    assert list(values) == ["fc", "tanh", "fc#1", "add", "output[sum]", "output[list][0]"]
    assert torch.equal(values["tanh"], values["fc"].tanh())
    everything = clew.fetch(Twice(), torch.ones(2, 3), "*")
    assert list(everything) == [
        "fc.weight",
        "fc.bias",
        "fc",
        "tanh",
        "fc#1",
        "add",
        "output[sum]",
        "output[list][0]",
    ]


def test_a_model_that_computes_its_own_loss_needs_none():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x, labels=None):
            logits = self.fc(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    values = clew.fetch(WithLoss(), torch.ones(2, 3), names="fc.weight@grad", labels=torch.tensor([0, 1]))
    assert values["fc.weight@grad"].shape == (2, 3)
    assert clew.fetch(WithLoss(), torch.ones(2, 3), "loss", labels=torch.tensor([0, 1]))["loss"].ndim == 0


@pytest.mark.parametrize(
    ("names", "options", "message", "next_step"),
    [
        ("block-0.nb", {}, "'block-0.nb' matches nothing in Net", "did you mean 'block-0.bn'?"),
        (["fc", "nothing.*"], {}, "'nothing.*' matches nothing in Net", "there are "),
        ("fc.weight@gard", {}, "asks for '@gard'", "did you mean 'grad'?"),
        ("fc@grad", {}, "the output is no scalar", "give loss="),
        ("fc@grad", {"loss": lambda out: out}, "loss= gave float32(", "as in loss.mean()"),
        ("fc@grad", {"loss": lambda out: out.mean().detach()}, "float32() without a graph", "depends on"),
        (3, {}, "says what to fetch, by name", "fetch(model, x"),
        ("fc.weight@after", {}, "needs a step to come after", "give optimizer="),
        ("@grad", {}, "names nothing", "fc.weight@grad"),
        ("fc", {"keep_step": True}, "without a step to keep", "give optimizer="),
    ],
)
def test_wishes_that_cannot_be_fulfilled(model, x, names, options, message, next_step):
    before = snapshot(model)
    with pytest.raises(UsageError) as caught:
        clew.fetch(model, x, names, **options)
    assert message in caught.value.what
    assert next_step in caught.value.next_step
    assert_unchanged(before, snapshot(model))


def test_names_are_the_last_argument(model, x):
    with pytest.raises(UsageError, match="the last argument of fetch says what to fetch"):
        clew.fetch(model, x)
    with pytest.raises(UsageError, match="no names to fetch"):
        clew.fetch(model, x, names=[])


def test_no_gradient_reaches_what_is_frozen(model, x, loss):
    model.fc.weight.requires_grad_(False)
    with pytest.raises(UsageError, match=r"no gradient reached 'fc\.weight'"):
        clew.fetch(model, x, "fc.weight@grad", loss=loss)


def test_optimizers_that_run_the_model_again_are_refused(model, x, loss):
    optimizer = torch.optim.LBFGS(model.parameters())
    before = snapshot(model)
    with pytest.raises(UsageError, match="LBFGS runs the model several times"):
        clew.fetch(model, x, "fc.weight@after", loss=loss, optimizer=optimizer)
    assert_unchanged(before, snapshot(model))


def test_a_model_that_raises_is_explained(model):
    with pytest.raises(clew.ClewError, match=r"linear in 'block-0\.fc' raised RuntimeError"):
        clew.fetch(model, torch.ones(2, 9), "fc")
