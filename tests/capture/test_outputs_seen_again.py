"""Modules that return a tensor which was seen before: the same numbers if it is as it was, its own if not."""

import pytest
import torch
from torch import nn

from clew.capture.torch import recorder as recorders
from clew.stats.rows import KERNEL

WAYS = ["compiled"] * (KERNEL is not None) + ["slow"]
MODES = {"train": 0, "eval": 1}


class Residual(nn.Module):
    """Five modules between a tensor and the shortcut that returns it, as in a usual block."""

    def __init__(self, *, writes=False):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = nn.Sequential(
            nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(inplace=True)
        )
        self.shortcut = nn.Identity()
        self.last = nn.Linear(6, 1)
        self.writes = writes

    def forward(self, x):
        x = self.first(x)
        y = self.inner(x.clone())
        if self.writes:
            x.mul_(3)
        return self.last(y + self.shortcut(x))


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Record by the compiled way, and by its slow twin."""
    if request.param == "slow":
        monkeypatch.setattr(recorders.Recorder, "_make_tray", lambda _: None)
    return request.param


def _note(model, x):
    """Return the largest magnitude of each output, as it is returned, and of the gradient there."""
    outputs, gradients, handles = {}, {}, []

    def see(name, output):
        outputs[name] = output.detach().abs().max().item()
        if output.requires_grad:
            output.register_hook(lambda g: gradients.__setitem__(name, g.abs().max().item()))

    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(lambda _m, _x, y, name=name: see(name, y)))
    loss = model(x).square().mean()
    if loss.requires_grad:
        loss.backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return outputs, gradients


def _read(memory, step, kind, mode):
    return {
        name.replace("(m0)", ""): stats["abs_max"]
        for at, name, _, _, row_mode, stats in memory.rows(kind=kind)
        if at == step and row_mode == mode
    }


def _approximately(expected):
    return {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}


@pytest.mark.parametrize("writes", [False, True])
def test_a_shortcut_has_the_numbers_of_the_tensor_it_returns(record, way, writes):
    torch.manual_seed(4)
    model, x = Residual(writes=writes), torch.randn(8, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    repeated = []
    with record(model, optimizers=[optimizer]) as memory:
        recorder = memory.session.recorder
        for _ in range(3):
            loss = model(x).square().mean()
            repeated.append(len(recorder.copies))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.manual_seed(4)
    model = Residual(writes=writes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        expected = _note(model, x)
        for kind, numbers in zip(("output", "grad_output"), expected, strict=True):
            found = _read(memory, step, kind, MODES["train"])
            assert _approximately(numbers) == {name: found[name] for name in numbers}, (step, kind)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # The inner stack and the model return what their last modules did, and the shortcut what the first one did.
    assert repeated == [2 if writes else 3] * 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_written_in_place_in_an_evaluation_has_its_own_numbers(record, way, mode):
    torch.manual_seed(5)
    model, x = Residual(), torch.randn(8, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizers=[optimizer]) as memory:
        for step in range(2):
            if step:
                model.eval()
                with mode():
                    model(x)
                model.train()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.manual_seed(5)
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()
    with mode():
        expected, _ = _note(model.eval(), x)
    found = _read(memory, 1, "output", MODES["eval"])
    assert _approximately(expected) == {name: found[name] for name in expected}


def test_a_tensor_seen_long_ago_is_measured_anew(record, way):
    class Far(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.stack = nn.ModuleList([nn.Tanh() for _ in range(9)])
            self.shortcut = nn.Identity()

        def forward(self, x):
            x = y = self.first(x)
            for layer in self.stack:
                y = layer(y)
            return self.shortcut(x) + y

    torch.manual_seed(6)
    model, x = Far(), torch.randn(4, 3)
    expected = _note(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizers=[optimizer]) as memory:
        recorder = memory.session.recorder
        loss = model(x).square().mean()
        assert not recorder.copies
        loss.backward()
        optimizer.step()
    for kind, numbers in zip(("output", "grad_output"), expected, strict=True):
        found = _read(memory, 0, kind, MODES["train"])
        assert _approximately(numbers) == {name: found[name] for name in numbers}, kind
