"""Where the loss starts, stays and jumps; gradients that vanish or explode."""

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, fit, mlp
from torch import nn

Adam = torch.optim.Adam


def large_head(scale):
    model = mlp(classes=10)
    with torch.no_grad():
        model[2].weight.mul_(scale)
    x, y = blobs(classes=10)
    fit(model, (x, y), lr=1e-3, steps=12)


def large_embedding(std):
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50, bias=False))
    nn.init.normal_(model[0].weight, std=std)
    nn.init.normal_(model[1].weight, std=std)
    x = torch.randint(0, 50, (64, 12))
    loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    fit(model, (x, x.roll(-1, 1)), loss=loss, batch=8, steps=12, lr=1e-2)


def pixels(scale):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 1))
    with torch.no_grad():
        model[2].weight.mul_(scale)
    x = torch.randn(32, 3, 8, 8)
    criterion = nn.CrossEntropyLoss()
    fit(model, (x, torch.randint(0, 5, (32, 8, 8))), loss=criterion, batch=8, steps=12, lr=1e-3)


INITIAL = {
    "head": lambda bad: large_head(60.0 if bad else 1.0),
    "embedding": lambda bad: large_embedding(1.0 if bad else 0.05),
    "pixels": lambda bad: pixels(60.0 if bad else 1.0),
}


@pytest.mark.parametrize("spelling", INITIAL)
def test_initial_loss(judge, spelling):
    judged = judge(lambda: INITIAL[spelling](True))
    assert judged.ids == ["L11"], judged
    assert judge(lambda: INITIAL[spelling](False)).ids == []


def test_a_contrastive_loss_has_no_usual_start(judge):
    def contrast(model, x):
        one, two = (F.normalize(model(x + torch.randn_like(x)), dim=1) for _ in range(2))
        return F.cross_entropy(one @ two.T / 0.02, torch.arange(len(x)))

    def train():
        model = mlp(classes=4)
        optimizer = Adam(model.parameters(), lr=1e-3)
        for _ in range(20):
            optimizer.zero_grad()
            contrast(model, torch.randn(32, 8)).backward()
            optimizer.step()

    assert judge(train).ids == []


def test_scores_that_are_sharpened_on_purpose_start_high(judge):
    class Cosine(nn.Module):
        def __init__(self):
            super().__init__()
            self.centres = nn.Parameter(torch.randn(3, 8))

        def forward(self, x):
            return 30.0 * F.linear(F.normalize(x), F.normalize(self.centres))

    assert judge(lambda: fit(Cosine(), lr=0.01, steps=8)).ids == []


# ---------------------------------------------------------------- nothing is learned


def stream(pair, *, steps=320, lr=1e-2, loss=F.cross_entropy, classes=3, model=None):
    """Train on fresh data in every step."""
    model = model or mlp(classes=classes, hidden=16)
    optimizer = Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        x = torch.randn(64, 8)
        optimizer.zero_grad()
        loss(model(x), pair(x)).backward()
        optimizer.step()


def learnable(x):
    return x[:, :3].argmax(1)


def shuffled(x):
    return learnable(x)[torch.randperm(len(x))]


def binary(pair):
    return lambda x: pair(x).clamp(max=1).float()[:, None]


UNINFORMED = {
    "labels in another order": lambda bad: stream(shuffled if bad else learnable),
    "binary": lambda bad: stream(
        binary(shuffled if bad else learnable), loss=nn.BCEWithLogitsLoss(), classes=1
    ),
    "inputs replaced by noise": lambda bad: stream(
        lambda x: learnable(torch.randn_like(x) if bad else x), loss=nn.CrossEntropyLoss()
    ),
}


@pytest.mark.parametrize("spelling", UNINFORMED)
def test_uninformative(judge, spelling):
    judged = judge(lambda: UNINFORMED[spelling](True), every=4)
    assert judged.ids == ["D06"], judged
    assert judge(lambda: UNINFORMED[spelling](False), every=4).ids == []


def far_off(bad):
    """Start far from the answer with steps that do not get there."""
    model = mlp(hidden=16)
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([1.5, 0.0, 0.0]))
    stream(learnable, model=model, lr=1e-6 if bad else 1e-2)


def constant_regression(bad):
    target = (lambda x: torch.randn(len(x), 1)) if bad else (lambda x: x[:, :1] * 2)
    stream(target, loss=F.mse_loss, classes=1)


def far_off_binary(bad):
    model = mlp(hidden=16, classes=1)
    with torch.no_grad():
        model[2].bias.fill_(1.5)
    stream(binary(learnable), model=model, lr=1e-6 if bad else 1e-2, loss=nn.BCEWithLogitsLoss())


