"""Updates written by hand: what they did to the weights, and when their steps end beside optimizers."""

from collections import Counter

import pytest
import torch
from torch import nn

import clew

SGD = torch.optim.SGD


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def lose(model):
    return model(torch.randn(6, 3)).square().mean()


def write(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.sub_(0.1 * parameter.grad)


def write_through_data(parameters):
    for parameter in parameters:
        parameter.data.add_(parameter.grad, alpha=-0.1)


def train_by_hand(model, steps, *, by=write):
    for _ in range(steps):
        model.zero_grad()
        lose(model).backward()
        by(list(model.parameters()))


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        lose(model).backward()
        optimizer.step()


@pytest.mark.parametrize("by", [write, write_through_data])
def test_an_update_by_hand_is_recorded_as_one_of_an_optimizer_is(record, by):
    model, twin = make(), make()
    with record() as memory:
        torch.manual_seed(1)
        train_by_hand(model, 4, by=by)
    with record() as other:
        torch.manual_seed(1)
        train(twin, SGD(twin.parameters(), 0.1), 4)
    assert memory.steps == other.steps == [0, 1, 2, 3]
    for kind in ("param", "grad", "update", "buffer"):
        assert memory.names(kind=kind) == other.names(kind=kind), kind
        for mine, theirs in zip(memory.stats(kind=kind), other.stats(kind=kind), strict=True):
            assert mine["l2"] == pytest.approx(theirs["l2"], rel=1e-4, abs=1e-6), kind


def test_an_update_by_derivatives_is_recorded_without_gradients_that_were_left_over(record):
    model = make()
    with record() as memory:
        train_by_hand(model, 2)
        for _ in range(3):
            gradients = torch.autograd.grad(lose(model), list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(0.1 * gradient)
    assert memory.steps_of("0.weight", "update") == [0, 1, 2, 3, 4]
    assert memory.steps_of("0.weight", "grad") == [0, 1]


def test_a_thinned_run_tells_the_updates_of_the_steps_it_records(record):
    model = make()
    befores = []

    def note(parameters):
        befores.append(parameters[0].detach().clone())
        write_through_data(parameters)
        befores.append(parameters[0].detach().clone())

    with record(every=3, warmup_steps=0) as memory:
        train_by_hand(model, 7, by=note)
    assert memory.steps_of("0.weight", "update") == [0, 3, 6]
    moved = [float((befores[2 * step + 1] - befores[2 * step]).norm()) for step in (0, 3, 6)]
    assert [each["l2"] for each in memory.stats(site="0.weight", kind="update")] == pytest.approx(
        moved, rel=1e-3
    )


def test_several_passes_of_one_update_leave_the_gradients_of_all(record):
    model = make()
    with record() as memory:
        for _ in range(2):
            model.zero_grad()
            output = model(torch.randn(6, 3))
            output.square().mean().backward(retain_graph=True)
            output.abs().mean().backward()
            expected = float(model[0].weight.grad.norm())
            write(list(model.parameters()))
    assert memory.stats(site="0.weight", kind="grad")[-1]["l2"] == pytest.approx(expected)


@pytest.mark.parametrize("by", [write, write_through_data])
@pytest.mark.parametrize("every", [1, 5])
def test_training_by_hand_after_an_optimizer_has_steps_of_its_own(record, every, by):
    first, second = make(), make()
    optimizer = SGD(first.parameters(), 0.1)
    with record(every=every, warmup_steps=0) as memory:
        train(first, optimizer, 20)
        train_by_hand(second, 20, by=by)
        train(first, optimizer, 5)
    assert memory.session.recorder.ended == 45
    assert len(memory.scalars("loss")) == 45
    assert max(Counter(step for step, _ in memory.scalars("loss")).values()) == 1
    told = [step for step in range(21, 40) if step % every == 0]
    assert [step for step in memory.steps_of("model.0.weight", "update") if step > 20] == told


def test_training_by_hand_goes_on_with_the_model_of_an_optimizer_that_is_gone(record):
    model = make()
    with record() as memory:
        train(model, SGD(model.parameters(), 0.1), 5)
        train_by_hand(model, 5)
    assert memory.session.recorder.ended == 10


def test_updates_by_hand_and_of_an_optimizer_take_turns(record):
    maker, judge = make(), make()
    optimizer = SGD(judge.parameters(), 0.1)
    with record() as memory:
        for _ in range(6):
            train(judge, optimizer, 1)
            train_by_hand(maker, 1)
    assert memory.session.recorder.ended == 12
    assert memory.steps_of("0.weight", "update") == [0, 2, 4, 6, 8, 10]
    assert memory.steps_of("model.0.weight", "update") == [3, 5, 7, 9, 11]


def test_a_loader_between_updates_by_hand_changes_nothing(record):
    first, second = make(), make()
    optimizer = SGD(first.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.randn(30, 3), batch_size=5)
    with record() as memory:
        train(first, optimizer, 4)
        for x in loader:
            second.zero_grad()
            second(x).square().mean().backward()
            write(list(second.parameters()))
    assert memory.session.recorder.ended == 10


# ---------------------------------------------------------------- between a pass and its update


def train_with(between):
    """Train by hand, do something before each update, and return by how much each update moved the first weight."""
    model, moved = make(), []
    for _ in range(4):
        model.zero_grad()
        lose(model).backward()
        between(model)
        before = model[0].weight.detach().clone()
        write(list(model.parameters()))
        moved.append(float((model[0].weight.detach() - before).norm()))
    return moved


def take_a_metric(model):
    torch.nn.L1Loss()(model[0].bias.detach(), torch.zeros(4))


def evaluate(model):
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 3))
    model.train()


