"""How many steps a run has: what the user would count, whatever happens after the last of them."""

import time

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap

import clew
from clew.views.run_page import make_page
from clew.views.site_table import make_page as make_site_table


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()


def record(tmp_path, training):
    with clew.watch(out=str(tmp_path), name="run") as watch:
        training()
    (listed,) = clew.list_runs(tmp_path)
    run = clew.open_run(watch.path)
    assert listed.steps == len(run.ended_steps)
    return run


def say_steps(run):
    """Return what ``clew show`` says of the steps."""
    rows = next(block.rows for block in make_page(run).blocks if hasattr(block, "rows"))
    return {name: cell.value for name, cell in rows}["steps"]


def test_an_evaluation_after_the_last_step_is_kept_and_no_step(tmp_path):
    def training():
        model = make()
        train(model, torch.optim.SGD(model.parameters(), 0.1), 3)
        with torch.no_grad():
            model.eval()(torch.full((2, 4), 7.0))

    run = record(tmp_path, training)
    assert run.ended_steps.tolist() == [0, 1, 2]
    assert say_steps(run) == "3 and an evaluation"
    assert run.steps.tolist() == [0, 1, 2, 3]
    after = run.stats("batch.0", step=3)
    assert after["mean"].tolist() == [7.0]
    assert run.scalar("clew.evaluation").values.tolist() == [1.0]


def test_a_step_that_an_exception_cuts_off_is_kept_and_no_step(tmp_path):
    def training():
        model = make()
        train(model, torch.optim.SGD(model.parameters(), 0.1), 3)
        loss = model(torch.randn(6, 4)).square().mean()
        raise FloatingPointError(f"the loss is {loss}")

    with pytest.raises(FloatingPointError):
        record(tmp_path, training)
    run = clew.open_run(tmp_path / "run")
    assert len(run.ended_steps) == 3
    assert say_steps(run) == "3 and one that did not end"
    assert "Run(" in repr(run)
    assert "3 steps" in repr(run)


class ByHand:
    """An optimizer that torch knows nothing of."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        for parameter in self.parameters:
            parameter.sub_(0.1 * parameter.grad)


def test_a_loop_by_hand_and_one_with_an_optimizer_after_it_are_both_counted(tmp_path):
    def training():
        for choose in (ByHand, lambda parameters: torch.optim.SGD(parameters, 0.1)):
            model = make()
            train(model, choose(model.parameters()), 4)

    run = record(tmp_path, training)
    assert len(run.ended_steps) == 8
    assert say_steps(run) == "8"


def test_a_transform_by_the_weights_is_a_step_and_other_transforms_are_none(tmp_path):
    def training():
        model = make()
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(weights, x):
            twice = functional_call(model, weights, x[None]) + functional_call(model, weights, -x[None])
            return twice.square().sum()

        for _ in range(5):
            gradients = vmap(grad(loss), (None, 0))(weights, torch.randn(3, 4))
            weights = {name: w - 0.1 * gradients[name].mean(0) for name, w in weights.items()}
            with torch.no_grad():
                functional_call(model, weights, torch.ones(1, 4))
        stacked, buffers = stack_module_state([make(), make()])
        vmap(lambda w, b: functional_call(model, (w, b), torch.ones(1, 4)))(stacked, buffers)
        jacrev(model)(torch.ones(4))
        jacrev(model)(torch.ones(4))

    run = record(tmp_path, training)
    assert len(run.ended_steps) == 5
    assert say_steps(run) == "5"


def test_steps_inside_a_transform_leave_no_statistics_and_the_words_say_so(tmp_path):
    def training():
        model = make()
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        slope = grad(lambda weights, x: functional_call(model, weights, x).square().mean())
        for _ in range(5):
            gradients = slope(weights, torch.randn(3, 4))
            weights = {name: w - 0.1 * gradients[name] for name, w in weights.items()}

    run = record(tmp_path, training)
    assert say_steps(run) == "5, no statistics of them"
    assert make_site_table(run, step=3).blocks[-1].empty == "no statistics were recorded"


def test_calls_are_steps_where_nothing_is_trained(tmp_path):
    def training():
        model = make().eval()
        with torch.no_grad():
            for _ in range(4):
                model(torch.randn(6, 4))

    assert len(record(tmp_path, training).ended_steps) == 4


def test_a_batch_belongs_to_its_own_step_where_the_step_before_has_none(tmp_path):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with clew.watch(model, optimizer, out=str(tmp_path), name="run", every=2, warmup=0) as run:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).mean().backward()
            optimizer.step()
    record = clew.open_run(run.path)
    assert record.faults() == []
    assert record.batches()["step"].tolist() == [0, 2, 4]


def test_what_a_script_does_before_its_first_step_is_no_part_of_a_step(tmp_path):
    def training():
        time.sleep(0.2)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        time.sleep(0.2)
        train(model, optimizer, 3)

    run = record(tmp_path, training)
    start = run.scalar("start_seconds")
    assert start.steps.tolist() == [0]
    assert start.last >= 0.4
    assert run.scalar("time.rest").values[0] < start.last
    facts = [row for block in make_page(run).blocks for row in getattr(block, "rows", ())]
    assert (
        next(
            cell.value for name, cell in (f for f in facts if len(f) == 2) if name == "before the first step"
        )
        == start.last
    )


@pytest.mark.parametrize(("settings", "first"), [({}, 20), ({"warmup": 5}, 5), ({"warmup": 0}, 0)])
def test_every_nth_step_is_recorded_and_all_of_the_first_as_the_settings_say(tmp_path, settings, first):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with clew.watch(model, out=tmp_path, name="run", every=10, snapshots="off", **settings) as watch:
        train(model, optimizer, 45)
    recorded = {*clew.open_run(watch.path).stats(columns=["l2"])["step"].tolist()}
    assert recorded == {*range(first), *range(0, 45, 10)}
