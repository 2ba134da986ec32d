"""Data that is wrong in itself or in its order: three spellings of each fault, and loops that resemble them."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loops import blobs, mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

SGD, Adam = torch.optim.SGD, torch.optim.Adam
X, Y = blobs(256)
WIDE = torch.cat([X, X * 0.5, X.flip(1)], 1)
"""Rows with enough numbers to be told apart."""


def descend(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(batches, *, model=None, loss=F.cross_entropy, evaluate=None, epochs=1):
    """Train on batches of a list, a loader or a function that makes them; evaluate at the end of every epoch."""
    model = model or mlp()
    optimizer = Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for x, y in batches() if callable(batches) else batches:
            descend(loss(model(x), y), optimizer)
        if evaluate is not None:
            model.eval()
            with torch.no_grad():
                evaluate(model)
            model.train()
    return model


def slices(x, y, size=32):
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


# ---------------------------------------------------------------- D03


class Stuck(Dataset):
    """Ignores its index for the sample, not for the label."""

    def __len__(self):
        return 128

    def __getitem__(self, index):
        return X[0], Y[index]


class TakesBatch(nn.Module):
    """Is given the whole batch, labels and all."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, batch):
        return self.inner(batch["x"])


def whole_batches():
    model = TakesBatch()
    optimizer = SGD(model.parameters(), lr=1e-2)
    for x, y in slices(X, Y, 16):
        batch = {"x": x[:1].repeat(16, 1), "label": y}
        descend(F.cross_entropy(model(batch), batch["label"]), optimizer)


def equal_texts():
    tokens = torch.randint(0, 30, (1, 6)).repeat(128, 1)
    model = nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(48, 3))
    train(DataLoader(TensorDataset(tokens, Y[:128]), 16), model=model)


EQUAL = {
    "whole batches": whole_batches,
    "texts": equal_texts,
    "dataset": lambda: train(DataLoader(Stuck(), 16)),
    "expanded": lambda: train([(x[:1].expand(32, 8), y) for x, y in slices(X, Y)]),
    "images": lambda: train(
        [(torch.rand(1, 1, 8, 8).repeat(16, 1, 1, 1), torch.rand(16, 1)) for _ in range(12)],
        model=nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 1)),
        loss=nn.MSELoss(),
    ),
}


@pytest.mark.parametrize("spelling", EQUAL)
def test_identical_samples(judge, spelling):
    judged = judge(EQUAL[spelling])
    assert judged.ids == ["D03"], judged
    assert judged["D03"].step <= 2


def test_a_state_to_begin_with_is_no_data(judge):
    def unroll():
        inner, outer = nn.Linear(6, 6), nn.Linear(8, 6)
        optimizer = torch.optim.SGD([*inner.parameters(), *outer.parameters()], lr=0.05)
        for _ in range(4):
            state = torch.zeros(16, 6)
            for _ in range(3):
                state = torch.tanh(inner(state) + outer(torch.randn(16, 8)))
            optimizer.zero_grad()
            state.square().mean().backward()
            optimizer.step()

    def decode():
        model, codes = nn.Linear(4, 8), torch.zeros(16, 4, requires_grad=True)
        optimizer = torch.optim.SGD([*model.parameters(), codes], lr=0.05)
        goal = torch.randn(16, 8)
        for _ in range(4):
            optimizer.zero_grad()
            (model(codes) - goal).square().mean().backward()
            optimizer.step()

    assert judge(unroll).ids == []
    assert judge(decode).ids == []


# ---------------------------------------------------------------- D04


def first_batch_again(loader, model, loss):
    optimizer = SGD(model.parameters(), lr=0.05)
    for _ in range(16):
        x, y = next(iter(loader))
        descend(loss(model(x), y), optimizer)


def method_that_fetches():
    class Trainer:
        def __init__(self):
            self.loader = DataLoader(TensorDataset(X, Y), 16)
            self.model = mlp()
            self.optimizer = Adam(self.model.parameters())

        def batch(self):
            return next(zip(self.loader, range(1), strict=False))[0]

        def step(self):
            x, y = self.batch()
            descend(F.cross_entropy(self.model(x), y), self.optimizer)

    trainer = Trainer()
    for _ in range(14):
        trainer.step()


