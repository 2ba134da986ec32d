"""A bad step is explained with what the user's own torch-function modes do, and on the lines of the script."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import clew


class Listening(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Meddling(TorchFunctionMode):
    is_on = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        given = function(*args, **(kwargs or {}))
        if self.is_on and function is torch.nn.functional.relu:
            return given / torch.zeros(())  # here
        return given


@pytest.mark.parametrize("mode", [Listening, Meddling])
def test_step_under_a_mode(mode, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number):
        Meddling.is_on = number == 2
        loss = model(torch.ones(5, 3)).square().mean()
        if mode is Listening and number == 2:
            loss = (loss * 0).log()  # there
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with clew.watch(model, out=tmp_path, name="bad", budget="off", snapshots="off") as run, mode():
        for number in range(3):
            step(number)
    Meddling.is_on = False
    (verdict,) = clew.open_run(run.path).verdicts()
    assert (verdict["found"], verdict["replay"], verdict["step"]) == (True, "identical", 2)
    assert verdict["source"]["text"].endswith("# here" if mode is Meddling else "# there")
