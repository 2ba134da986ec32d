"""NaN and infinity: the phase that made them has its rule, the batch that brought them comes first."""

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, fit, mlp
from torch import nn

NAN, INF = float("nan"), float("inf")


def spoil(step, value, at=(3, 2)):
    def change(now, x, y):
        if now == step:
            x[at] = value
        return x, y

    return change


def loader_with_nan():
    x, y = blobs(128)
    x[70, 1] = NAN
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(inputs), targets).backward()
        optimizer.step()


def images_with_infinity():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    x = torch.randn(64, 1, 8, 8)
    x[40, 0, 2, 2] = INF
    fit(model, (x, torch.randint(0, 2, (64,))), batch=16, steps=8)


def bad_target(value, loss):
    x, _ = blobs()
    y = x.sum(1, keepdim=True)
    y[100] = value
    fit(mlp(classes=1), (x, y), loss=loss, lr=1e-3, steps=6)


BATCHES = {
    "one feature": lambda: fit(mlp(), change=spoil(4, NAN)),
    "from a loader": loader_with_nan,
    "infinite pixel": images_with_infinity,
    "targets": lambda: bad_target(NAN, F.mse_loss),
    "an infinite target": lambda: bad_target(INF, lambda out, y: (out - y).abs().mean()),
}


@pytest.mark.parametrize("spelling", BATCHES)
def test_a_bad_batch_is_the_cause(judge, spelling):
    judged = judge(BATCHES[spelling])
    assert judged.ids == ["D01"], judged


def test_the_bad_sample_is_named(judge):
    finding = judge(loader_with_nan)["D01"]
    assert finding.site == "batch.0"
    assert finding.step == 4
    assert finding.evidence["samples"] == [6]
    assert finding.evidence["indices"] == [70]
    assert "sample 6 of this batch, item 70 of the data set" in finding.hint


def test_the_bad_target_of_a_loader_is_named(judge):
    def train():
        x, _ = blobs(128)
        y = x.sum(1)
        y[70] = INF
        samples = [{"given": {"x": a}, "wanted": b} for a, b in zip(x, y, strict=True)]
        model = mlp(classes=1)
        optimizer = torch.optim.Adam(model.parameters())
        for batch in torch.utils.data.DataLoader(samples, batch_size=16):
            optimizer.zero_grad()
            (model(batch["given"]["x"])[:, 0] - batch["wanted"]).abs().mean().backward()
            optimizer.step()

    judged = judge(train, snapshots="auto")
    assert judged.ids == ["D01"], judged
    assert judged["D01"].evidence["samples"] == [6]
    assert judged["D01"].evidence["indices"] == [70]


