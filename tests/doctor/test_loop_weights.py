"""Weights, checkpoints and what outputs may depend on: three spellings of each fault, and loops that resemble them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, fit, mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SGD, Adam = torch.optim.SGD, torch.optim.Adam
X, Y = blobs(256)


def descend(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# ---------------------------------------------------------------- M13


def constant(model, value=0.05):
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def images(make):
    y = torch.randint(0, 2, (64,))
    x = torch.randn(64, 1, 8, 8) + y[:, None, None, None]
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    fit(make(model), (x, y), batch=16, steps=12)


def only_weights(model):
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.constant_(parameter, 0.1)
        else:
            nn.init.zeros_(parameter)
    return model


def gates():
    class Recurring(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.cell(x)[0][:, -1])

    x = torch.randn(64, 5, 4)
    fit(constant(Recurring(), 0.1), (x, (x[:, 0, 0] > 0).long()), batch=16, steps=12)


class Columns(nn.Module):
    """A layer of one's own, whose units are the columns of its matrix."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.full((inputs, outputs), 0.05))

    def forward(self, x):
        return x @ self.weight


SYMMETRIC = {
    "gates": gates,
    "columns": lambda: fit(nn.Sequential(Columns(8, 16), nn.Sigmoid(), Columns(16, 3)), steps=12),
    "constant": lambda: fit(constant(mlp()), steps=12),
    "images": lambda: images(lambda model: constant(model, 0.02)),
    "zeros": lambda: fit(constant(mlp(activation=nn.Tanh), 0.0), steps=12),
    "regression": lambda: fit(
        only_weights(mlp(classes=1, activation=nn.Tanh, layers=3)),
        (X, X[:, :1]),
        loss=F.mse_loss,
        steps=12,
        lr=0.01,
    ),
}


@pytest.mark.parametrize("spelling", SYMMETRIC)
def test_symmetric_weights(judge, spelling):
    judged = judge(SYMMETRIC[spelling])
    assert judged.ids == ["M13"], judged
    assert judged["M13"].step <= 2


# ---------------------------------------------------------------- M14


def renamed(state, prefix="module."):
    return {f"{prefix}{name}": value for name, value in state.items()}


def loaded_loosely(state):
    model = mlp()
    model.load_state_dict(state, strict=False)
    fit(model, steps=6)


def filtered(tmp_path):
    torch.save(renamed(mlp().state_dict(), "net."), tmp_path / "old.pt")
    model = mlp()
    found = torch.load(tmp_path / "old.pt")
    own = model.state_dict()
    own.update({name: value for name, value in found.items() if name in own})
    model.load_state_dict(own)
    fit(model, steps=6)


NOT_LOADED = {
    "wrapped": lambda _: loaded_loosely(renamed(mlp().state_dict())),
    "compiled": lambda _: loaded_loosely(renamed(mlp().state_dict(), "_orig_mod.")),
    "whole checkpoint": lambda _: loaded_loosely({"epoch": 3, "model": mlp().state_dict()}),
    "filtered": filtered,
}


@pytest.mark.parametrize("spelling", NOT_LOADED)
def test_checkpoint_not_loaded(judge, spelling, tmp_path):
    judged = judge(lambda: NOT_LOADED[spelling](tmp_path))
    assert judged.ids == ["M14"], judged
    assert judged["M14"].step == 0
    if spelling == "whole checkpoint":
        assert 'load checkpoint["model"]' in judged["M14"].hint


# ---------------------------------------------------------------- P05


def first_weights(file):
    model = mlp()
    state = copy.deepcopy(model.state_dict())
    fit(model, steps=12)
    torch.save({"model": state, "epoch": 1}, file)


def best_that_is_no_copy(file):
    model, best, lowest = mlp(), None, float("inf")
    optimizer = Adam(model.parameters(), lr=1e-2)
    for step in range(20):
        loss = F.cross_entropy(model(X[:64]), Y[:64])
        descend(loss, optimizer)
        if loss.item() < lowest and step < 8:
            lowest, best = loss.item(), model.state_dict()
    torch.save(best, file)


def best_in_another_dict(file):
    model, best = mlp(), {}
    optimizer = Adam(model.parameters(), lr=1e-2)
    for step in range(20):
        descend(F.cross_entropy(model(X[:64]), Y[:64]), optimizer)
        if step == 7:
            best = {"step": step, "state": {name: value.cpu() for name, value in model.state_dict().items()}}
    torch.save(best, file)


