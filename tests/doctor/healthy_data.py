"""Sequences, graphs, odd losses and data: trainings that look strange and are right."""

import itertools

import torch
import torch.nn.functional as F
from healthy_loops import batches, descend, healthy
from loops import blobs, fit, mlp
from torch import nn

Adam, SGD = torch.optim.Adam, torch.optim.SGD


# ---------------------------------------------------------------- sequences and graphs


def text(samples=128, length=12, vocabulary=20):
    start = torch.randint(0, vocabulary, (samples, 1))
    return (start + torch.arange(length)) % vocabulary


class Reader(nn.Module):
    """A small transformer; ``causal`` masks the future with minus infinity."""

    def __init__(self, vocabulary=20, causal=True):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, 32), nn.Parameter(torch.randn(12, 32) * 0.02)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, vocabulary)
        self.causal = causal

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if self.causal else None
        return self.head(self.layer(self.embed(ids) + self.place[: ids.shape[1]], src_mask=mask))


@healthy
def causal_language_model():
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for (ids,) in batches(text(), size=16):
        descend(F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()), optimizer)


@healthy
def masked_language_model():
    model = Reader(21, causal=False)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for (ids,) in batches(text(), size=16):
        hidden = torch.rand(ids.shape) < 0.15
        hidden[:, 0] = True
        targets = ids.masked_fill(~hidden, -100)
        descend(
            F.cross_entropy(model(ids.masked_fill(hidden, 20)).flatten(0, 1), targets.flatten()), optimizer
        )


