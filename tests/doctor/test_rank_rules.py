"""Ranks against each other: recorded one after the other, then put side by side as the ranks of one run."""

import json

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, mlp

import clew


@pytest.fixture
def judge_ranks(tmp_path):
    """Return a function that runs a training once for each rank and judges the joined run."""
    numbers = iter(range(100))

    def run(train, ranks=2):
        name = f"run{next(numbers)}"
        for rank in range(ranks):
            torch.manual_seed(0)
            with clew.watch(out=str(tmp_path / str(rank)), name=name, budget="off", doctor=False) as watch:
                train(rank)
            if rank:
                watch.path.joinpath("rank0").rename(tmp_path / "0" / name / f"rank{rank}")
        manifest = tmp_path / "0" / name / "run.json"
        content = json.loads(manifest.read_text())
        content["world_size"] = ranks
        manifest.write_text(json.dumps(content))
        return clew.diagnose(str(tmp_path / "0" / name))

    return run


def ids(diagnosis):
    return [finding.id for finding in diagnosis.findings]


def parallel(rank, *, own=lambda rank: rank, synchronise=True, after=None, make=torch.optim.SGD, model=None):
    """Train as one of two ranks whose gradients are averaged; ``own`` says whose data a rank takes."""
    model = model or mlp()
    optimizer = make(model.parameters(), lr=0.05)
    x, y = blobs()
    for step in range(8):
        mine, other = (
            slice(32 * step + 16 * which, 32 * step + 16 * which + 16) for which in (own(rank), 1 - own(rank))
        )
        optimizer.zero_grad()
        (F.cross_entropy(model(x[mine]), y[mine]) / 2).backward()
        if synchronise:
            (F.cross_entropy(model(x[other]), y[other]) / 2).backward()
        if after is not None:
            after(step, rank, model)
        optimizer.step()


def test_replicas_are_silent(judge_ranks):
    diagnosis = judge_ranks(parallel)
    assert ids(diagnosis) == []
    assert {"X01", "X02", "X03"} <= set(diagnosis.checked)
    assert {"X06": "needs 20 steps, the run has 8"}.items() <= {
        e.id: e.why for e in diagnosis.not_checked
    }.items()


def clip_on_rank_0(step, rank, model):
    if rank == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def zero_on_rank_1(step, rank, model):
    if rank == 1 and step >= 2:
        model[0].weight.grad.zero_()


UNSYNCHRONISED = {
    "wrapper bypassed": (lambda rank: parallel(rank, synchronise=False), 0),
    "clipped on one rank": (lambda rank: parallel(rank, after=clip_on_rank_0), 0),
    "zeroed on one rank": (lambda rank: parallel(rank, after=zero_on_rank_1, make=torch.optim.Adam), 2),
}


@pytest.mark.parametrize("spelling", UNSYNCHRONISED)
def test_gradients_not_synchronised(judge_ranks, spelling):
    train, step = UNSYNCHRONISED[spelling]
    diagnosis = judge_ranks(train)
    assert ids(diagnosis) == ["X02"]
    assert diagnosis.findings[0].step == step
    assert [each.id for each in diagnosis.findings[0].explains] == ["X01"]


def noise_on_rank_1(step, rank, model):
    if rank == 1 and step == 3:
        with torch.no_grad():
            model[0].weight.add_(1e-3)


def different_rates(rank):
    parallel(rank, make=lambda p, lr: torch.optim.SGD(p, lr=lr * (1 + rank)))


def late_load(step, rank, model):
    if rank == 0 and step == 4:
        model.load_state_dict(mlp().state_dict())


DIVERGED = {
    "noise": lambda rank: parallel(rank, after=noise_on_rank_1),
    "another learning rate": different_rates,
    "a checkpoint on one rank": lambda rank: parallel(rank, after=late_load),
}


@pytest.mark.parametrize("spelling", DIVERGED)
def test_replicas_diverge(judge_ranks, spelling):
    diagnosis = judge_ranks(DIVERGED[spelling])
    assert ids(diagnosis) == ["X01"], diagnosis
    assert diagnosis.findings[0].evidence["differing"] >= 1


def test_the_odd_rank_is_named(judge_ranks):
    def three(rank):
        parallel(
            0, after=lambda step, _, model: noise_on_rank_1(step, int(rank == 2), model), own=lambda _: 0
        )

    found = {finding.id: finding for finding in judge_ranks(three, ranks=3).findings}
    assert found["X01"].evidence["odd_ranks"] == [2]


def test_ranks_that_meet_again_are_silent(judge_ranks):
    """Train apart and average every other step: done on purpose."""
    models = {}

    def meet(step, rank, model):
        if step % 2 == 0:
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    key = (step, number)
                    models.setdefault(key, parameter.clone())
                    parameter.copy_(models[key])
                    parameter.grad.zero_() if rank else None

    diagnosis = judge_ranks(lambda rank: parallel(rank, synchronise=False, after=meet))
    assert "X01" not in ids(diagnosis)