def other_object(file):
    model = mlp(classes=1)
    kept = copy.deepcopy(model)
    fit(model, (X, X[:, :1]), loss=F.mse_loss, steps=12, lr=0.01)
    torch.save(kept.state_dict(), file)


def saved_in_the_loop(file, *, where, evaluates=False, gathers=1):
    """Save every fifth step, at one place of the loop."""
    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-2)
    for step in range(30):
        optimizer.zero_grad()
        for part in range(gathers):
            rows = slice(64 * part, 64 * part + 64)
            (F.cross_entropy(model(X[rows]), Y[rows]) / gathers).backward()
        is_due = step % 5 == 4
        if is_due and evaluates:
            with torch.no_grad():
                model(X[192:])
        if is_due and where == "before":
            torch.save({"model": model.state_dict(), "step": step}, file)
        optimizer.step()
        if is_due and where == "after":
            torch.save({"model": model.state_dict(), "step": step}, file)


def saved_before_the_step(file):
    saved_in_the_loop(file, where="before")


def test_what_is_saved_in_the_loop_and_right(judge, tmp_path):
    for settings in (
        {"where": "after"},
        {"where": "before", "evaluates": True},
        {"where": "before", "gathers": 3},
    ):
        judged = judge(lambda settings=settings: saved_in_the_loop(tmp_path / "saved.pt", **settings))
        assert judged.ids == [], (settings, judged)


@pytest.mark.parametrize(
    "spelling",
    [first_weights, best_that_is_no_copy, best_in_another_dict, other_object, saved_before_the_step],
)
def test_stale_checkpoint(judge, spelling, tmp_path):
    judged = judge(lambda: spelling(tmp_path / "saved.pt"))
    assert judged.ids == ["P05"], judged
    assert "test_loop_weights.py" in judged["P05"].source


# ---------------------------------------------------------------- M09


class Recurrent(nn.Module):
    """Takes samples first; ``batch_first`` forgotten makes time of them."""

    def __init__(self, batch_first):
        super().__init__()
        self.cell, self.head = nn.GRU(4, 16, batch_first=batch_first), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Attending(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.body, self.score, self.head, self.dim = nn.Linear(4, 16), nn.Linear(16, 1), nn.Linear(16, 3), dim

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.head((hidden * self.score(hidden).softmax(self.dim)).sum(1))


class Turned(nn.Module):
    def __init__(self, turn):
        super().__init__()
        self.body, self.head, self.turn = nn.Linear(4, 16), nn.Linear(96, 1), turn

    def forward(self, x):
        return self.head(self.turn(self.body(x)).relu().flatten(1))


def sequences(model, *, loss=F.cross_entropy, classes=3):
    x = torch.randn(160, 6, 4)
    y = torch.randint(0, classes, (160,)) if classes > 1 else x.sum((1, 2))[:, None]
    fit(model, (x, y), loss=loss, steps=26, lr=0.05 if classes > 1 else 1e-3, batch=16)


MIXED = {
    "batch_first": lambda: sequences(Recurrent(False)),
    "softmax": lambda: sequences(Attending(0)),
    "view": lambda: sequences(
        Turned(lambda h: h.reshape(6, len(h), 16).transpose(0, 1)), loss=F.mse_loss, classes=1
    ),
    "mean": lambda: fit(
        nn.Sequential(nn.Linear(8, 16), nn.Softmax(dim=0), nn.Linear(16, 3)), steps=26
    ),
}  # fmt: skip


@pytest.mark.parametrize("spelling", MIXED)
def test_batch_mixing(judge, spelling):
    judged = judge(MIXED[spelling])
    assert judged.ids == ["M09"], judged
    assert judged["M09"].step == 0


class Pairs(nn.Module):
    """Scores every sample of a batch against every other, as contrastive models do."""

    def __init__(self, dim):
        super().__init__()
        self.left, self.right, self.dim = nn.Linear(8, 16), nn.Linear(8, 16), dim

    def forward(self, x):
        left, right = F.normalize(self.left(x), dim=self.dim), F.normalize(self.right(x), dim=self.dim)
        return left @ right.T


@pytest.mark.parametrize(("dim", "ids"), [(1, []), (0, ["M09"])])
def test_scores_of_all_pairs_are_no_mixing_unless_samples_know_of_each_other(judge, dim, ids):
    places = (blobs()[0], torch.arange(32).repeat(8))
    assert judge(lambda: fit(Pairs(dim), places, steps=26)).ids == ids


# ---------------------------------------------------------------- M18


def text(samples=64, length=12):
    return torch.randint(0, 20, (samples, length))


class Speaker(nn.Module):
    def __init__(self, body, *, mask=False):
        super().__init__()
        self.embed, self.body, self.head, self.mask = (
            nn.Embedding(20, 16),
            body,
            nn.Linear(body.width, 20),
            mask,
        )
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids), self.mask))


