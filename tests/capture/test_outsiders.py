"""Parameters that no optimizer holds: frozen, forgotten, a teacher's; read once, and again when they are written."""

import pytest
import torch
from torch import nn

from clew.capture.torch.outsiders import Outsiders

SGD = torch.optim.SGD


def make():
    """Return a net whose first layer is frozen and whose second one will be forgotten."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    return model


def train(model, *optimizers, steps=4, before=lambda step: None):
    for step in range(steps):
        before(step)
        model.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def test_frozen_weights_are_read_once_and_forgotten_ones_show_their_gradients(record):
    model = make()
    with record() as memory:
        train(model, SGD(model[4].parameters(), 0.1))
    assert memory.steps_of("0.weight", "param") == memory.steps_of("2.bias", "param") == [0]
    assert memory.steps_of("0.weight", "grad") == []
    assert memory.steps_of("2.weight", "grad") == memory.steps_of("4.weight", "param") == [0, 1, 2, 3]
    (frozen,) = memory.stats(site="0.weight", kind="param")
    assert frozen["l2"] == pytest.approx(float(model[0].weight.norm()))
    assert memory.stats(site="2.weight", kind="grad")[-1]["l2"] == pytest.approx(
        float(model[2].weight.grad.norm())
    )
    assert set(memory.names(kind="update")) == {"4.weight", "4.bias"}
    assert all(
        entry.shadow is None
        for entry, _ in memory.session.recorder.registry.living_parameters()
        if "4" not in entry.name
    )


def test_the_norm_of_the_gradients_is_that_of_the_ones_that_are_used(record):
    model = make()
    with record() as memory:
        train(model, SGD(model[4].parameters(), 0.1), steps=1)
    used = torch.cat([parameter.grad.flatten() for parameter in model[4].parameters()])
    assert memory.scalars("grad_norm")[0][1] == pytest.approx(float(used.norm()), rel=1e-6)


def test_a_weight_is_read_again_when_it_was_written_or_replaced(record):
    model = make()
    first = model[0].weight

    def change(step):
        if step == 2:
            with torch.no_grad():
                model[0].bias.add_(1)
        if step == 3:
            model[0].weight = nn.Parameter(torch.full((8, 4), 2.0), requires_grad=False)

    with record() as memory:
        train(model, SGD(model[4].parameters(), 0.1), before=change)
    assert first.shape == (8, 4)  # still there: the name alone tells that it is another tensor
    assert memory.steps_of("0.bias", "param") == [0, 2]
    assert memory.steps_of("0.weight", "param") == [0, 3]
    assert memory.stats(site="0.weight", kind="param")[-1]["mean"] == 2


def test_parameters_that_join_an_optimizer_are_recorded_once_a_step(record):
    model = make()
    one, two = SGD(model[4].parameters(), 0.1), SGD([torch.zeros(1, requires_grad=True)], 0.1)

    def join(step):
        if step == 2:
            model[0].requires_grad_(True)
            one.add_param_group({"params": list(model[0].parameters())})
            two.add_param_group({"params": list(model[2].parameters())})

    with record() as memory:
        train(model, one, two, before=join)
    assert memory.steps_of("0.weight", "param") == memory.steps_of("2.weight", "param") == [0, 2, 3]
    assert memory.steps_of("0.weight", "update") == memory.steps_of("2.weight", "update") == [2, 3]
    assert memory.steps_of("2.weight", "grad") == [0, 1, 2, 3]


def test_parameters_of_an_optimizer_that_is_gone_are_outside_again(record):
    model = make()
    with record() as memory:
        train(model, SGD(model[2].parameters(), 0.1), steps=2)
        train(model, SGD(model[4].parameters(), 0.1), steps=2)
    assert memory.steps_of("2.weight", "param") == [0, 1, 2]
    assert memory.steps_of("2.weight", "grad") == [0, 1, 2, 3]


def test_a_step_that_raised_and_is_tried_again_keeps_their_rows(record):
    class Flaky(SGD):
        tries = 0

        def step(self, closure=None):
            Flaky.tries += 1
            if Flaky.tries % 2:
                raise RuntimeError
            return super().step(closure)

    model = make()
    optimizer = Flaky(model[4].parameters(), 0.1)
    with record() as memory:
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            with pytest.raises(RuntimeError):
                optimizer.step()
            optimizer.step()
    assert memory.steps_of("2.weight", "param") == [0]
    assert memory.steps_of("2.weight", "grad") == memory.steps_of("4.weight", "grad") == [0, 1, 2]


def test_gradients_of_a_closure_are_read_after_it(record):
    model = make()
    optimizer = torch.optim.LBFGS(model[4].parameters(), max_iter=2)

    def closure():
        model.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        return loss

    with record() as memory:
        for _ in range(2):
            optimizer.step(closure)
    assert memory.steps_of("2.weight", "param") == [0]
    assert memory.steps_of("2.weight", "grad") == [0, 1]


def test_sites_and_kinds_are_obeyed(record):
    model = make()
    with record(sites=("0.*", "4.*"), kinds=("param",)) as memory:
        train(model, SGD(model[4].parameters(), 0.1), steps=2)
    assert set(memory.names()) == {"0.weight", "0.bias", "4.weight", "4.bias"}
    with record(kinds=("grad",)) as memory:
        train(model, SGD(model[4].parameters(), 0.1), steps=2)
    assert set(memory.names()) == {"2.weight", "2.bias", "4.weight", "4.bias"}


class Odd(nn.Module):
    """Parameters of every kind that no optimizer holds."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.table = nn.Embedding(5, 4, sparse=True)
        self.lazy = nn.LazyLinear(4)
        self.never = nn.LazyLinear(4)
        self.meta = nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
        with torch.inference_mode():
            self.inferred = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return self.head(self.table(torch.tensor([1, 1, 2])) + self.lazy(x))


def test_odd_parameters_are_measured_or_told_of(record):
    model = Odd()
    with record() as memory:
        train(model, SGD(model.head.parameters(), 0.1), steps=3)
    for site in ("table.weight", "lazy.weight", "lazy.bias", "inferred"):
        assert memory.steps_of(site, "param") == [0], site
    assert memory.steps_of("table.weight", "grad") == [0, 1, 2]
    assert memory.steps_of("never.weight", "param") == memory.steps_of("meta", "param") == []
    assert "meta" in memory.session.recorder.unseen
    assert not memory.session.recorder.guard.total


def test_gradients_are_told_without_the_scale_of_a_scaler(record):
    model = make()
    optimizer = SGD(model[4].parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with record() as memory:
        scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    (gradient,) = memory.stats(site="2.weight", kind="grad")
    assert gradient["l2"] == pytest.approx(float(model[2].weight.grad.norm()) / 1024)


def test_where_optimizers_hold_everything_no_parameter_is_looked_at(record, monkeypatch):
    looks = []
    monkeypatch.setattr(Outsiders, "list_living", lambda _: looks.append(1) or [])
    model = make()
    optimizer = SGD(model.parameters(), 0.1)
    with record() as memory:
        train(model, optimizer, steps=1)
        monkeypatch.undo()
        train(model, optimizer, steps=1)
        monkeypatch.setattr(Outsiders, "list_living", lambda _: looks.append(1) or [])
        before = len(looks)
        train(model, optimizer, steps=3)
    assert len(looks) == before
    assert memory.steps == [0, 1, 2, 3, 4]