def try_a_longer_way(model):
    with torch.no_grad():
        for sign in (1, -1):
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=sign)
            model(torch.ones(2, 3))


@pytest.mark.parametrize("between", [take_a_metric, evaluate, try_a_longer_way])
def test_calls_before_the_update_end_no_step(record, between):
    with record() as memory:
        moved = train_with(between)
    assert memory.session.recorder.ended == 4
    found = [each["l2"] for each in memory.stats(site="0.weight", kind="update")]
    assert found == pytest.approx(moved, rel=1e-3)


def test_reading_a_weight_that_is_computed_ends_no_step(record):
    with record() as memory:
        model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))
        for _ in range(3):
            model.zero_grad()
            lose(model).backward()
            model[0].weight.norm().item()
            write(list(model.parameters()))
    assert memory.session.recorder.ended == 3
    moved = [each["l2"] for each in memory.stats(site="0.bias", kind="update")]
    assert len(moved) == 3
    assert min(moved) > 0


def test_an_update_that_puts_new_parameters_in_their_places_is_measured(record):
    def replace(model):
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter((layer.weight - 0.1 * layer.weight.grad).detach())

    model, moved = make(), []
    with record() as memory:
        for _ in range(4):
            model.zero_grad()
            lose(model).backward()
            before = model[0].weight.detach()
            replace(model)
            moved.append(float((model[0].weight.detach() - before).norm()))
    found = memory.stats(site="0.weight", kind="update")
    assert [each["l2"] for each in found] == pytest.approx(moved, rel=1e-3)


def test_an_update_inside_the_pass_leaves_no_row_rather_than_zeros(record):
    def descend(parameter):
        parameter.data.sub_(parameter.grad)
        parameter.grad = None

    model = make()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
    with record() as memory:
        for _ in range(3):
            lose(model).backward()
    assert memory.session.recorder.ended == 3
    assert memory.names(kind="update") == []


def test_passes_without_an_update_leave_no_updates(record):
    model = make()
    with record() as memory:
        for _ in range(3):
            lose(model).backward()
    assert memory.session.recorder.ended == 3
    assert memory.names(kind="update") == []


def test_derivatives_by_the_batch_are_no_step(record):
    model = make()
    with record() as memory:
        for _ in range(3):
            model.zero_grad()
            x = torch.randn(6, 3, requires_grad=True)
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (slope.square().mean() + model(x).square().mean()).backward()
            write(list(model.parameters()))
            x = torch.randn(6, 3, requires_grad=True)
            torch.autograd.grad(model(x).sum(), x)
    assert memory.session.recorder.ended == 3
    assert [step for step, _ in memory.scalars("loss")] == [0, 1, 2]


