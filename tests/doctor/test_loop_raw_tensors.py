"""Tensors that are trained outside all models: forgotten by the optimizer, given to it, updated by hand, or data."""

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, mlp
from torch import nn

SGD = torch.optim.SGD


class Layer:
    """A linear layer that is no module."""

    def __init__(self, features, outputs):
        self.weight = (torch.randn(features, outputs) / features**0.5).requires_grad_()
        self.bias = torch.zeros(outputs, requires_grad=True)

    def __call__(self, x):
        return x @ self.weight + self.bias


def train(loss, optimizer, *, steps=14, after=None):
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        if after is not None:
            after()


def biases(given):
    x, y = blobs(64)
    first, last = Layer(8, 24), Layer(24, 3)
    parameters = [first.weight, last.weight, *([first.bias, last.bias] if given else [])]
    train(lambda: F.cross_entropy(last(torch.tanh(first(x))), y), SGD(parameters, lr=0.05))


def loss_weights(given):
    x, _ = blobs(64)
    model, weights = mlp(classes=2), torch.zeros(2, requires_grad=True)

    def loss():
        one, two = F.mse_loss(model(x)[:, 0], x[:, 0]), F.mse_loss(model(x)[:, 1], x[:, 1])
        return torch.exp(-weights[0]) * one + torch.exp(-weights[1]) * two + weights.sum()

    train(loss, SGD([*model.parameters(), *([weights] if given else [])], lr=0.01))


class Scaled(nn.Module):
    """Multiplies by a tensor that should have been a parameter."""

    def __init__(self, registered):
        super().__init__()
        self.body = mlp()
        scale = torch.ones(3, requires_grad=True)
        self.scale = nn.Parameter(scale.detach()) if registered else scale

    def forward(self, x):
        return self.body(x) * self.scale


def attribute(given):
    x, y = blobs(64)
    model = Scaled(given)
    train(lambda: F.cross_entropy(model(x), y), torch.optim.Adam(model.parameters()))


FORGOTTEN = {"biases": biases, "weights of losses": loss_weights, "no parameter": attribute}


@pytest.mark.parametrize("spelling", FORGOTTEN)
def test_a_tensor_that_no_optimizer_holds(judge, spelling):
    judged = judge(lambda: FORGOTTEN[spelling](False))
    assert judged.ids == ["M01"], judged
    named = {"biases": "last.bias", "weights of losses": "weights", "no parameter": "model.scale"}
    assert named[spelling] in judged["M01"].hint
    assert judge(lambda: FORGOTTEN[spelling](True)).ids == []


def by_hand():
    x, y = blobs(64)
    model, bias = mlp(), torch.zeros(3, requires_grad=True)

    def update():
        with torch.no_grad():
            bias.sub_(0.1 * bias.grad)
            bias.grad = None

    train(lambda: F.cross_entropy(model(x) + bias, y), SGD(model.parameters(), lr=0.05), after=update)


def points_of_an_equation():
    """The derivative by the inputs is part of the loss; their own gradients are nobody's business."""
    x = torch.linspace(0, 1, 32)[:, None].requires_grad_()
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss():
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (slope + u).square().mean()

    train(loss, torch.optim.Adam(model.parameters()))


def data_that_requires_gradients():
    x = torch.randn(64, 8, requires_grad=True)
    weight, bias = torch.randn(8, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    train(lambda: (x @ weight + bias - x.detach()[:, :1]).square().mean(), SGD([weight, bias], lr=0.01))


def codes_in_front_of_a_model():
    code, model = torch.zeros(1, 8, requires_grad=True), mlp(classes=1)
    x, _ = blobs(64)
    train(lambda: F.mse_loss(model(x + code), x[:, :1]), SGD(model.parameters(), lr=0.01))


def an_attack_in_every_step():
    x, y = blobs(64)
    model = mlp()

    def loss():
        noise = torch.zeros_like(x, requires_grad=True)
        F.cross_entropy(model(x + noise), y).backward()
        return F.cross_entropy(model((x + 0.1 * noise.grad.sign()).detach()), y)

    train(loss, SGD(model.parameters(), lr=0.05))


@pytest.mark.parametrize(
    "loop",
    [
        by_hand,
        points_of_an_equation,
        data_that_requires_gradients,
        codes_in_front_of_a_model,
        an_attack_in_every_step,
    ],
)
def test_tensors_that_nobody_has_forgotten(judge, loop):
    assert judge(loop).ids == []