class Stream(IterableDataset):
    """Samples one after the other; how many is not known."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return zip(X[: self.rows], Y[: self.rows], strict=True)


SAME = {
    "stream": lambda: first_batch_again(DataLoader(Stream(256), 16), mlp(), F.cross_entropy),
    "next iter": lambda: first_batch_again(DataLoader(TensorDataset(X, Y), 16), mlp(), F.cross_entropy),
    "regression": lambda: first_batch_again(
        DataLoader(TensorDataset(X, X[:, :1]), 64), mlp(classes=1), F.mse_loss
    ),
    "method": method_that_fetches,
}


@pytest.mark.parametrize("spelling", SAME)
def test_same_batch_every_step(judge, spelling):
    judged = judge(SAME[spelling])
    assert judged.ids == ["D04"], judged


# ---------------------------------------------------------------- D05


class Noisy(Dataset):
    def __init__(self, rng):
        self.rng = rng

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return X[index] + float(self.draw()) * 0.1, Y[index]

    def draw(self):
        return self.rng.normal() if isinstance(self.rng, np.random.Generator) else self.rng.random()


class Jitter:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.generator)


class Transformed(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.transform(X[index]), Y[index]


class Split(Dataset):
    """Uses its generator for the split alone."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.rows = self.rng.permutation(len(X))[:64]

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return X[self.rows[index]], Y[self.rows[index]]


def with_workers(dataset, **settings):
    train(DataLoader(dataset, 16, num_workers=2, **settings))


SHARED = {
    "numpy": lambda: with_workers(Noisy(np.random.default_rng(0))),
    "python": lambda: with_workers(Noisy(random.Random(0))),
    "transform": lambda: with_workers(Transformed(Jitter())),
}


@pytest.mark.parametrize("spelling", SHARED)
def test_workers_share_randomness(judge, spelling):
    judged = judge(SHARED[spelling])
    assert judged.ids == ["D05"], judged
    assert judged["D05"].step == 0


# ---------------------------------------------------------------- D10


def evaluation(x, y, size=32):
    def run(model):
        for inputs, targets in slices(x, y, size):
            F.cross_entropy(model(inputs), targets)

    return run


def loader_evaluation(loader):
    def run(model):
        for x, y in loader:
            F.cross_entropy(model(x), y)

    return run


def wide():
    return mlp(features=24)


def repeated_texts():
    """Every text twice, shuffled, and only then parted."""
    texts = torch.randint(0, 99, (96, 18)).repeat(2, 1)[torch.randperm(192)]
    y = (texts[:, 0] > 50).long()
    parts = [TensorDataset(texts[:128], y[:128]), TensorDataset(texts[128:], y[128:])]
    model = nn.Sequential(nn.EmbeddingBag(99, 16), nn.Linear(16, 2))
    train(
        DataLoader(parts[0], 32), model=model, evaluate=loader_evaluation(DataLoader(parts[1], 32)), epochs=2
    )


OVERLAP = {
    "slices": lambda: train(
        slices(WIDE[:160], Y[:160]), model=wide(), evaluate=evaluation(WIDE[128:], Y[128:]), epochs=3
    ),
    "loaders": lambda: train(
        DataLoader(TensorDataset(WIDE[:200], Y[:200]), 32, shuffle=True),
        model=wide(),
        evaluate=loader_evaluation(DataLoader(TensorDataset(WIDE[150:], Y[150:]), 32)),
        epochs=3,
    ),
    "duplicated rows": lambda: train(
        lambda: slices(WIDE.repeat(2, 1)[64:], Y.repeat(2)[64:]),
        model=wide(),
        evaluate=evaluation(torch.cat([WIDE[:64], torch.randn(64, 24)]), torch.cat([Y[:64], Y[:64]])),
        epochs=2,
    ),
    "texts": repeated_texts,
}


@pytest.mark.parametrize("spelling", OVERLAP)
def test_train_eval_overlap(judge, spelling):
    judged = judge(OVERLAP[spelling])
    assert judged.ids == ["D10"], judged


def answers():
    """Forms with a few boxes that are ticked: some rows are the same by chance."""
    x = (torch.rand(256, 2) @ torch.rand(2, 20) > 1).float()
    train(slices(x[:192], Y[:192]), model=mlp(features=20), evaluate=evaluation(x[192:], Y[192:]), epochs=2)