class Transformer(nn.Module):
    width = 16

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x, mask):
        cut = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if mask else None
        return self.layer(x, src_mask=cut)


class Attention(nn.Module):
    width = 16

    def forward(self, x, mask):
        return x + F.scaled_dot_product_attention(x, x, x, is_causal=mask)


class Cell(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.cell = nn.LSTM(16, 16, batch_first=True, bidirectional=both)
        self.width = 32 if both else 16

    def forward(self, x, _mask):
        return self.cell(x)[0]


def speak(model, *, shift_inside=False, steps=26):
    optimizer = Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids = text()[:16]
        if shift_inside:
            out, wanted = model(ids)[:, :-1], ids[:, 1:]
        else:
            out, wanted = model(ids[:, :-1]), ids[:, 1:]
        loss = F.cross_entropy(out.reshape(-1, 20), wanted.reshape(-1))
        descend(loss if step % 2 else F.cross_entropy(out.transpose(1, 2), wanted), optimizer)


class Translator(nn.Module):
    """Reads one text and writes another; what it has written so far must not hold what it is to write."""

    def __init__(self, *, mask, inner=None):
        super().__init__()
        self.source, self.target = nn.Embedding(20, 16), nn.Embedding(20, 16)
        self.inner = inner or nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        self.head, self.mask = nn.Linear(16, 20), mask

    def forward(self, source, target):
        cut = nn.Transformer.generate_square_subsequent_mask(target.shape[1]) if self.mask else None
        return self.head(self.inner(self.source(source), self.target(target), tgt_mask=cut))


class Copying(nn.Module):
    """Attention from the written text to the read one, and along the written one."""

    def forward(self, source, target, tgt_mask):
        target = target + F.scaled_dot_product_attention(target, source, source)
        return target + F.scaled_dot_product_attention(target, target, target, attn_mask=tgt_mask)


def translate(model, *, named=False, steps=26):
    optimizer = Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        source = text()[:16]
        target = torch.cat([torch.zeros(16, 1, dtype=torch.long), source.flip(1)], 1)
        given = {"target": target[:, :-1], "source": source}
        out = model(**given) if named else model(source, target[:, :-1])
        descend(F.cross_entropy(out.transpose(1, 2), target[:, 1:]), optimizer)


class TimeFirst(nn.Module):
    """Places come before samples; a summary of all places is added, or not."""

    def __init__(self, *, summary):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(20, 16), nn.GRU(16, 16), nn.Linear(16, 20)
        self.summary = summary

    def forward(self, ids):
        hidden = self.cell(self.embed(ids))[0]
        return self.head(hidden + hidden.mean(0) if self.summary else hidden)


def speak_time_first(model, steps=26):
    optimizer = Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        ids = text()[:16].T
        descend(F.cross_entropy(model(ids[:-1]).reshape(-1, 20), ids[1:].reshape(-1)), optimizer)


LEAKING = {
    "time first": lambda: speak_time_first(TimeFirst(summary=True)),
    "translation": lambda: translate(Translator(mask=False)),
    "translation by name": lambda: translate(Translator(mask=False, inner=Copying()), named=True),
    "no mask": lambda: speak(Speaker(Transformer())),
    "attention": lambda: speak(Speaker(Attention()), shift_inside=True),
    "both directions": lambda: speak(Speaker(Cell(True))),
}


@pytest.mark.parametrize("spelling", LEAKING)
def test_future_leak(judge, spelling):
    judged = judge(LEAKING[spelling])
    assert judged.ids == ["M18"], judged
    assert judged["M18"].step == 0


# ---------------------------------------------------------------- right, though it looks like one of these


def constant_weights_random_biases():
    model = mlp()
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.05)
    fit(model, steps=12)


def adapters_alone():
    model = mlp()
    model.load_state_dict({"2.weight": torch.randn(3, 32) * 0.1, "2.bias": torch.zeros(3)}, strict=False)
    fit(model, steps=6)


def new_head(tmp_path):
    torch.save(mlp(classes=5).state_dict(), tmp_path / "old.pt")
    state = torch.load(tmp_path / "old.pt")
    model = mlp()
    model.load_state_dict(
        {name: value for name, value in state.items() if name.startswith("0.")}, strict=False
    )
    fit(model, steps=6)