@healthy
def padded_sequences_in_an_lstm():
    embed, cell, head = (
        nn.Embedding(21, 16, padding_idx=0),
        nn.LSTM(16, 32, batch_first=True),
        nn.Linear(32, 3),
    )
    optimizer = Adam([*embed.parameters(), *cell.parameters(), *head.parameters()], 1e-2)
    for (ids,) in batches(text() + 1, size=16):
        lengths = torch.randint(3, 12, (16,))
        packed = nn.utils.rnn.pack_padded_sequence(
            embed(ids), lengths, batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = cell(packed)
        descend(F.cross_entropy(head(hidden[-1]), ids[:, 0] % 3), optimizer)


@healthy
def sorted_time_series():
    wave = torch.sin(torch.arange(600) / 10)
    x = torch.stack([wave[i : i + 20] for i in range(500)])
    y = wave[20:520, None]
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    fit(model, (x, y), loss=F.mse_loss, steps=80, optimizer=Adam(model.parameters(), 1e-2))


@healthy
def graph_in_one_batch():
    links = (torch.rand(60, 60) < 0.1).float() + torch.eye(60)
    links = ((links + links.T) > 0).float()
    links = links / links.sum(1, keepdim=True)
    x, y = blobs(60)
    one, two = nn.Linear(8, 16), nn.Linear(16, 3)
    known = torch.rand(60) < 0.5
    optimizer = Adam([*one.parameters(), *two.parameters()], 1e-2)
    for _ in range(80):
        out = links @ two(F.relu(links @ one(x)))
        descend(F.cross_entropy(out[known], y[known]), optimizer)


# ---------------------------------------------------------------- odd losses and data


@healthy
def rare_positives():
    x, _ = blobs(512)
    y = (x[:, :1] > 3.2).float()
    model = mlp(8, 32, 1)
    nn.init.constant_(model[-1].bias, -3.0)
    fit(
        model,
        (x, y),
        loss=nn.BCEWithLogitsLoss(pos_weight=torch.tensor(10.0)),
        steps=80,
        optimizer=Adam(model.parameters(), 1e-3),
    )


@healthy
def smoothed_labels_and_mixed_samples():
    model, (x, y) = mlp(), blobs()
    optimizer = SGD(model.parameters(), 0.1)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for inputs, targets in batches(x, y):
        share, order = torch.rand(()), torch.randperm(len(inputs))
        scores = model(share * inputs + (1 - share) * inputs[order])
        descend(
            share * criterion(scores, targets) + (1 - share) * criterion(scores, targets[order]), optimizer
        )


@healthy
def summed_loss():
    fit(mlp(), loss=lambda out, y: F.cross_entropy(out, y, reduction="sum"), lr=3e-3, steps=60)


@healthy
def perfect_fit():
    x, _ = blobs()
    fit(nn.Linear(8, 1), (x, x @ torch.randn(8, 1)), loss=F.mse_loss, lr=0.01, steps=200)


@healthy
def four_points():
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    y = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    fit(
        model,
        (x, y),
        batch=4,
        loss=F.binary_cross_entropy_with_logits,
        steps=200,
        optimizer=Adam(model.parameters(), 0.05),
    )


@healthy
def quantiles():
    x, _ = blobs()
    levels = torch.tensor([0.1, 0.5, 0.9])

    def pinball(out, y):
        miss = y - out
        return torch.maximum(levels * miss, (levels - 1) * miss).mean()

    model = mlp()
    fit(
        model,
        (x, x[:, :1] + torch.randn(len(x), 1)),
        loss=pinball,
        steps=60,
        optimizer=Adam(model.parameters(), 1e-2),
    )


@healthy
def counts():
    x, _ = blobs()
    y = torch.poisson((x[:, :1] * 0.3).exp())
    model = mlp(8, 32, 1)
    fit(model, (x, y), loss=nn.PoissonNLLLoss(), steps=60, optimizer=Adam(model.parameters(), 1e-2))


@healthy
def physics_from_a_derivative():
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = Adam(model.parameters(), 1e-2)
    for _ in range(60):
        t = torch.rand(32, 1, requires_grad=True)
        u = model(t)
        (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        start = model(torch.zeros(1, 1)) - 1
        descend((slope + u).square().mean() + start.square().mean(), optimizer)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Binary(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, x):
        return self.two(Sign.apply(self.one(x)))


@healthy
def binary_activations():
    model = Binary()
    fit(model, steps=60, optimizer=Adam(model.parameters(), 1e-3))


@healthy
def several_tasks():
    body, heads = nn.Linear(8, 32), nn.ModuleDict({"kind": nn.Linear(32, 3), "size": nn.Linear(32, 1)})
    optimizer = Adam([*body.parameters(), *heads.parameters()], 1e-2)
    x, y = blobs()
    for step, (inputs, targets) in enumerate(batches(x, y)):
        hidden = F.gelu(body(inputs))
        if step % 2:
            descend(F.cross_entropy(heads["kind"](hidden), targets), optimizer)
        else:
            descend(F.mse_loss(heads["size"](hidden), inputs[:, :1]), optimizer)


@healthy
def images_in_a_residual_net():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
            nn.init.zeros_(self.norm.weight)

        def forward(self, x):
            return F.relu(x + self.norm(self.conv(x)))

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        Block(),
        Block(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    y = torch.randint(0, 2, (64,))
    x = torch.randn(64, 3, 8, 8) + y[:, None, None, None]
    fit(model, (x, y), batch=16, lr=0.05, steps=50)


@healthy
def validation_that_stays_level():
    model, (x, y) = mlp(), blobs(512)
    criterion = nn.CrossEntropyLoss()
    optimizer = Adam(model.parameters(), 1e-3)
    for step, (inputs, targets) in enumerate(batches(x[:256], y[:256], steps=100)):
        descend(criterion(model(inputs), targets), optimizer)
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                criterion(model(x[256:]), y[256:])
            model.train()


@healthy
def endless_loader_with_workers_of_its_own():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            generator = torch.Generator().manual_seed(0)
            while True:
                x = torch.randn(8, generator=generator)
                yield x, x[:3].argmax()

    model = mlp()
    optimizer = Adam(model.parameters(), 1e-2)
    for x, y in itertools.islice(torch.utils.data.DataLoader(Stream(), batch_size=16), 60):
        descend(F.cross_entropy(model(x), y), optimizer)