def windows():
    """The loss on both halves of a text, from windows drawn at random as those of the training are."""
    halves = torch.randint(0, 30, (200,)), torch.randint(0, 30, (200,))

    def draw(text, count=16):
        starts = torch.randint(0, 180, (count,)).tolist()
        return torch.stack([text[at : at + 16] for at in starts]), torch.tensor(
            [text[at + 16] for at in starts]
        )

    def evaluate(model):
        for text in halves * 4:
            x, y = draw(text)
            F.cross_entropy(model(x), y)

    model = nn.Sequential(nn.Embedding(30, 4), nn.Flatten(), nn.Linear(64, 30))
    train(lambda: [draw(halves[0]) for _ in range(8)], model=model, evaluate=evaluate, epochs=1)


@pytest.mark.parametrize("loop", [answers, windows])
def test_rows_of_whole_numbers_that_are_equal_by_chance_are_no_overlap(judge, loop):
    assert judge(loop).ids == []


# ---------------------------------------------------------------- D11


ORDER = Y.argsort()
BINARY = (Y[ORDER] > 0).float()

IN_RUNS = torch.arange(3).repeat_interleave(480)
"""So many of each class that one of them ends with a batch, long after the beginning."""

SORTED = {
    "long runs": lambda: train(lambda: slices(torch.randn(1440, 8) + IN_RUNS[:, None], IN_RUNS)),
    "classes": lambda: train(lambda: slices(X[ORDER], Y[ORDER]), epochs=3),
    "loader": lambda: train(DataLoader(TensorDataset(X[ORDER], Y[ORDER]), 16), epochs=2, model=mlp(layers=3)),
    "binary": lambda: train(
        lambda: slices(X[ORDER], BINARY[:, None]),
        model=mlp(classes=1),
        loss=F.binary_cross_entropy_with_logits,
        epochs=3,
    ),
}


@pytest.mark.parametrize("spelling", SORTED)
def test_unshuffled_data(judge, spelling):
    judged = judge(SORTED[spelling])
    assert judged.ids == ["D11"], judged


def test_classes_one_after_the_other_in_each_batch_are_not_unshuffled(judge):
    """First the positive pairs, then as many negative ones: every batch has both."""
    model, loss = mlp(classes=1), F.binary_cross_entropy_with_logits
    ones, zeros = X[Y > 0], X[Y == 0]

    def draw(size):
        rows = [part[torch.randint(len(part), (size,))] for part in (ones, zeros)]
        return torch.cat(rows), torch.cat([torch.ones(size, 1), torch.zeros(size, 1)])

    for size in (200, 48):
        batches = [draw(size) for _ in range(30)]
        assert judge(lambda batches=batches: train(batches, model=model, loss=loss)).ids == []


# ---------------------------------------------------------------- D17


def short_labels(batch):
    x, y = torch.utils.data.default_collate(batch)
    return x, y[:-1]


def longer_at_the_end():
    """The last windows of a series have no target, which only the last batch of many shows."""
    x, y = torch.randn(1025, 8), torch.randn(1020, 1)
    train(
        [(x[i : i + 25], y[i : i + 25]) for i in range(0, 1025, 25)], model=mlp(classes=1), loss=nn.MSELoss()
    )


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_mismatch_in_the_last_batch(judge):
    judged = judge(longer_at_the_end, error=RuntimeError)
    assert judged.ids == ["D17"], judged
    assert judged["D17"].evidence["samples"] == [20, 25]


