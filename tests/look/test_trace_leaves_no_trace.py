"""Looking at a model changes nothing in it, in torch, or in the random numbers to come."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch
from torch import nn

import clew


class Restless(nn.Module):
    """Everything a forward pass may touch: statistics, counters, caches, random numbers, modes."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(3)
        self.fc = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(2))
        self.count = 0

    def forward(self, x):
        self.count += 1
        self.last = x
        self.seen.add_(x.detach().mean(0))
        self.replaced = torch.ones(2)
        self.fc.eval()
        random.random()
        np.random.rand()
        return self.drop(self.fc(self.bn(x)))


def everything(model):
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "identity": {
            name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        },
        "versions": {
            name: tensor._version for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        },
        "grads": {name: id(parameter.grad) for name, parameter in model.named_parameters()},
        "grad_values": {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        "requires": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": [
            len(hooks)
            for module in model.modules()
            for key, hooks in vars(module).items()
            if key.endswith("hooks") and hooks is not None
        ],
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "gc": gc.isenabled(),
        "grad_mode": torch.is_grad_enabled(),
    }


def assert_same(before, after):
    assert before.keys() == after.keys()
    for part in before:
        if part in ("state", "grad_values"):
            assert all(torch.equal(before[part][name], after[part][name]) for name in before[part]), part
        else:
            assert before[part] == after[part], part


@pytest.mark.parametrize(
    "options", [{}, {"backward": True}, {"summary": True, "backward": True}, {"no_grad": True}]
)
@pytest.mark.parametrize("train", [True, False])
def test_nothing_changes(options, train):
    model = Restless().train(train)
    model(torch.randn(4, 3)).sum().backward()
    x = torch.randn(4, 3, requires_grad=True)
    before = everything(model)
    clew.trace(model, x, **options)
    assert_same(before, everything(model))
    assert model.count == 1
    assert x.grad is None
    assert not x._backward_hooks


def test_nothing_changes_when_the_model_raises():
    class Raises(Restless):
        def forward(self, x):
            super().forward(x)
            raise KeyError("inside")

    model, x = Raises(), torch.randn(4, 3)
    before = everything(model)
    with pytest.raises(clew.ClewError, match="KeyError"):
        clew.trace(model, x)
    assert_same(before, everything(model))


def test_a_module_made_on_the_way_does_not_stay():
    class Grows(nn.Module):
        def forward(self, x):
            if not hasattr(self, "head"):
                self.head = nn.Linear(x.shape[-1], 2)
            return self.head(x)

    model = Grows()
    graph = clew.trace(model, torch.ones(1, 3))
    assert [operation.op for operation in graph] == ["linear"]
    assert list(model.children()) == []


def test_a_graph_in_flight_survives_a_trace_between_forward_and_backward():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    x = torch.randn(4, 3)
    loss = (model(x) * model[0].running_mean.sum()).sum()
    clew.trace(model, x, backward=True)
    loss.backward()
    assert model[1].weight.grad is not None


def test_an_activation_as_input_keeps_its_graph_and_gets_no_hook():
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    h = first(torch.randn(2, 3))
    graph = clew.trace(second, h, backward=True)
    assert graph.tensor("input").grad_stats["count"] == 6
    assert not h._backward_hooks
    second(h).sum().backward()
    assert first.weight.grad is not None


def test_the_hooks_of_parameters_are_not_fired_into_optimizers():
    model = nn.Linear(2, 2)
    fired = []
    model.weight.register_post_accumulate_grad_hook(fired.append)
    clew.trace(model, torch.randn(1, 2), backward=True)
    assert not fired


def test_no_intermediate_tensor_is_kept_alive():
    import weakref

    seen = []

    class Watch(nn.Module):
        def forward(self, x):
            y = x + 1
            seen.append(weakref.ref(y))
            z = y.detach() * 2
            del y
            seen.append(seen[0]() is None)
            return z

    clew.trace(Watch(), torch.randn(3))
    assert seen[1] is True


def test_threads_besides_the_trace_are_left_alone():
    import threading

    side = nn.Linear(2, 2)

    class Starts(nn.Module):
        def forward(self, x):
            worker = threading.Thread(target=lambda: side(torch.ones(1, 2)))
            worker.start()
            worker.join()
            return x + 1

    graph = clew.trace(Starts(), torch.randn(2))
    assert [operation.op for operation in graph] == ["add"]
    assert [module.path for module in graph.modules] == [""]


def test_a_parameter_the_forward_changes_is_told():
    class Drifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x):
            with torch.no_grad():
                self.scale.mul_(2)
            return x * self.scale

    graph = clew.trace(Drifts(), torch.ones(2))
    assert "the forward pass changed parameters, and they stay changed: scale" in graph.notes


def test_a_recording_does_not_take_a_look_for_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4)
    with clew.watch(model, optimizer, every=1):
        for _ in range(2):
            clew.trace(model, x, backward=True)
            clew.fetch(
                model,
                x,
                "0.weight@after",
                loss=torch.sum,
                optimizer=torch.optim.SGD(model.parameters(), lr=1),
            )
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    (run,) = clew.list_runs()
    assert run.steps == 2
    monkeypatch.undo()
