"""Units that never fire, saturated activations, equal outputs, unscaled inputs."""

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, fit, mlp
from torch import nn


def sink_bias(layer, value):
    with torch.no_grad():
        layer.bias.fill_(value)


class Functional(nn.Module):
    """Activations as functions: no module to hook."""

    def __init__(self, function, classes=3):
        super().__init__()
        self.one, self.two = nn.Linear(8, 32), nn.Linear(32, classes)
        self.function = function

    def forward(self, x):
        return self.two(self.function(self.one(x)))


def dead_module(bias):
    model = mlp(layers=3)
    sink_bias(model[2], bias)
    fit(model)


def dead_function(bias):
    model = Functional(F.relu)
    sink_bias(model.one, bias)
    fit(model, loss=lambda out, y: F.mse_loss(out, F.one_hot(y, 3).float()), lr=0.05)


def dead_clamp(bias):
    model = Functional(lambda h: h.clamp(min=0))
    sink_bias(model.one, bias)
    fit(model)


def dead_convolution(bias):
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 2)
    )
    sink_bias(model[0], bias)
    x = torch.rand(64, 1, 8, 8)
    fit(model, (x, (x.mean((1, 2, 3)) > 0.5).long()), batch=16)


class Twice(nn.Module):
    """Uses one ReLU for two layers of the same width."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.last, self.act = (
            nn.Linear(8, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 3),
            nn.ReLU(),
        )

    def forward(self, x):
        return self.last(self.act(self.two(self.act(self.one(x)))))


def dead_second_use(bias):
    model = Twice()
    sink_bias(model.two, bias)
    fit(model)


DEAD = {
    "second use": dead_second_use,
    "module": dead_module,
    "function": dead_function,
    "clamp": dead_clamp,
    "convolution": dead_convolution,
}


@pytest.mark.parametrize("spelling", DEAD)
def test_dead(judge, spelling):
    judged = judge(lambda: DEAD[spelling](-50.0))
    assert judged.ids == ["M11"], judged
    assert judged.errors == ["M11"]
    assert judged["M11"].step == 0
    assert judge(lambda: DEAD[spelling](0.1)).ids == []


def test_most_units_dead_is_a_warning(judge):
    def train():
        model = mlp(hidden=40)
        with torch.no_grad():
            model[0].bias[:38] = -50.0
        fit(model)

    judged = judge(train)
    assert judged.ids == ["M11"]
    assert judged.errors == []
    assert judged["M11"].evidence["dead"] == 38


def test_dead_units_up_to_half_are_silent(judge):
    def train():
        model = mlp(hidden=40)
        with torch.no_grad():
            model[0].bias[:15] = -50.0
        fit(model)

    assert judge(train).ids == []


def test_a_hinge_at_rest_is_silent(judge):
    class Hinge(nn.Module):
        def forward(self, scores, y):
            right = scores.gather(1, y[:, None])
            return F.relu(scores - right + 1e-3 - 2 * F.one_hot(y, 3))

    def train():
        hinge = Hinge()
        fit(mlp(), loss=lambda out, y: hinge(out, y).mean() + F.cross_entropy(out, y))

    assert judge(train).ids == []


# ---------------------------------------------------------------- saturation


def saturated(activation, scale, *, layers=3):
    model = mlp(activation=activation, layers=layers)
    with torch.no_grad():
        model[2].weight.mul_(scale)
        model[0].weight.mul_(scale)
    fit(model, lr=0.01)


def saturated_function(scale):
    model = Functional(torch.tanh)
    with torch.no_grad():
        model.one.weight.mul_(scale)
    fit(model, lr=0.01)


SATURATED = {
    "tanh module": lambda scale: saturated(nn.Tanh, scale),
    "sigmoid module": lambda scale: saturated(nn.Sigmoid, scale * 4),
    "tanh function": saturated_function,
    "most of a tanh": lambda scale: saturated(nn.Tanh, scale**0.55),
}


@pytest.mark.parametrize("spelling", SATURATED)
def test_saturated(judge, spelling):
    judged = judge(lambda: SATURATED[spelling](100.0))
    assert judged.ids == ["M12"], judged
    assert judge(lambda: SATURATED[spelling](1.0)).ids == []


def test_saturated_gates_and_outputs_are_silent(judge):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.value, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 3)
            sink_bias(self.gate, 30.0)

        def forward(self, x):
            return self.head(torch.sigmoid(self.gate(x)) * self.value(x))

    assert judge(lambda: fit(Gated())).ids == []


# ---------------------------------------------------------------- equal outputs


class Forgetful(nn.Module):
    """Loses its input on the way."""

    def __init__(self, how):
        super().__init__()
        self.body, self.head, self.how = nn.Linear(8, 16), nn.Linear(16, 3), how

    def forward(self, x):
        return self.head(self.how(torch.tanh(self.body(x))))


COLLAPSED = {
    "one plus almost nothing": lambda bad: fit(Forgetful(lambda h: 1 + h * 1e-7 if bad else h)),
    "multiplied by nothing": lambda bad: fit(Forgetful(lambda h: h * (1e-9 if bad else 1.0))),
    "softmax over the batch of one feature": lambda bad: fit(
        Forgetful(lambda h: torch.softmax(h[:, :1], -1).expand_as(h) if bad else h)
    ),
}


@pytest.mark.parametrize("spelling", COLLAPSED)
def test_collapsed(judge, spelling):
    judged = judge(lambda: COLLAPSED[spelling](True))
    assert judged.ids == ["M20"], judged
    assert judge(lambda: COLLAPSED[spelling](False)).ids == []


def test_a_head_that_starts_at_zero_is_silent(judge):
    def train():
        model = mlp()
        nn.init.zeros_(model[2].weight)
        nn.init.zeros_(model[2].bias)
        fit(model)

    assert judge(train).ids == []


def test_a_discriminator_that_wins_is_silent(judge):
    def train():
        torch.manual_seed(1)
        maker = nn.Linear(4, 8)
        critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1), nn.Sigmoid())
        optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
        for _ in range(90):
            real, fake = torch.randn(16, 8) + 30, maker(torch.randn(16, 4)).detach() - 30
            optimizer.zero_grad()
            loss = F.binary_cross_entropy(critic(real), torch.ones(16, 1))
            (loss + F.binary_cross_entropy(critic(fake), torch.zeros(16, 1))).backward()
            optimizer.step()

    assert "M20" not in judge(train).all_ids


# ---------------------------------------------------------------- inputs


def on_pictures(scale, model=None, offset=0.0):
    x = torch.rand(64, 1, 8, 8) * scale + offset
    y = (x.mean((1, 2, 3)) > x.mean()).long()
    net = model or nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
    fit(net, (x, y), batch=16, lr=1e-2 / max(scale, 1) ** 2, steps=12)


def flat(scale):
    on_pictures(scale, nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2)))


def rows_of_bytes(scale):
    """Pictures as sequences of rows, as bytes or divided by 255."""
    x = torch.randint(0, 256, (64, 8, 16)).float() / (255.0 / scale)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))
    fit(model, (x, (x.mean((1, 2)) > x.mean()).long()), batch=16, lr=1e-2 / scale**2, steps=12)


def table(scale):
    x, y = blobs()
    model = mlp()
    fit(model, (x * scale, y), optimizer=torch.optim.Adam(model.parameters()), steps=12)


class Table(nn.Module):
    """Choices as embeddings, side by side with columns of numbers."""

    def __init__(self):
        super().__init__()
        self.embed, self.drop, self.body = nn.Embedding(4, 3), nn.Dropout(0.1), mlp(features=11)

    def forward(self, x):
        choices = self.drop(self.embed(x[:, 0].long()))
        return self.body(torch.cat([choices, x], 1))


def columns(scale):
    x, y = blobs()
    x[:, 0] = torch.randint(0, 4, (len(x),)).float()
    x[:, 3] *= scale
    model = Table()
    fit(model, (x, y), optimizer=torch.optim.Adam(model.parameters()), steps=12)


UNSCALED = {
    "pictures": lambda bad: on_pictures(255.0 if bad else 1.0),
    "flat pictures": lambda bad: flat(255.0 if bad else 1.0),
    "rows of bytes": lambda bad: rows_of_bytes(255.0 if bad else 1.0),
    "far from zero": lambda bad: on_pictures(1.0, offset=100.0 if bad else 0.0),
    "large numbers": lambda bad: table(1e5 if bad else 1.0),
    "one column": lambda bad: columns(1e5 if bad else 1.0),
}


@pytest.mark.parametrize("spelling", UNSCALED)
def test_unscaled(judge, spelling):
    judged = judge(lambda: UNSCALED[spelling](True))
    assert judged.ids[:1] == ["D07"], judged
    assert len(judged.ids) == 1, judged
    assert ("pixels" in judged["D07"].hint) == (spelling in ("pictures", "flat pictures", "rows of bytes"))
    assert judge(lambda: UNSCALED[spelling](False)).ids == []


class Normalising(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
        self.how = how

    def forward(self, x):
        return self.body(self.how(x))


@pytest.mark.parametrize("how", [lambda x: x / 255, lambda x: (x - 127) / 60, nn.BatchNorm2d(1)])
def test_scaled_inside_the_model_is_silent(judge, how):
    x = torch.rand(64, 1, 8, 8) * 255
    y = (x.mean((1, 2, 3)) > x.mean()).long()
    assert judge(lambda: fit(Normalising(how), (x, y), batch=16, steps=12)).ids == []


def test_tables_of_ages_are_silent(judge):
    x, y = blobs()
    x[:, 0] = torch.randint(18, 90, (len(x),)).float()
    assert "D07" not in judge(lambda: fit(mlp(), (x, y), lr=1e-4, steps=12)).all_ids


TWICE = {
    "255 and 255": lambda bad: on_pictures(1 / 255 if bad else 1.0),
    "colour": lambda bad: colour(1 / 255 if bad else 1.0),
    "normalised after": lambda bad: on_pictures(1 / 255 / 0.3 if bad else 3.0),
}


def colour(scale):
    x = torch.rand(32, 3, 8, 8) * scale
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    fit(model, (x, torch.randint(0, 2, (32,))), batch=16, lr=1e-2, steps=12)


@pytest.mark.parametrize("spelling", TWICE)
def test_scaled_twice(judge, spelling):
    judged = judge(lambda: TWICE[spelling](True))
    assert judged.ids == ["D08"], judged
    assert judge(lambda: TWICE[spelling](False)).ids == []


class Shared(nn.Module):
    """One ReLU for both layers; the outer one may never fire."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.act = nn.Linear(8, 32), nn.Linear(32, 1), nn.ReLU()

    def forward(self, x):
        return self.act(self.last(self.act(self.first(x))))


