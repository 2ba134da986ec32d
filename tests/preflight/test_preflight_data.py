"""What the rehearsal says of labels and of the workers of a loader."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import clew


def check(name, loader, *, loss_fn=F.cross_entropy, outputs=3):
    torch.manual_seed(0)
    batch = next(iter(loader))
    return clew.preflight(nn.Linear(4, outputs), tuple(batch), loss_fn=loss_fn, loader=loader, only=name)[
        name
    ]


def points(labels):
    return TensorDataset(torch.randn(len(labels), 4), labels)


def test_sorted_labels():
    data = points(torch.arange(96) // 32)
    found = check("labels", DataLoader(data, batch_size=4))
    assert found.status == "warning"  # eight batches, all of the first class
    assert "of one class" in found.text
    assert check("labels", DataLoader(data, batch_size=16)).status == "failed"
    mixed = check("labels", DataLoader(data, batch_size=8, shuffle=True))
    assert mixed.status == "ok"
    assert "3 of 3 classes in 64 labels of 8 batches, mixed" in mixed.text


def test_one_class_to_a_batch():
    labels = torch.tensor([2, 0, 1, 0, 2, 1]).repeat_interleave(8)
    found = check("labels", DataLoader(points(labels), batch_size=8))
    assert (found.status, "one class to a batch" in found.text) == ("failed", True)


def test_labels_in_a_good_order_need_no_shuffling():
    assert check("labels", DataLoader(points(torch.arange(96) % 3), batch_size=8)).status == "ok"


@pytest.mark.parametrize(("top", "status"), [(2.0, "failed"), (1.0, "ok")])
def test_targets_beyond_a_probability(top, status):
    data = points(top * (torch.rand(32, 2) > 0.5).float())
    found = check("labels", DataLoader(data, batch_size=8), loss_fn=nn.BCEWithLogitsLoss(), outputs=2)
    assert found.status == status


def test_a_loss_about_nothing():
    data = points(torch.full((32,), -100))
    assert check("labels", DataLoader(data, batch_size=8)).status == "failed"


# ------------------------------------------------------------------------ workers


class Stream(IterableDataset):
    def __init__(self, *, divides):
        self.divides = divides

    def __iter__(self):
        worker = get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker and self.divides else (0, 1)
        for number in range(start, 64, step):
            yield torch.full((4,), float(number)), number % 3


class Augmented(Dataset):
    """Adds noise to its samples, from a generator of its own or from torch's."""

    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), float(index)) + float(self.noise()), index % 3


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (Stream(divides=False), "failed"),
        (Stream(divides=True), "ok"),
        (Augmented(np.random.default_rng(0).random), "failed"),
        (Augmented(lambda: torch.rand(())), "ok"),
        (Augmented(np.random.random), "ok"),
        (Augmented(lambda: 1.0), "ok"),
    ],
)
def test_workers(data, status):
    # The batch to train on comes from here, so that only the check itself starts workers.
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
    batch = next(iter(DataLoader(data, batch_size=4)))
    found = clew.preflight(
        nn.Linear(4, 3), tuple(batch), loss_fn=F.cross_entropy, loader=loader, only="workers"
    )
    assert found["workers"].status == status


def test_a_loader_without_workers_is_not_judged():
    assert check("workers", DataLoader(points(torch.arange(32) % 3), batch_size=8)).status == "not checked"