def test_a_parameter_made_in_inference_mode_is_no_trouble(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 1)
            with torch.inference_mode():
                self.body = nn.Linear(3, 4)

        def forward(self, x):
            with torch.no_grad():
                hidden = self.body(x).clone()
            return self.head(hidden)

    model = Model()
    with clew.watch(model, out=tmp_path, budget="off", status=False) as watch:
        for _ in range(3):
            model.zero_grad()
            lose(model).backward()
            write(list(model.head.parameters()))
    run = clew.open_run(watch.path)
    assert run.faults() == []
    updates = run.series("head.weight", "update", "l2")
    assert len(updates) == 3
    assert all(0 < value < 10 for value in updates.values)


def test_several_batches_of_validation_are_one_evaluation(record):
    model = make()
    with record() as memory:
        for _ in range(3):
            train_by_hand(model, 2)
            for _ in range(4):
                evaluate(model)
    assert memory.session.recorder.ended == 6
    assert [step for step, _ in memory.scalars("loss")] == list(range(6))


def test_a_step_that_an_exception_cuts_off_before_its_update_has_not_ended(tmp_path):
    model = make()
    with pytest.raises(ZeroDivisionError), clew.watch(out=tmp_path, name="cut", status=False):
        train_by_hand(model, 2)
        lose(model).backward()
        1 / 0  # noqa: B018
    assert clew.open_run(tmp_path / "cut").ended_steps.tolist() == [0, 1]


def test_steps_by_hand_far_apart_are_all_told(record):
    judge, maker = make(), make()
    optimizer = SGD(judge.parameters(), 0.1)
    with record(every=7, warmup_steps=0) as memory:
        for _ in range(12):
            train(judge, optimizer, 20)
            train_by_hand(maker, 1)
    assert memory.session.recorder.ended == 12 * 21


def test_gradients_of_copies_that_an_optimizer_trains_count_once(record):
    model = make()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = SGD(masters, 0.1)
    norms = []
    with record() as memory:
        for _ in range(3):
            model.zero_grad()
            lose(model).backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.clone()
            norms.append(float(torch.stack([m.grad.norm() for m in masters]).norm()))
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
    assert [value for _, value in memory.scalars("grad_norm")] == pytest.approx(norms, rel=1e-4)


# ---------------------------------------------------------------- what is no step


def accumulate_with_a_forgotten_layer():
    model = make()
    optimizer = SGD(model[0].parameters(), 0.1)
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(3):
            lose(model).backward()
        optimizer.step()


def move_weights_and_back():
    """Sharpness-aware: the gradient of the second pass is taken elsewhere."""
    model = make()
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(6):
        lose(model).backward()
        moves = [0.05 * p.grad / (p.grad.norm() + 1e-9) for p in model.parameters()]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        lose(model).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()


def train_the_input():
    model, x = make(), torch.randn(6, 3, requires_grad=True)
    optimizer = SGD([x], 0.1)
    for _ in range(6):
        for _ in range(2):
            model(x).square().mean().backward()
        optimizer.step()


def follow_with_an_average():
    model, average = make(), make()
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(2):
            (lose(model) + average(torch.randn(6, 3)).detach().mean()).backward()
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
        optimizer.step()


def step_with_a_closure():
    model = make()
    optimizer = torch.optim.LBFGS(model[0].parameters(), max_iter=3)

    def closure():
        model.zero_grad()
        loss = model(torch.ones(6, 3)).square().mean() + model[0].weight.square().sum()
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)


def skip_by_a_scaler():
    model = make()
    optimizer = SGD(model[0].parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(lose(model)).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    "loop",
    [
        accumulate_with_a_forgotten_layer,
        move_weights_and_back,
        train_the_input,
        follow_with_an_average,
        step_with_a_closure,
        skip_by_a_scaler,
    ],
)
def test_steps_of_optimizers_are_counted_as_before(record, loop):
    with record() as memory:
        loop()
    # The first step of an optimizer that holds nothing of a model is told from one by hand when it has stepped.
    assert memory.session.recorder.ended == 6 + (loop is train_the_input)