@pytest.mark.parametrize("offset", [-30.0, 30.0])
def test_a_dead_output_behind_a_shared_relu(judge, offset):
    def train():
        x, _ = blobs()
        model = Shared()
        with torch.no_grad():
            model.last.bias.fill_(offset / 10)
        fit(model, (x, x[:, :1] + offset), loss=F.mse_loss, lr=1e-3, steps=24)

    judged = judge(train)
    assert judged.ids == (["M11"] if offset < 0 else []), judged
    if judged.ids:
        assert "the model ends in a ReLU" in judged["M11"].hint


def test_layers_that_are_given_one_sample_without_a_batch(judge, capsys):
    def train():
        model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in torch.randn(6, 8):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    assert judge(train).ids == []
    assert "fault" not in capsys.readouterr().err


class Unit(nn.Module):
    """Codes of length 1."""

    def __init__(self):
        super().__init__()
        self.body = mlp(hidden=64, classes=8)

    def forward(self, x):
        return F.normalize(self.body(x), dim=1)


def alike(a, b):
    return -F.cosine_similarity(a, b).mean()


def near(a, b):
    return (a - b).square().sum(1).mean()


def dotted(a, b):
    return 1 - (a * b).sum(1).mean()


def contrast(a, b):
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def spread(a, b):
    return alike(a, b) + (a.mean(0) @ a.mean(0))


def follow(a, b):
    return alike(a, b.detach()) + near(torch.cat([a, b]), torch.cat([a, b]).roll(1, 0)) * -1


@pytest.mark.parametrize("loss", [alike, near, dotted, contrast, spread, follow])
def test_codes_that_come_together(judge, loss):
    def train():
        model = Unit()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        for _ in range(90):
            x = torch.randn(64, 8)
            optimizer.zero_grad()
            loss(model(x + 0.3 * torch.randn_like(x)), model(x + 0.3 * torch.randn_like(x))).backward()
            optimizer.step()

    judged = judge(train)
    assert judged.ids == (["M20"] if loss in (alike, near, dotted) else []), judged