def best_of_all(tmp_path):
    model, best, lowest = mlp(), None, float("inf")
    optimizer = Adam(model.parameters(), lr=3e-2)
    for _ in range(20):
        rows = torch.randint(0, 256, (16,))
        loss = F.cross_entropy(model(X[rows]), Y[rows])
        descend(loss, optimizer)
        if loss.item() < lowest:
            lowest, best = loss.item(), copy.deepcopy(model.state_dict())
    torch.save(best, tmp_path / "best.pt")


def best_by_validation(tmp_path):
    model, best = mlp(), None
    optimizer = Adam(model.parameters(), lr=3e-2)
    for step in range(20):
        descend(F.cross_entropy(model(X[:64]), Y[:64]), optimizer)
        if step == 7:
            with torch.no_grad():
                F.cross_entropy(model(X[64:]), Y[64:])
            best = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(best, tmp_path / "best.pt")


def moving_average(tmp_path):
    model = mlp()
    slow = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = Adam(model.parameters(), lr=1e-2)
    for _ in range(12):
        descend(F.cross_entropy(model(X[:64]), Y[:64]), optimizer)
        for name, value in model.state_dict().items():
            slow[name].lerp_(value, 0.1)
    torch.save(slow, tmp_path / "slow.pt")


def every_epoch(tmp_path):
    model = mlp()
    for epoch in range(3):
        fit(model, steps=6)
        torch.save({"epoch": epoch, "model": model.state_dict()}, tmp_path / "last.pt")


def time_first():
    cell, head = nn.GRU(4, 16), nn.Linear(16, 2)
    model = nn.ModuleDict({"cell": cell, "head": head})
    optimizer = Adam(model.parameters())
    for _ in range(26):
        x = torch.randn(10, 8, 4)
        descend(F.cross_entropy(head(cell(x)[0]).flatten(0, 1), torch.randint(0, 2, (80,))), optimizer)


def graph():
    links = torch.softmax(torch.randn(60, 60), 1)
    x, y = blobs(60)

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x):
            return links @ self.two(F.relu(links @ self.one(x)))

    model = Graph()
    optimizer = Adam(model.parameters(), lr=1e-2)
    for _ in range(26):
        descend(F.cross_entropy(model(x), y), optimizer)


def masked_words():
    model = Speaker(Transformer())
    optimizer = Adam(model.parameters(), lr=3e-3)
    for _ in range(26):
        ids = text()[:16]
        hidden = torch.rand(ids.shape) < 0.2
        hidden[:, 0] = True
        loss = F.cross_entropy(
            model(ids.masked_fill(hidden, 0)).transpose(1, 2), ids.masked_fill(~hidden, -100)
        )
        descend(loss, optimizer)


RIGHT = {
    "causal": lambda _: speak(Speaker(Transformer(), mask=True)),
    "causal attention": lambda _: speak(Speaker(Attention(), mask=True), shift_inside=True),
    "recurrent": lambda _: speak(Speaker(Cell(False))),
    "recurrent, time first": lambda _: speak_time_first(TimeFirst(summary=False)),
    "translation": lambda _: translate(Translator(mask=True)),
    "translation by name": lambda _: translate(Translator(mask=True, inner=Copying()), named=True),
    "samples first": lambda _: sequences(Recurrent(True)),
    "softmax over time": lambda _: sequences(Attending(1)),
    "turned rightly": lambda _: sequences(
        Turned(lambda h: h.transpose(1, 2)), loss=F.mse_loss, classes=1
    ),
    "constant weights, random biases": lambda _: constant_weights_random_biases(),
    "adapters alone": lambda _: adapters_alone(),
    "new head": new_head, "best": best_of_all, "best by validation": best_by_validation, "average": moving_average,
    "every epoch": every_epoch, "time first": lambda _: time_first(), "graph": lambda _: graph(),
    "masked words": lambda _: masked_words(),
    "loader": lambda _: fit_loader(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))),
}  # fmt: skip


def fit_loader(model):
    optimizer = Adam(model.parameters(), lr=1e-2)
    for x, y in DataLoader(TensorDataset(X, Y), 16, shuffle=True):
        descend(F.cross_entropy(model(x), y), optimizer)


@pytest.mark.parametrize("loop", RIGHT)
def test_right_weights(judge, loop, tmp_path):
    judged = judge(lambda: RIGHT[loop](tmp_path))
    assert judged.ids == [], judged