STUCK = {"a slow start": far_off, "regression on noise": constant_regression, "binary": far_off_binary}


@pytest.mark.parametrize("spelling", STUCK)
def test_stuck(judge, spelling):
    judged = judge(lambda: STUCK[spelling](True), every=20)
    assert judged.ids == ["V02"], judged
    assert judge(lambda: STUCK[spelling](False), every=20).ids == []


# ---------------------------------------------------------------- spikes


def test_a_harder_task_is_no_spike(judge):
    def change(step, x, y):
        return x, y * (8 if step >= 45 else 1)

    def train():
        x, _ = blobs()
        model = mlp(classes=1)
        optimizer = Adam(model.parameters(), lr=1e-3)
        fit(model, (x, x[:, :1]), loss=F.mse_loss, steps=60, optimizer=optimizer, change=change)

    assert judge(train).ids == []


def spiking(bad, *, loss=F.cross_entropy, targets=None, at=60):
    x, y = blobs(classes=3)
    y = targets(x) if targets else y
    classes = 3 if targets is None else 1

    def change(step, inputs, labels):
        if bad and step == at:
            inputs[:8] *= -300
        return inputs, labels

    model = mlp(classes=classes)
    fit(model, (x, y), loss=loss, steps=90, optimizer=Adam(model.parameters(), lr=1e-3), change=change)


SPIKES = {
    "classes": spiking,
    "regression": lambda bad: spiking(bad, loss=F.mse_loss, targets=lambda x: x[:, :1]),
    "absolute error": lambda bad: spiking(bad, loss=nn.L1Loss(), targets=lambda x: x[:, :1]),
}


@pytest.mark.parametrize("spelling", SPIKES)
def test_spike(judge, spelling):
    judged = judge(lambda: SPIKES[spelling](True))
    assert judged.ids == ["V03"], judged
    assert judged["V03"].step == 60
    assert judged["V03"].evidence["fingerprint"]
    assert judge(lambda: SPIKES[spelling](False)).ids == []


# ---------------------------------------------------------------- evaluation


