"""Time, memory, compilation and the number of steps."""

import mmap

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


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, wait):
        self.data = Slow(wait)

    def __iter__(self):
        return (self.data[index] for index in range(256))


def collate(wait):
    def join(samples):
        wait()
        return torch.utils.data.default_collate(samples)

    return join


WAITING = {
    "in the dataset": lambda wait: from_loader(Slow(wait)),
    "in a stream": lambda wait: from_loader(Stream(wait)),
    "when batches are put together": lambda wait: from_loader(Slow(lambda: None), collate_fn=collate(wait)),
}


@pytest.mark.parametrize("spelling", WAITING)
def test_waiting_for_data(judge, hand_clock, spelling):
    judged = judge(lambda: WAITING[spelling](lambda: hand_clock.sleep(0.03)))
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


def compiled_with_a_number(numbers):
    """Compile a function of a plain number, which becomes part of the graph."""
    torch._dynamo.reset()
    model, (x, y) = mlp(), blobs(32)
    call = torch.compile(lambda x, names: model(x) * len(names), backend="eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in numbers:
        optimizer.zero_grad()
        F.cross_entropy(call(x, ["name"] * number), y).backward()
        optimizer.step()
    torch._dynamo.reset()


def compiled_with_a_switch(numbers):
    torch._dynamo.reset()
    model, (x, y) = mlp(), blobs(32)
    model.level = 0
    call = torch.compile(lambda x: model(x) + model.level, backend="eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in numbers:
        model.level = f"{number}".count("1") + number * 0.5
        optimizer.zero_grad()
        F.cross_entropy(call(x), y).backward()
        optimizer.step()
    torch._dynamo.reset()


@pytest.mark.parametrize("train", [compiled, compiled_with_a_number, compiled_with_a_switch])
def test_compiled_again_and_again(judge, train):
    assert judge(lambda: train(range(16, 23))).ids == ["T04"]
    assert judge(lambda: train([16] * 5 + [7, 16])).ids == []


def fresh():
    """Return 4 MB that the process has not held before: what was freed earlier must not hide a growth."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, 4 << 20, flags=private), dtype=torch.float32).fill_(1e-6)


def train_with(step):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(40):
        optimizer.zero_grad()
        output = model(torch.randn(16, 8))
        output.square().mean().backward()
        optimizer.step()
        step(number, output)


def keep_in_a_list(keeps):
    kept = []
    train_with(lambda _, output: kept.append(fresh()) if keeps else fresh())


def keep_graphs(keeps):
    total, scale = [0.0], torch.ones((), requires_grad=True)

    def add(_, output):
        value = (scale * fresh()).sum()
        total[0] = total[0] + (value if keeps else value.item())

    train_with(add)


def keep_in_a_cache(keeps):
    cache = {}
    train_with(lambda number, output: cache.__setitem__(number if keeps else 0, fresh()))


@pytest.mark.parametrize("train", [keep_in_a_list, keep_graphs, keep_in_a_cache])
def test_memory_that_grows(judge, monkeypatch, train):
    monkeypatch.setattr(
        "clew.capture.torch.recorder._MEMORY_SECONDS", -1.0
    )  # read in every step, not by the clock
    judged = judge(lambda: train(True))
    assert judged.ids == ["T03"], judged
    assert judged["T03"].evidence["bytes_a_step"] > 3e6
    assert judge(lambda: train(False)).ids == []


def in_half(model, scale, loss=lambda output: output.float().square().mean()):
    """Train float16 weights on a loss that is so small that its gradients are not numbers any more."""
    model = model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(8):
        optimizer.zero_grad()
        (loss(model(torch.randn(32, 8).half())) * scale).backward()
        optimizer.step()


UNDERFLOW = {
    "linear": lambda scale: in_half(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64)), scale),
    "convolution": lambda scale: in_half(
        nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 16, 3), nn.Tanh(), nn.Conv1d(16, 16, 3)), scale
    ),
    "absolute error": lambda scale: in_half(
        nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 32)),
        scale,
        lambda out: out.float().abs().mean(),
    ),
}


@pytest.mark.parametrize("spelling", UNDERFLOW)
def test_underflow(judge, spelling):
    judged = judge(lambda: UNDERFLOW[spelling](1e-5))
    assert judged.ids == ["N09"], judged
    assert "N09" not in judge(lambda: UNDERFLOW[spelling](100.0)).all_ids


PLANNED = {
    "plain": lambda steps: fit(mlp(), steps=steps),
    "regression": lambda steps: fit(
        mlp(classes=1), (blobs()[0], blobs()[0][:, :1]), loss=F.mse_loss, lr=0.01, steps=steps
    ),
    "a loader that drops the last batch": lambda steps: from_loader(
        Slow(lambda: None), steps, drop_last=True
    ),
}


@pytest.mark.parametrize("spelling", PLANNED)
def test_fewer_steps_than_planned(tmp_path, spelling):
    import clew

    def run(steps, name):
        with clew.watch(out=str(tmp_path), name=name) as watch:
            watch.log(expected_steps=20)
            PLANNED[spelling](steps)
        return clew.diagnose(str(watch.path))

    assert [finding.id for finding in run(12, "short").findings] == ["P04"]
    assert run(20, "whole").findings == ()


def test_without_a_plan_nothing_is_said(judge):
    judged = judge(lambda: fit(nn.Linear(8, 3), steps=5))
    assert {"P04": "how many steps were planned is not known"}.items() <= {
        each.id: each.why for each in judged.diagnosis.not_checked
    }.items()
