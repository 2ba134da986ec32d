"""Models whose tensors are not what they were when the recording began: the training goes on, the record is right."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import clew


def record(model, optimizer, steps, folder, **settings):
    """Train for some steps, each given as a function that returns the loss; return the run."""
    with clew.watch(model, optimizer, out=folder, budget="off", status=False, **settings) as watch:
        for step in steps:
            optimizer.zero_grad()
            step().backward()
            optimizer.step()
    run = clew.open_run(watch.path)
    assert not list(run.faults())
    return run


def test_buffers_that_are_swapped_for_longer_ones(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("queue", torch.zeros(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        loss = model(torch.ones(3, 2)).square().mean()
        model.queue.data = torch.cat([model.queue, loss.detach()[None]])
        return loss

    run = record(model, optimizer, [step] * 4, tmp_path)
    assert run.series("queue", "buffer", "count").values.tolist() == [3, 4, 5, 6]
    assert len(model.queue) == 6


def test_buffers_that_are_not_there_yet(tmp_path):
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    x = torch.randn(8, 3)
    with clew.watch(model, out=tmp_path, budget="off", status=False) as watch:
        model(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    run = clew.open_run(watch.path)
    assert not list(run.faults())
    assert run.series("1.running_mean", "buffer", "count").values.tolist() == [4, 4]


def test_a_parameter_of_a_group_is_swapped_for_another(tmp_path):
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def swap():
        model.weight = nn.Parameter(torch.full((2, 2), 3.0))
        optimizer.param_groups[0]["params"] = [model.weight]
        return step()

    def step():
        return model(torch.ones(1, 2)).mean()

    run = record(model, optimizer, [step, swap, step], tmp_path)
    assert run.series("weight", "param", "max").values[-1] == 3.0


def test_the_gradient_norm_passes_over_a_gradient_without_elements(tmp_path):
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.ModuleDict({"none": nn.Linear(0, 3), "some": nn.Linear(2, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        return (model["none"](torch.ones(4, 0)) + model["some"](torch.ones(4, 2))).sum()

    run = record(model, optimizer, [step], tmp_path)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert run.scalars()["grad_norm"].values.tolist() == pytest.approx([norm])


def test_a_part_that_was_tried_alone_is_named_with_its_model(tmp_path):
    class Net(nn.Module):
        def __init__(self, encoder):
            super().__init__()
            self.encoder, self.head = encoder, nn.Linear(3, 1)

        def forward(self, x):
            return self.head(self.encoder(x))

    with clew.watch(out=tmp_path, budget="off", status=False) as watch:
        encoder = nn.Sequential(nn.Linear(2, 3))
        encoder(torch.zeros(1, 2))
        net = Net(encoder)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(4, 2)).mean().backward()
        optimizer.step()
    run = clew.open_run(watch.path)
    assert len(run.series("encoder.0.weight", "param", "l2").values) == 1
    assert len(run.series("encoder", "output", "l2").values) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_frozen_script_has_no_mode(tmp_path):
    teacher = torch.jit.freeze(torch.jit.script(nn.Linear(2, 2).eval()))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 2)
    with clew.watch(out=tmp_path, budget="off", status=False) as watch:
        for _ in range(2):
            optimizer.zero_grad()
            (model(x) - teacher(x)).square().mean().backward()
            optimizer.step()
    assert not list(clew.open_run(watch.path).faults())


def test_an_optimizer_without_a_learning_rate(tmp_path):
    class Shrink(torch.optim.Optimizer):
        def step(self, closure=None):
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(group["factor"])

    model = nn.Linear(2, 1)
    optimizer = Shrink(model.parameters(), {"factor": 0.5})
    run = record(model, optimizer, [lambda: model(torch.ones(3, 2)).mean()] * 3, tmp_path)
    assert run.series("weight", "update", "l2").steps.tolist() == [0, 1, 2]
    assert run.scalars()["group.factor"].values.tolist() == [0.5]


def test_models_that_live_together_under_one_name_keep_their_parts_apart(record):
    """Each of a list of models is trained by a function, where all are called the same."""

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    models = [torch.nn.Sequential(torch.nn.Linear(3, 1)) for _ in range(3)]
    with record() as memory:
        for each in models:
            train(each)
    names = [memory.names(step=step, kind="output") for step in (0, 2, 4)]
    assert names == [["0", "(model)"], ["model.0", "model"], ["model#2.0", "model#2"]]
    for step, prefix in ((0, ""), (2, "model."), (4, "model#2.")):
        # Behind them stand the last weights of the model before, whose optimizer is gone.
        assert memory.names(step=step, kind="param")[:2] == [f"{prefix}0.weight", f"{prefix}0.bias"]
        assert memory.names(step=step, kind="grad") == [f"{prefix}0.weight", f"{prefix}0.bias"]
    parents = {
        site.name: memory.sites[site.parent].name for site in memory.sites.values() if site.parent >= 0
    }
    assert parents["model#2.0.weight"] == "model#2.0"


def test_layers_that_give_objects_of_their_own_are_told_of_together(tmp_path):
    class Box:
        def __init__(self, tensor):
            self.tensor = tensor

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, box):
            return Box(self.inner(box.tensor))

    model = nn.Sequential(*(Layer() for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(
        model, optimizer, [lambda: model(Box(torch.ones(3, 2))).tensor.square().mean()] * 2, tmp_path
    )
    (note,) = [note for note in run.info.notes if note.startswith("not seen")]
    assert note.startswith("not seen: 0, 1, 2, 3, 3 more: it gives an object of class ")
    assert note.endswith("Box, which is not looked into")
    assert len(run.series("5.inner", "grad_output", "l2")) == 2