def test_models_of_their_own_are_not_judged(judge_ranks):
    def train(rank):
        torch.manual_seed(rank)
        parallel(rank, synchronise=False, model=mlp())

    diagnosis = judge_ranks(train)
    assert ids(diagnosis) == []
    assert {"X01", "X02", "X03"} <= {each.id for each in diagnosis.not_checked}


def tokens(rank):
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Flatten(), torch.nn.Linear(32, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randint(0, 20, (64, 4))
    for step in range(6):
        optimizer.zero_grad()
        F.cross_entropy(model(data[8 * step : 8 * step + 8]), data[8 * step : 8 * step + 8, 0]).backward()
        optimizer.step()


SAME = {
    "no sampler": lambda rank: parallel(rank, own=lambda _: 0),
    "tokens": tokens,
    "pictures": lambda rank: parallel(
        rank,
        own=lambda _: 1,
        model=torch.nn.Sequential(
            torch.nn.Unflatten(1, (2, 2, 2)),
            torch.nn.Conv2d(2, 4, 2),
            torch.nn.Flatten(),
            torch.nn.Linear(4, 3),
        ),
    ),
}


@pytest.mark.parametrize("spelling", SAME)
def test_same_data(judge_ranks, spelling):
    assert ids(judge_ranks(SAME[spelling])) == ["X03"]


def plain_loader(data, sampler):
    return torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)


def batched_loader(data, sampler):
    batches = torch.utils.data.BatchSampler(sampler, 8, drop_last=True)
    return torch.utils.data.DataLoader(data, batch_sampler=batches)


def epochs(rank, set_epoch, shuffle=True, *, make=plain_loader, is_rebuilt=False):
    x, y = blobs(64)
    data = torch.utils.data.TensorDataset(x, y)
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=rank, shuffle=shuffle)
    loader = make(data, sampler)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        if set_epoch:
            sampler.set_epoch(epoch)
        for inputs, targets in make(data, sampler) if is_rebuilt else loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


@pytest.mark.parametrize(
    "form", [{}, {"make": batched_loader}, {"is_rebuilt": True}], ids=["plain", "batched", "rebuilt"]
)
def test_set_epoch(judge_ranks, form):
    assert "X04" in ids(judge_ranks(lambda rank: epochs(rank, set_epoch=False, **form)))
    assert "X04" not in ids(judge_ranks(lambda rank: epochs(rank, set_epoch=True, **form)))
    assert "X04" not in ids(judge_ranks(lambda rank: epochs(rank, set_epoch=False, shuffle=False, **form)))


def shares(rank, sizes, *, most=100):
    """Train each rank on its own part of the data; ``sizes`` are the numbers of samples of the parts."""
    x, y = blobs(128)
    start = sum(sizes[:rank])
    part = torch.utils.data.TensorDataset(*(each[start : start + sizes[rank]] for each in (x, y)))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (inputs, targets) in enumerate(torch.utils.data.DataLoader(part, batch_size=8)):
        if step == most:
            break
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def stops_early(rank, steps=8):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = blobs()
    for step in range(steps - 3 * rank):
        rows = slice(16 * step + 8 * rank, 16 * step + 8 * rank + 8)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


UNEVEN = {
    "parts of different length": lambda rank: shares(rank, (64, 48)),
    "lengths differ though steps do not": lambda rank: shares(rank, (64, 48), most=4),
    "one rank stops early": stops_early,
}


@pytest.mark.parametrize("spelling", UNEVEN)
def test_uneven(judge_ranks, spelling):
    found = {finding.id: finding for finding in judge_ranks(UNEVEN[spelling]).findings}
    assert found["X05"].severity == "error"
    assert "X05" not in ids(judge_ranks(lambda rank: shares(rank, (64, 64))))


class Late(torch.nn.Module):
    def __init__(self, late):
        super().__init__()
        self.body, self.late = mlp(), late

    def forward(self, x):
        self.late()
        return self.body(x)


def uneven(rank, *, late=lambda: None, phase="rest"):
    late = late if rank == 1 else lambda: None
    model = Late(late) if phase == "forward" else mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if phase == "optimizer":
        optimizer.register_step_pre_hook(lambda *_: late())
    x, y = blobs()
    for step in range(24):
        if phase == "rest":
            late()
        rows = slice(8 * step + 4 * rank, 8 * step + 4 * rank + 4)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


@pytest.mark.parametrize("phase", ["rest", "forward", "optimizer"])
def test_straggler(judge_ranks, hand_clock, phase):
    diagnosis = judge_ranks(lambda rank: uneven(rank, late=lambda: hand_clock.sleep(0.05), phase=phase))
    found = {finding.id: finding for finding in diagnosis.findings}
    assert found["X06"].evidence["late_rank"] == 1
    assert found["X06"].evidence["phase"] == phase
    assert "X06" not in ids(judge_ranks(lambda rank: uneven(rank, phase=phase)))
