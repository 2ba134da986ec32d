"""Loops that begin again in the middle: optimizers made anew, backward passes that raise and are borne with."""

import pytest
import torch

LOOPS = {
    "anew": (torch.optim.SGD,),
    "anew, several": (torch.optim.SGD, torch.optim.SGD),
    "anew, of two kinds": (torch.optim.SGD, torch.optim.Adam),
}


@pytest.mark.parametrize("kinds", LOOPS.values(), ids=LOOPS)
def test_optimizers_that_are_made_anew_go_on_with_their_curves(kinds, record):
    model = torch.nn.Linear(3, 1)
    expected = {ordinal: [] for ordinal in range(len(kinds))}
    with record(model) as memory:
        for epoch in range(3):
            optimizers = [
                kind(model.parameters(), lr=0.1 / (1 + epoch + 10 * at)) for at, kind in enumerate(kinds)
            ]
            # A scheduler ties its optimizer into a cycle, so that the old ones stay in memory for a while.
            schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in optimizers]
            for _ in range(3):
                for ordinal, optimizer in enumerate(optimizers):
                    optimizer.zero_grad()
                    model(torch.randn(4, 3)).square().mean().backward()
                    optimizer.step()
                    expected[ordinal].append(optimizer.param_groups[0]["lr"])
                for scheduler in schedulers:
                    scheduler.step()
    assert lrs(memory) == expected


def test_an_optimizer_that_steps_again_after_another_took_its_place_has_a_curve_of_its_own(record):
    model = torch.nn.Linear(3, 1)

    def step(optimizer):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()

    with record(model) as memory:
        first = torch.optim.SGD(model.parameters(), lr=0.1)
        step(first)
        second = torch.optim.SGD(model.parameters(), lr=0.2)
        for optimizer in (second, first, second, first):
            step(optimizer)
    assert sorted(lrs(memory).values()) == [[0.1, 0.1], [0.1, 0.2, 0.2]]


def test_a_second_model_with_the_names_of_the_first_goes_on_with_its_curve(record):
    with record() as memory:
        for fold in range(3):
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + fold)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
    assert lrs(memory) == {0: [0.1, 0.1, 1.1, 1.1, 2.1, 2.1]}


def lrs(memory):
    found = {}
    for step in memory.records:
        for scalar in step.scalars:
            if scalar.name == "lr":
                found.setdefault(scalar.ordinal, []).append(scalar.value)
    return found


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("no memory for this batch")


def test_a_backward_that_raises_and_is_tried_again_leaves_the_loss_of_the_second(record):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model) as memory:
        for step in range(3):
            for part in range(2):
                loss = model(torch.ones(4, 3)).mean() * 0 + 10 * step + part
                if step == part == 1:
                    with pytest.raises(MemoryError):
                        (Failing.apply(loss) + 1000).backward()
                loss.backward()
            optimizer.step()
    assert [value for _, value in memory.scalars("loss")] == [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]
    losses = [scalar for record in memory.records for scalar in record.scalars if scalar.name == "loss"]
    assert [scalar.ordinal for scalar in losses] == [0, 1] * 3


def test_a_backward_that_ends_the_training_leaves_its_loss(record):
    model = torch.nn.Linear(3, 1)
    with record(model) as memory, pytest.raises(MemoryError):
        (Failing.apply(model(torch.ones(4, 3)).mean() * 0) + 1000).backward()
    assert memory.scalars("loss") == [(0, 1000.0)]


def test_a_backward_that_raises_is_no_step_of_a_loop_by_hand(record):
    model = torch.nn.Linear(3, 1)
    with record(model) as memory:
        for turn in range(6):
            loss = model(torch.ones(4, 3)).mean() * 0 + turn
            try:
                (Failing.apply(loss) if turn % 3 == 1 else loss).backward()
            except MemoryError:
                continue
            with torch.no_grad():
                model.weight -= 0.1 * model.weight.grad
    assert memory.scalars("loss") == [(0, 0.0), (1, 2.0), (2, 3.0), (3, 5.0)]


def test_groups_that_are_added_later_have_curves_of_their_own(record):
    models = [torch.nn.Linear(3, 1) for _ in range(2)]
    more = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    with record(*models) as memory:
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=lr) for model, lr in zip(models, (1.0, 2.0), strict=True)
        ]
        optimizers[0].add_param_group({"params": [more[0]], "lr": 1.5})
        for turn in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                (model(torch.ones(4, 3)).mean() + sum(more)).backward()
                optimizer.step()
            if turn == 0:
                optimizers[1].add_param_group({"params": [more[1]], "lr": 2.5})
    assert sorted(lrs(memory).values()) == [[1.0] * 3, [1.5] * 3, [2.0] * 3, [2.5] * 2]
