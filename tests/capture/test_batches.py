"""What a loader gives: each part of a batch is measured, also what no model is given, and told where it came from."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import clew

INPUTS, LABELS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3


def watch(folder, body, **settings):
    """Record a loop over batches of four; ``body`` gives the loss of one."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with clew.watch(model, optimizer, out=str(folder), budget="off", **settings) as recording:
        for batch in DataLoader(TensorDataset(INPUTS, LABELS), batch_size=4):
            optimizer.zero_grad()
            body(model, batch).backward()
            optimizer.step()
    return clew.open_run(recording.path)


def lose(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_labels_that_no_model_is_given_are_measured_and_told_where_they_came_from(tmp_path):
    run = watch(tmp_path, lose)
    means = run.series("loader.1", "batch", "mean")
    assert means.steps.tolist() == [0, 1, 2]
    assert means.values.tolist() == [part.double().mean().item() for part in LABELS.split(4)]
    rows = [row for row in run.batches() if row["leaf"] == "loader.1"]
    assert [(row["loader"], row["position"]) for row in rows] == [("TensorDataset", at) for at in range(3)]
    assert [list(row["indices"]) for row in rows] == [list(range(at, at + 4)) for at in (0, 4, 8)]
    assert {row["dtype"] for row in rows} == {"int64"}


def test_what_a_model_is_given_is_not_measured_twice(tmp_path):
    def score(model, batch):
        return lose(model, batch) + model(batch[0]).square().mean()

    run = watch(tmp_path, score)
    leaves = [(row["step"], row["leaf"], row["ordinal"]) for row in run.batches()]
    first = [("batch.0", 0), ("loader.1", 0), ("batch.0", 1)]
    assert leaves == [(step, *each) for step in range(3) for each in first]


def test_a_batch_that_cannot_be_recognised_is_not_guessed(tmp_path):
    run = watch(tmp_path, lambda model, batch: model(batch[0] * 2).square().mean())
    assert {row["leaf"] for row in run.batches()} == {"batch.0"}


def test_without_batches_nothing_of_them_is_measured(tmp_path):
    run = watch(tmp_path, lose, kinds="output,param")
    assert len(run.batches()) == 0
