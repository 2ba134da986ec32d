"""Loops of many kinds: a step after a snapshot is executed again from there, bit for bit, or the reason why not."""

import json
import os

import pytest
import torch._dynamo  # noqa: F401 - wraps torch.manual_seed when first imported, which is not of our doing

import clew
from clew.api.replay import execute_again
from zygote import Job

HEAD = """
import copy, io, random
from collections import deque
import numpy as np, torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
def measure(x, weight=1.0):
    return (model(x) - x[:, :1]).square().mean() * weight
"""

ADAM = HEAD + "optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)\n"
LEARN = "optimizer.zero_grad(); loss.backward(); optimizer.step()\n"

BODIES = {
    "an update by hand": HEAD
    + """
for turn in range(12):
    x = torch.randn(6, 4)
    loss = measure(x, weight=1 + turn)
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.01 * weight.grad
            weight.grad = None
""",
    "an update by hand with momentum, batches of a loader": HEAD
    + """
velocity = [torch.zeros_like(each) for each in model.parameters()]
def train(loader):
    for epoch in range(3):
        for (x,) in loader:
            loss = measure(x)
            model.zero_grad()
            loss.backward()
            for weight, speed in zip(model.parameters(), velocity):
                speed.mul_(0.9).add_(weight.grad)
                weight.data.sub_(0.01 * speed)
train(DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=6, shuffle=True))
""",
    "groups added later": HEAD
    + """
optimizer = torch.optim.SGD([{"params": model[0].parameters(), "lr": 1e-3}], lr=1e-2, momentum=0.9)
for turn in range(12):
    if turn == 3: optimizer.add_param_group({"params": model[4].parameters(), "weight_decay": 0.1})
    for group in optimizer.param_groups: group["lr"] *= 0.9
    loss = measure(torch.randn(6, 4)); """
    + LEARN,
    "a model saved and copied, with a counter of its own": HEAD
    + """
class Counting(nn.Module):
    def __init__(self): super().__init__(); self.inner = model; self.calls = 0
    def forward(self, x): self.calls += 1; return self.inner(x) * (1 + self.calls / 10)
net = Counting(); optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for turn in range(12):
    loss = net(torch.randn(6, 4)).square().mean(); """
    + LEARN
    + "    torch.save(net, io.BytesIO()); best = copy.deepcopy(net)\n",
    "schedules of schedules": ADAM
    + """
warm, cool = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(optimizer, 9)
plan = lr_scheduler.SequentialLR(optimizer, [warm, cool], [3])
plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
for turn in range(12):
    loss = measure(torch.randn(6, 4)); """
    + LEARN
    + "    plan.step(); plateau.step(loss.item())\n",
    "averages of the weights": ADAM
    + """
class Average:
    def __init__(self): self.kept = {k: v.detach().clone() for k, v in model.named_parameters()}
    def update(self):
        for name, value in model.named_parameters(): self.kept[name] = 0.9 * self.kept[name] + 0.1 * value.detach()
average, twin = Average(), torch.optim.swa_utils.AveragedModel(model)
for turn in range(12):
    x = torch.randn(6, 4)
    with torch.no_grad(): target = twin(x) + average.kept["0.bias"].sum()
    loss = measure(x) + (model(x) - target).square().mean(); """
    + LEARN
    + "    average.update(); twin.update_parameters(model)\n",
    "gradients gathered over turns, clipped": ADAM
    + """
for turn in range(36):
    loss = measure(torch.randn(6, 4)) / 3; loss.backward()
    if turn % 3 == 2: nn.utils.clip_grad_norm_(model.parameters(), 0.1); optimizer.step(); optimizer.zero_grad()
""",
    "two models against each other": ADAM
    + """
other = nn.Linear(4, 1); second = torch.optim.Adam(other.parameters())
for turn in range(12):
    x = torch.randn(6, 4)
    loss = (model(x).detach() - other(x)).square().mean(); second.zero_grad(); loss.backward(); second.step()
    loss = -(model(x) - other(x)).square().mean(); """
    + LEARN,
    "a scaler under autocast": ADAM
    + """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
for turn in range(40):
    with torch.autocast("cpu", dtype=torch.float16): loss = measure(torch.randn(6, 4))
    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0); scaler.step(optimizer); scaler.update()
""",
    "inputs changed in place": ADAM
    + """
for (x,) in DataLoader(TensorDataset(torch.randn(72, 4)), batch_size=6, shuffle=True):
    x.sub_(x.mean()).div_(x.std()); x += 0.1 * torch.randn_like(x)
    loss = measure(x); """
    + LEARN,
    "generators of one's own": ADAM
    + """
ours, theirs = torch.Generator().manual_seed(5), np.random.default_rng(3)
third, old = random.Random(2), np.random.RandomState(4)
for turn in range(12):
    x = torch.randn(6, 4, generator=ours) + float(theirs.normal()) + third.gauss(0, 1) + float(old.rand())
    loss = measure(x); """
    + LEARN,
    "a trainer with counters, a memory and a generator": ADAM
    + """
class Trainer:
    def __init__(self): self.turn, self.rate, self.memory = 0, 1.0, deque(maxlen=9)
    def batches(self):
        for number in range(99):
            self.memory.append(torch.randn(4) * (1 + number))
            yield torch.stack([self.memory[random.randrange(len(self.memory))] for _ in range(6)])
    def learn(self, x):
        loss = measure(x, weight=self.rate); """
    + LEARN
    + """
        self.turn += 1; self.rate *= 0.9
    def fit(self):
        for x in self.batches():
            self.learn(x)
            if self.turn == 12: break
Trainer().fit()
""",
    "slices of an order drawn each epoch, side by side": ADAM
    + """
rows, targets = torch.randn(24, 4), torch.randn(24, 4)
for epoch in range(3):
    order = torch.randperm(24)
    for x, y in zip(rows[order].split(6), targets.split(6)):
        loss = measure(x + y, weight=1 + epoch); """
    + LEARN,
    "a while loop around slices": ADAM
    + """
rows, turn = torch.randn(24, 4), 0
while turn < 12:
    x = rows[turn * 6 % 24 : turn * 6 % 24 + 6]; turn += 1
    loss = measure(x, weight=turn); """
    + LEARN,
}