MISMATCH = {
    "collate": lambda: train(DataLoader(TensorDataset(X, Y), 16, collate_fn=short_labels)),
    "slices": lambda: train([(X[i : i + 32], Y[i : i + 31]) for i in range(0, 128, 32)]),
    "regression": lambda: train(
        [(X[:32], X[:24, :1]) for _ in range(4)], model=mlp(classes=1), loss=nn.L1Loss()
    ),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("spelling", MISMATCH)
def test_batch_size_mismatch(judge, spelling):
    judged = judge(MISMATCH[spelling], error=(ValueError, RuntimeError))
    assert judged.ids == ["D17"], judged
    assert judged["D17"].step == 0


# ---------------------------------------------------------------- right, though it looks like one of these


def one_batch_on_purpose():
    x, y = next(iter(DataLoader(TensorDataset(X, Y), 32)))
    train([(x, y)] * 20)


def fixed_batch_to_look_at():
    loader = DataLoader(TensorDataset(X, Y), 16)
    model = mlp()
    optimizer = Adam(model.parameters())
    for x, y in loader:
        descend(F.cross_entropy(model(x), y), optimizer)
        with torch.no_grad():
            model(next(iter(DataLoader(TensorDataset(X, Y), 8)))[0])


def shuffled_first_batches():
    first_batch_again(DataLoader(TensorDataset(X, Y), 16, shuffle=True), mlp(), F.cross_entropy)


def stream_of_one_batch():
    loader = DataLoader(Stream(32), 32)
    train(lambda: loader, epochs=20)


def own_seed_in_each_worker():
    def seed(number):
        torch.utils.data.get_worker_info().dataset.rng = random.Random(number)

    with_workers(Noisy(random.Random(0)), worker_init_fn=seed)


def accuracy_on_the_training_data():
    train(slices(WIDE, Y), model=wide(), evaluate=evaluation(WIDE, Y), epochs=3)


def accuracy_on_both():
    def both(model):
        loader_evaluation(DataLoader(TensorDataset(WIDE[:128], Y[:128]), 32))(model)
        evaluation(torch.randn(64, 24), Y[:64])(model)

    loader = DataLoader(TensorDataset(WIDE[:128], Y[:128]), 32, shuffle=True)
    train(loader, model=wide(), evaluate=both, epochs=3)


def nearest_of_the_training_data():
    """The gallery and the questions of a metric go through the model at one line."""

    def nearest(model):
        with torch.no_grad():
            for rows in (WIDE[:160], WIDE[160:]):
                model(rows)

    train(slices(WIDE[:160], Y[:160]), model=wide(), evaluate=nearest, epochs=3)


def targets_from_other_rows():
    """Q-learning without a second network: the next states are states of other steps."""
    model = mlp(features=24, classes=2)
    optimizer = Adam(model.parameters(), lr=1e-3)
    for _ in range(40):
        rows = torch.randint(0, 255, (32,))
        with torch.no_grad():
            goal = Y[rows].float() + 0.9 * model(WIDE[rows + 1]).amax(1)
        descend(F.smooth_l1_loss(model(WIDE[rows])[:, 0], goal), optimizer)


def series_in_order():
    wave = torch.sin(torch.arange(700) / 40)
    x = torch.stack([wave[i : i + 20] for i in range(600)])
    train(slices(x, (wave[20:620] > 0).long()), model=mlp(features=20, classes=2), epochs=2)


def generated_labels():
    model = mlp(classes=1)
    optimizer = Adam(model.parameters(), lr=1e-3)
    for x, _ in slices(X, Y) * 3:
        descend(F.binary_cross_entropy_with_logits(model(x), torch.ones(len(x), 1)), optimizer)
        descend(
            F.binary_cross_entropy_with_logits(model(torch.randn(len(x), 8)), torch.zeros(len(x), 1)),
            optimizer,
        )


def sequences_first():
    cell, head = nn.LSTM(4, 16), nn.Linear(16, 2)
    optimizer = Adam([*cell.parameters(), *head.parameters()])

    def collate(batch):
        return torch.stack([x for x, _ in batch], 1), torch.stack([y for _, y in batch])

    data = TensorDataset(torch.randn(64, 10, 4), torch.randint(0, 2, (64,)))
    for x, y in DataLoader(data, 8, collate_fn=collate):
        descend(F.cross_entropy(head(cell(x)[0][-1]), y), optimizer)


RIGHT = (
    one_batch_on_purpose, fixed_batch_to_look_at, shuffled_first_batches, own_seed_in_each_worker,
    accuracy_on_the_training_data, accuracy_on_both, targets_from_other_rows, series_in_order, generated_labels,
    sequences_first, nearest_of_the_training_data, stream_of_one_batch,
)  # fmt: skip


@pytest.mark.parametrize("loop", [*RIGHT, lambda: with_workers(Split())])
def test_right_data(judge, loop):
    judged = judge(loop)
    assert judged.ids == [], judged