def attention(mask_value):
    """Train with an additive mask as an input."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.score, self.head = nn.Linear(8, 4), nn.Linear(4, 3)

        def forward(self, x, mask):
            return self.head(torch.softmax(self.score(x) + mask, -1))

    model, (x, y) = Masked(), blobs()
    mask = torch.zeros(4)
    mask[3] = mask_value
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        optimizer.zero_grad()
        rows = slice(16 * step, 16 * step + 16)
        F.cross_entropy(model(x[rows], mask), y[rows]).backward()
        optimizer.step()


class Imputing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(torch.nan_to_num(x))


def masked_scores():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(classes=4)

        def forward(self, x):
            return self.body(x).masked_fill(torch.tensor([False, False, False, True]), -INF)

    fit(Policy())


LEGAL = {
    "additive mask": lambda: attention(-INF),
    "missing values taken out by the model": lambda: fit(Imputing(), change=spoil(4, NAN)),
    "clean": lambda: fit(mlp(), change=spoil(4, 0.0)),
    "scores masked with minus infinity": masked_scores,
}


@pytest.mark.parametrize("loop", LEGAL)
def test_legal_infinities_and_handled_nans_are_silent(judge, loop):
    assert judge(LEGAL[loop]).ids == []


# ---------------------------------------------------------------- forward, backward, optimizer


class Headed(nn.Module):
    """A layer and a function of what it gives."""

    def __init__(self, head):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.head = head

    def forward(self, x):
        return self.head(self.layer(x))


def own_loss(out, y):
    return -torch.log(torch.softmax(out * 1e3, -1)[torch.arange(len(y)), y]).mean()


FORWARD = {
    "log of a negative": lambda: fit(Headed(torch.log)),
    "division by zero": lambda: fit(Headed(lambda h: h / (h - h.detach()))),
    "own cross-entropy": lambda: fit(mlp(), loss=own_loss),
    "root in a loss": lambda: fit(mlp(), loss=lambda out, y: torch.sqrt(out - 1e3).mean()),
}

FORWARD_MENDED = {
    "log of a positive": lambda: fit(Headed(lambda h: torch.log(F.softplus(h) + 1e-3))),
    "division kept away from zero": lambda: fit(Headed(lambda h: h / (h.abs() + 1.0))),
    "own cross-entropy": lambda: fit(mlp(), loss=lambda out, y: F.nll_loss(F.log_softmax(out, -1), y)),
}


@pytest.mark.parametrize("spelling", FORWARD)
def test_forward(judge, spelling):
    judged = judge(FORWARD[spelling])
    assert judged.ids == ["N01"], judged
    assert judged["N01"].source
    assert judged["N01"].hint
    assert judged["N01"].evidence["op"]


@pytest.mark.parametrize("spelling", FORWARD_MENDED)
def test_forward_mended(judge, spelling):
    assert judge(FORWARD_MENDED[spelling]).ids == []


class Distance(nn.Module):
    """Distance to oneself: zero, and the root has no derivative there."""

    def __init__(self, length):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.length = length

    def forward(self, x):
        hidden = self.layer(x)
        return hidden + self.length(hidden - hidden.clone())


BACKWARD = {
    "root of a sum of squares": lambda: fit(Distance(lambda d: d.square().sum(1, keepdim=True).sqrt())),
    "power of a half": lambda: fit(Distance(lambda d: d.abs().pow(0.5))),
    "where does not protect": lambda: fit(
        Distance(lambda d: torch.where(d.abs() > 0, torch.log(d.abs()), torch.zeros(())))
    ),
}


@pytest.mark.parametrize("spelling", BACKWARD)
def test_backward(judge, spelling):
    judged = judge(BACKWARD[spelling])
    assert judged.ids == ["N02"], judged


BACKWARD_MENDED = {
    "epsilon inside": lambda: fit(Distance(lambda d: (d.square().sum(1, keepdim=True) + 1e-8).sqrt())),
    "norm of torch": lambda: fit(Distance(lambda d: d.norm(dim=1, keepdim=True))),
}


@pytest.mark.parametrize("spelling", BACKWARD_MENDED)
def test_backward_mended(judge, spelling):
    assert judge(BACKWARD_MENDED[spelling]).ids == []


class Reckless(torch.optim.Optimizer):
    """Divides by the square root of what it has seen, without an epsilon."""

    def __init__(self, params, eps):
        super().__init__(params, {"lr": 0.01, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / (p.grad.square().sqrt() + group["eps"]))


def half_frozen():
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad * (torch.arange(8) > 2))
    return model


def uninitialised(value):
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight[7] = value
    x = torch.randint(0, 7, (64, 2))
    x[40] = 7
    fit(model, (x, torch.randint(0, 3, (64,))), batch=16, steps=8)


def with_optimizer(eps):
    model = half_frozen()
    fit(model, optimizer=Reckless(model.parameters(), eps))


def adam_with_no_epsilon(eps):
    model = half_frozen()
    fit(model, optimizer=torch.optim.Adam(model.parameters(), eps=eps))


PARAMETERS = {
    "own optimizer": with_optimizer,
    "Adam": adam_with_no_epsilon,
    "a bad row from the start": lambda eps: uninitialised(0.1 if eps else NAN),
}


@pytest.mark.parametrize("spelling", PARAMETERS)
def test_parameters(judge, spelling):
    judged = judge(lambda: PARAMETERS[spelling](0.0))
    assert judged.ids == ["N03"], judged
    assert judge(lambda: PARAMETERS[spelling](1e-8)).ids == []


# ---------------------------------------------------------------- half precision


def in_half(factor, how):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x):
            return how(self, x, factor)

    fit(Half(), lr=1e-3, steps=12)


def cast(self, x, factor):
    hidden = self.layer(x).half() * factor
    return self.head(hidden.float() / factor)


def matmul(self, x, factor):
    hidden = (self.layer(x) * factor).half()
    return self.head((hidden * hidden).float() / factor**2)


def summed(self, x, factor):
    hidden = self.layer(x).abs().half()
    total = (hidden * factor).sum(-1, keepdim=True, dtype=torch.float16)
    return self.head(hidden.float()) + total.float() / 1e6


HALF = {"cast": (cast, 1e5, 1e2), "product": (matmul, 1e3, 1e1), "sum": (summed, 6e4, 1.0)}


@pytest.mark.parametrize("spelling", HALF)
def test_half_overflow(judge, spelling):
    how, bad, good = HALF[spelling]
    assert judge(lambda: in_half(bad, how)).ids == ["N07"]
    assert judge(lambda: in_half(good, how)).ids == []


def scaled(spoiled, steps=30):
    """Train with a GradScaler whose gradients are infinite in the steps that ``spoiled`` names."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = blobs()
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x[:32]), y[:32])).backward()
        if spoiled(step):
            model[0].weight.grad[0, 0] = INF
        scaler.step(optimizer)
        scaler.update()


SKIPPING = {
    "always": lambda: scaled(lambda step: True),
    "after a good start": lambda: scaled(lambda step: step > 10),
    "until the scale has sunk": lambda: scaled(lambda step: step % 14, steps=60),
}


@pytest.mark.parametrize("spelling", SKIPPING)
def test_a_scaler_that_skips(judge, spelling):
    judged = judge(SKIPPING[spelling])
    assert judged.ids == ["N04"]
    if spelling == "after a good start":
        assert judged["N04"].step == 11
    if spelling == "until the scale has sunk":
        assert judged["N04"].evidence["scale"] < 1e-3


def test_a_scaler_that_finds_its_scale(judge):
    assert judge(lambda: scaled(lambda step: step < 6 or step == 20)).ids == []