ENGINE = """
import random
def train_one_epoch(model, loader, optimizer, epoch, loss_of):
    for turn, (x,) in enumerate(loader):
        loss = loss_of(x if random.random() < 0.5 else -x, weight=1 + epoch + turn)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
def train_drawn(count, draw, optimizer, loss_of):
    for turn in range(count):
        loss = loss_of(draw() * (1 + turn)); optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
IMPORTED = {
    "a loop over a loader in a module": ADAM
    + """
import engine
loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=6, shuffle=True)
for epoch in range(3): engine.train_one_epoch(model, loader, optimizer, epoch, measure)
""",
    "a loop that counts in a module": ADAM
    + "from engine import train_drawn\ntrain_drawn(12, lambda: torch.randn(6, 4), optimizer, measure)\n",
}


REASONS = {
    "gradients add up from step to step, and a snapshot holds none": ADAM
    + """
for turn in range(12):
    loss = measure(torch.randn(6, 4)); loss.backward(); optimizer.step()
""",
    "too large to be kept in the snapshot: far": ADAM
    + """
far = [torch.zeros(4) for _ in range(300)]
for turn in range(12):
    far.append(torch.randn(4)); loss = measure(torch.stack(far[-7:-1])); """
    + LEARN,
}
EXACT = BODIES | IMPORTED


@pytest.fixture(scope="module")
def replayed(zygote, tmp_path_factory):
    """Record all the loops with a snapshot every four steps and replay a step after the first one that is kept."""
    folders = {name: tmp_path_factory.mktemp("loop") for name in EXACT | REASONS}
    for name, folder in folders.items():
        (folder / "train.py").write_text((EXACT | REASONS)[name])
        (folder / "engine.py").write_text(ENGINE)
    words = ["-m", "clew", "run", "--no-status", "--snapshots", "every:4", "--name", "run", "train.py"]
    ended = zygote.run(*(Job(folder, words) for folder in folders.values()))
    assert [each.code for each in ended] == [0] * len(folders), ended
    words = ["-m", "clew", "replay", "runs/run", "--commands", os.devnull, "--json", "--step"]
    said = zygote.run(*(Job(folder, [*words, str(first_kept(folder) + 2)]) for folder in folders.values()))
    return dict(zip(folders, said, strict=True))


def first_kept(folder):
    return min(
        int(path.name.removeprefix("step-")) for path in folder.glob("runs/run/rank0/snapshots/step-*")
    )


@pytest.mark.parametrize("name", EXACT)
def test_a_step_after_a_snapshot_is_identical(name, replayed):
    told = json.loads(replayed[name].stdout.splitlines()[0])
    assert told["replay"] == "identical", told
    (compared,) = told["notes"]
    assert compared.endswith("way: snapshot")
    assert int(compared.partition(" ")[0]) >= 2
    assert not list(replayed[name].folder.rglob("__pycache__/train*"))


def test_a_step_begins_where_the_last_one_ended(zygote, tmp_path):
    """Data that a loop makes by itself, before it calls its model, is a part of each step, also of later ones."""
    (tmp_path / "train.py").write_text(
        """import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    x = torch.randn(4, 3) * 2
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
    )
    words = ["-m", "clew", "run", "--no-status", "--name", "run", "train.py"]
    assert zygote.run(Job(tmp_path, words))[0].code == 0
    words = ["-m", "clew", "replay", "runs/run", "--commands", os.devnull, "--step"]
    told = [zygote.run(Job(tmp_path, [*words, step]))[0].stdout for step in ("1", "6")]
    assert all("randn (forward)" in each for each in told), told
    assert len({each.splitlines()[0].partition(": ")[2] for each in told}) == 1, "as many operations"


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_is_named_where_a_snapshot_is_not_enough(reason, replayed):
    run = clew.open_run(replayed[reason].folder / "runs" / "run")
    again = execute_again(run, first_kept(replayed[reason].folder) + 2)
    assert (again.exactness, again.way) == ("identical", "start")
    assert again.reasons[0].startswith("from the snapshot: diverged at ")
    assert reason in again.reasons[0]
