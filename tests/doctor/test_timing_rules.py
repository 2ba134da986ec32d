"""Time, memory, compilation and the number of steps."""

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, fit, mlp
from torch import nn


@pytest.fixture(scope="module", autouse=True)
def compiler_is_there():
    """Compile once: torch changes itself on the first use, which is not of clew's doing."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))


class Slow(torch.utils.data.Dataset):
    def __init__(self, wait):
        self.data = blobs(256)
        self.wait = wait

    def __len__(self):
        return 256

    def __getitem__(self, index):
        if index % 4 == 0:
            self.wait()
        return self.data[0][index], self.data[1][index]


def from_loader(data, steps=60, **settings):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = 0
    while done < steps:
        for x, y in torch.utils.data.DataLoader(data, batch_size=4, **settings):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            done += 1
            if done == steps:
                break


def test_waiting_for_data(judge, hand_clock):
    judged = judge(lambda: from_loader(Slow(lambda: hand_clock.sleep(0.03))))
    assert judged.ids == ["T01"], judged
    assert judged["T01"].evidence["share_of_time"] > 0.5


def test_small_data_is_silent(judge, hand_clock):
    assert judge(lambda: from_loader(Slow(lambda: None))).ids == []


def compiled(sizes):
    torch._dynamo.reset()
    model = mlp()
    call = torch.compile(model, backend="eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = blobs()
    for size in sizes:
        optimizer.zero_grad()
        F.cross_entropy(call(x[:size]), y[:size]).backward()
        optimizer.step()
    torch._dynamo.reset()


def test_compiled_again_and_again(judge):
    assert judge(lambda: compiled(range(16, 24))).ids == ["T04"]
    assert judge(lambda: compiled([16] * 6 + [7, 16])).ids == []


def test_fewer_steps_than_planned(tmp_path):
    import clew

    def run(steps, name):
        model = mlp()
        with clew.watch(model, out=str(tmp_path), name=name) as watch:
            watch.log(expected_steps=20)
            fit(model, steps=steps)
        return clew.diagnose(str(watch.path))

    assert [finding.id for finding in run(12, "short").findings] == ["P04"]
    assert run(20, "whole").findings == ()


def test_without_a_plan_nothing_is_said(judge):
    judged = judge(lambda: fit(nn.Linear(8, 3), steps=5))
    assert {"P04": "how many steps were planned is not known"}.items() <= {
        each.id: each.why for each in judged.diagnosis.not_checked
    }.items()