def overfit(bad, *, how):
    """Train a large model on few samples with labels that are partly wrong, evaluate on others."""
    x, y = blobs(512, seed=2)
    if bad:
        x, y = torch.randn(512, 8), torch.randint(0, 3, (512,))
    size = 32 if bad else 256
    model = mlp(hidden=256)
    optimizer = Adam(model.parameters(), lr=1e-2 if bad else 1e-3)
    criterion = nn.CrossEntropyLoss()
    for _ in range(8):
        for _ in range(8):
            optimizer.zero_grad()
            criterion(model(x[:size]), y[:size]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            how(criterion, model, x[256:], y[256:])
        model.train()


def whole(criterion, model, x, y):
    criterion(model(x), y)


def in_batches(criterion, model, x, y):
    for start in range(0, len(x), 64):
        criterion(model(x[start : start + 64]), y[start : start + 64])


@pytest.mark.parametrize("how", [whole, in_batches])
def test_overfitting(judge, how):
    judged = judge(lambda: overfit(True, how=how))
    assert judged.ids == ["V01"], judged
    assert judge(lambda: overfit(False, how=how)).ids == []


def test_overfitting_from_a_logged_number(judge, tmp_path):
    import clew

    def logged(value):
        model = mlp()
        with clew.watch(out=str(tmp_path), name="logged") as run:
            fit(model, steps=60, after=lambda s: run.log(val_loss=value(s)) if s % 10 == 9 else None)
        return [finding.id for finding in clew.diagnose(str(run.path)).findings]

    assert logged(lambda step: 1.5 + abs(step - 19) / 50) == ["V01"]
    scatter = {9: 2.0, 19: 1.5, 29: 1.8, 39: 1.6, 49: 1.9, 59: 1.65}
    assert logged(scatter.__getitem__) == []  # no trend: the second one is the best by chance
    folds = {9: 2.0, 19: 1.5, 29: 5.0, 39: 3.0, 49: 2.0, 59: 1.6}
    assert logged(folds.__getitem__) == []  # a new model comes down from above
    assert logged(lambda step: 1e-4 * (1 + abs(step - 19))) == []  # better than in training, all along


def judge_evaluations(folder, training, validation):
    """Return whether V01 is found where these losses are all that is seen: one of each a step."""
    import clew

    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with clew.watch(out=str(folder), name="seen", doctor=False) as run:
        for trained, validated in zip(training, validation, strict=True):
            optimizer.zero_grad()
            (weight + float(trained)).backward()
            optimizer.step()
            run.log(val_loss=float(validated))
    return "V01" in [finding.id for finding in clew.diagnose(str(run.path)).findings]


def wander(generator, count, *, size):
    """Return noise that comes and goes slowly, as that of a small validation set under moving weights."""
    noise = [0.0]
    for _ in range(count - 1):
        noise.append(0.8 * noise[-1] + 0.6 * size * float(torch.randn((), generator=generator)))
    return torch.tensor(noise)


@pytest.mark.parametrize("seed", range(6))
def test_many_noisy_evaluations_of_a_plateau_are_no_overfitting(tmp_path, seed):
    generator = torch.Generator().manual_seed(seed)
    falls = torch.exp(-torch.arange(120) / 12)
    training = 0.42 + falls + 0.08 * torch.randn(120, generator=generator)
    validation = 0.43 + falls + wander(generator, 120, size=0.035)
    assert not judge_evaluations(tmp_path, training, validation)
    rises = 0.004 * (torch.arange(120) - 30).clamp(min=0)
    assert judge_evaluations(tmp_path, training - rises.clamp(max=0.3), validation + rises)


# ---------------------------------------------------------------- gradients


def deep(activation, *, layers, norm=False):
    parts = []
    for number in range(layers):
        parts += [nn.Linear(8 if not number else 32, 32), *([nn.LayerNorm(32)] if norm else []), activation()]
    return nn.Sequential(*parts, nn.Linear(32, 3))


class Recurrent(nn.Module):
    """The same small step, unrolled with weights of its own each time."""

    def __init__(self, scale, layers=12):
        super().__init__()
        self.cells = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.head = nn.Linear(8, 3)
        with torch.no_grad():
            for cell in self.cells:
                nn.init.orthogonal_(cell.weight)
                cell.weight.mul_(scale)

    def forward(self, x):
        for cell in self.cells:
            x = torch.tanh(cell(x))
        return self.head(x)


VANISHING = {
    "sigmoids": lambda bad: fit(deep(nn.Sigmoid, layers=12) if bad else deep(nn.ReLU, layers=4)),
    "small weights": lambda bad: fit(Recurrent(0.15 if bad else 1.0)),
    "softmax in between": lambda bad: fit(
        deep(lambda: nn.Softmax(-1), layers=7) if bad else deep(nn.GELU, layers=7, norm=True)
    ),
}


@pytest.mark.parametrize("spelling", VANISHING)
def test_vanishing(judge, spelling):
    judged = judge(lambda: VANISHING[spelling](True))
    assert "N08" in judged.all_ids, judged
    assert judged.errors == []
    assert len(judged.ids) == 1, judged
    assert judge(lambda: VANISHING[spelling](False)).ids == []


def exploding(bad, *, model=None, clip=False):
    """Let the weights of a recurrent model grow by a regulariser with the wrong sign."""
    model = model or Growing()
    x, y = blobs()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(60):
        optimizer.zero_grad()
        rows = torch.arange(step * 32, step * 32 + 32) % len(x)
        F.mse_loss(model(x[rows]), F.one_hot(y[rows], 3).float()).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if bad and step >= 25:
            with torch.no_grad():
                model.grow()


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.enter(x))

    def grow(self):
        self.enter.weight.mul_(1.6)


class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.cell, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.enter(x)
        for _ in range(6):
            hidden = self.cell(hidden)
        return self.head(hidden)

    def grow(self):
        self.cell.weight.mul_(1.4)


class Squared(Growing):
    def forward(self, x):
        return self.head(self.enter(x)).square()


@pytest.mark.parametrize("make", [Growing, Unrolled, Squared])
def test_exploding(judge, make):
    judged = judge(lambda: exploding(True, model=make()))
    assert "N06" in judged.all_ids, judged
    assert judge(lambda: exploding(False, model=make())).ids == []


def grow_little_by_little(judge, *, by):
    """A recurrent net on ever longer sequences, with an optimizer that divides by what gradients are."""

    def train():
        net, head = nn.RNN(2, 32, batch_first=True), nn.Linear(32, 1)
        with torch.no_grad():
            net.weight_hh_l0.normal_(std=by / 32**0.5)
        optimizer = Adam([*net.parameters(), *head.parameters()], lr=1e-5)
        for step in range(100):
            x = torch.randn(16, 4 + step, 2)
            optimizer.zero_grad()
            (head(net(x)[0][:, -1]) - x[:, -1, :1]).square().mean().backward()
            optimizer.step()

    return judge(train, every=1)


def test_gradients_that_explode_little_by_little(judge):
    assert "N06" in grow_little_by_little(judge, by=3.0).all_ids
    assert grow_little_by_little(judge, by=0.9).ids == []


def test_clipping_handles_an_explosion(judge):
    assert "N06" not in judge(lambda: exploding(True, clip=True)).all_ids
