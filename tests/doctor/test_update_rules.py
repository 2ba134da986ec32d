"""Learning rates, lost updates and clipping: three spellings of each fault, and the loops that resemble them."""

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, fit, mlp
from torch import nn

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def scheduled(make_schedule, *, lr=0.1, steps=40, per_step=True):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=lr)
    schedule = make_schedule(optimizer)
    fit(model, optimizer=optimizer, steps=steps, after=lambda _: schedule.step() if per_step else None)


def two_groups(*rates):
    model = mlp()
    groups = [
        {"params": part.parameters(), "lr": rate}
        for part, rate in zip((model[0], model[2]), rates, strict=True)
    ]
    fit(model, optimizer=Adam(groups))


ZERO_RATE = {
    "constant": lambda: fit(mlp(), lr=0.0),
    "integer division": lambda: scheduled(
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step // 1000)
    ),
    "both groups": lambda: two_groups(0.0, 0.0),
}

RATES_NEAR_ZERO = {
    "warm-up from zero": lambda: scheduled(
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(s / 10, 1))
    ),
    "schedule that ends at zero": lambda: scheduled(
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: max(1 - s / 36, 0))
    ),
    "one frozen group": lambda: two_groups(0.0, 1e-2),
    "one cycle": lambda: scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=60)),
}


@pytest.mark.parametrize("spelling", ZERO_RATE)
def test_zero_rate(judge, spelling):
    judged = judge(ZERO_RATE[spelling])
    assert judged.ids == ["O07"], judged
    assert judged.errors == ["O07"]


@pytest.mark.parametrize("loop", RATES_NEAR_ZERO)
def test_rates_that_touch_zero(judge, loop):
    assert judge(RATES_NEAR_ZERO[loop]).ids == []


def test_a_rate_that_becomes_zero_is_a_warning(judge):
    judged = judge(
        lambda: scheduled(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [20], gamma=0.0), steps=80)
    )
    assert judged.ids == ["O07"]
    assert judged.errors == []
    assert judged["O07"].step == 20


def conv_net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 9, 32),
        nn.ReLU(),
        nn.Linear(32, 2),
    )


def pictures(samples=128):
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(0, 2, (samples,), generator=generator)
    return torch.randn(samples, 1, 8, 8, generator=generator) + y[:, None, None, None], y


def regression(lr):
    x, _ = blobs()
    fit(mlp(classes=1), (x, x[:, :1] * 2), loss=F.mse_loss, lr=lr, steps=40)


def with_adam(model, data=None, **settings):
    lr = settings.pop("lr")
    fit(model, data, optimizer=Adam(model.parameters(), lr=lr), **settings)


HIGH = {
    "SGD": lambda lr: fit(mlp(), lr=50.0 if lr else 0.1, steps=40),
    "Adam on a convolution": lambda lr: with_adam(conv_net(), pictures(), lr=1.0 if lr else 1e-3, steps=40),
    "regression that explodes": lambda lr: regression(10.0 if lr else 0.02),
    "momentum on a convolution": lambda lr: fit(
        (net := conv_net()),
        pictures(),
        optimizer=SGD(net.parameters(), 3.0 if lr else 0.02, momentum=0.9),
        steps=40,
    ),
    "deep": lambda lr: with_adam(mlp(layers=5), lr=3.0 if lr else 3e-3, steps=40),
}


def test_too_high_for_layers_that_die_of_it(judge):
    def train():
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)
        )
        x, y = torch.randn(256, 1, 12, 12), torch.randint(0, 10, (256,))
        fit(model, (x, y), lr=5.0, steps=40)

    judged = judge(train)
    assert judged.ids == ["O08"], judged
    assert "M11" in {each.id for each in judged["O08"].explains}


@pytest.mark.parametrize("spelling", HIGH)
def test_too_high(judge, spelling):
    judged = judge(lambda: HIGH[spelling](True))
    assert judged.ids == ["O08"], judged
    assert judge(lambda: HIGH[spelling](False)).ids == []


@pytest.mark.parametrize("factor", [60, 1.5])
def test_too_high_from_some_step_on(judge, factor):
    def train():
        model, (x, _) = mlp(classes=1), blobs()
        optimizer = SGD(model.parameters(), lr=0.01)

        def raise_rate(step):
            optimizer.param_groups[0]["lr"] = 0.01 * (factor if step >= 45 else 1)

        fit(model, (x, x[:, :1]), loss=F.mse_loss, optimizer=optimizer, steps=60, after=raise_rate)

    judged = judge(train)
    assert judged.ids == (["O08"] if factor > 3 else []), judged
    if judged.ids:
        assert judged["O08"].step == 46
        assert "lr rises from 0.01 to 0.6 at step 46" in judged["O08"].hint


def test_weights_that_start_at_zero_have_no_size_to_compare_with(judge):
    def train():
        here, there = nn.Embedding(100, 8), nn.Embedding(100, 8)
        nn.init.uniform_(here.weight, -0.03, 0.03)
        nn.init.zeros_(there.weight)
        optimizer = torch.optim.Adagrad([*here.parameters(), *there.parameters()], lr=0.05)
        for _ in range(30):
            given, near = torch.randint(0, 100, (2, 64))
            loss = F.softplus(-(here(given) * there(near)).sum(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert judge(train).ids == []


LOW = {
    "SGD": lambda lr: fit(mlp(), lr=lr),
    "Adam": lambda lr: with_adam(conv_net(), pictures(), lr=lr / 100),
    "regression": lambda lr: regression(lr / 10),
}


@pytest.mark.parametrize("spelling", LOW)
def test_too_low(judge, spelling):
    judged = judge(lambda: LOW[spelling](1e-8))
    assert judged.ids == ["O09"], judged
    assert judge(lambda: LOW[spelling](1e-1)).ids == []


def test_a_slow_warm_up_is_not_too_low(judge):
    warm_up = lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1e-9 * 2**step)  # noqa: E731
    assert judge(lambda: scheduled(warm_up, steps=30)).ids == []


def in_dtype(dtype, lr, make=SGD, weights=None):
    model = (weights or mlp()).to(dtype)
    x, y = blobs()
    fit(
        model,
        (x.to(dtype), y),
        optimizer=make(model.parameters(), lr=lr),
        loss=lambda o, t: F.cross_entropy(o.float(), t),
    )


LOST = {
    "bfloat16 with SGD": lambda dtype: in_dtype(dtype, 3e-5),
    "bfloat16 with Adam": lambda dtype: in_dtype(dtype, 1e-5, Adam),
    "bfloat16 with AdamW": lambda dtype: in_dtype(dtype, 1e-5, torch.optim.AdamW, mlp(layers=4)),
}


@pytest.mark.parametrize("spelling", LOST)
def test_lost_to_precision(judge, spelling):
    judged = judge(lambda: LOST[spelling](torch.bfloat16))
    assert judged.ids == ["O10"], judged
    assert judge(lambda: LOST[spelling](torch.float32)).ids == []


def test_half_precision_with_a_rate_that_moves_weights(judge):
    assert judge(lambda: in_dtype(torch.bfloat16, 0.1)).ids == []


def put_back(step_of):
    model = mlp()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    fit(model, after=lambda step: model.load_state_dict(kept) if step_of(step) else None)


class Idle(torch.optim.Optimizer):
    def __init__(self, params, scale):
        super().__init__(params, {"lr": 0.1})
        self.scale = scale

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"] * self.scale)


def with_idle(scale):
    model = mlp()
    fit(model, optimizer=Idle(model.parameters(), scale))


def copied_back(works):
    model, shadow = mlp(), mlp()
    shadow.load_state_dict(model.state_dict())

    def sync(_):
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), shadow.parameters(), strict=True):
                if works:
                    theirs.copy_(ours)
                else:
                    ours.copy_(theirs)

    fit(model, after=sync)


UNCHANGED = {
    "checkpoint loaded every step": lambda ok: put_back(lambda step: not ok),
    "an optimizer that does nothing": lambda ok: with_idle(1.0 if ok else 0.0),
    "copied in the wrong direction": copied_back,
}


@pytest.mark.parametrize("spelling", UNCHANGED)
def test_unchanged(judge, spelling):
    judged = judge(lambda: UNCHANGED[spelling](False))
    assert judged.ids == ["O11"], judged
    assert judge(lambda: UNCHANGED[spelling](True)).ids == []


def test_weights_that_start_again_now_and_then(judge):
    assert judge(lambda: put_back(lambda step: step % 5 == 4)).ids == []


def clipped(limit, *, loss=F.cross_entropy, lr=0.1, make=SGD):
    model, (x, y) = mlp(), blobs()
    optimizer = make(model.parameters(), lr=lr)
    for step in range(80):
        rows = torch.arange(step * 32, step * 32 + 32) % len(x)
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()


def summed(out, y):
    return F.cross_entropy(out, y, reduction="sum")


CLIPPED = {
    "small limit": lambda ok: clipped(1.0 if ok else 1e-3),
    "summed loss": lambda ok: clipped(20.0 if ok else 0.02, loss=summed, lr=1e-3),
    "Adam": lambda ok: clipped(1.0 if ok else 1e-4, make=Adam, lr=1e-3),
}


@pytest.mark.parametrize("spelling", CLIPPED)
def test_clipping(judge, spelling):
    judged = judge(lambda: CLIPPED[spelling](False))
    assert judged.ids == ["O12"], judged
    assert judge(lambda: CLIPPED[spelling](True)).ids == []


def test_a_limit_that_gradients_outgrow_is_not_always_on(judge):
    factors = iter([0.1] * 15 + [50.0] * 65)
    assert judge(lambda: clipped(1.0, loss=lambda out, y: next(factors) * F.cross_entropy(out, y))).ids == []


def rates_apart(ok):
    model = mlp(layers=6)
    slow, fast = list(model[:-1].parameters()), list(model[-1].parameters())
    groups = [{"params": slow, "lr": 1e-4}, {"params": fast, "lr": 1e-4 if ok else 0.1}]
    fit(model, optimizer=SGD(groups), steps=40)


def tiny_weights(ok):
    model = mlp(layers=6)
    with torch.no_grad():
        model[-1].weight.mul_(1.0 if ok else 1e-7)
    fit(model, optimizer=Adam(model.parameters(), lr=1e-5), steps=40)


def a_large_factor(ok):
    model = mlp(layers=6, activation=nn.Tanh)
    model[-1].weight.register_hook(lambda grad: grad * (1.0 if ok else 1e3))
    fit(model, optimizer=SGD(model.parameters(), lr=1e-4), steps=40)


UNEVEN = {"rates far apart": rates_apart, "tiny weights": tiny_weights, "a large factor": a_large_factor}


@pytest.mark.parametrize("spelling", UNEVEN)
def test_one_layer_learns_faster_than_the_rest(judge, spelling):
    judged = judge(lambda: UNEVEN[spelling](False))
    assert "M21" in judged.all_ids, judged
    assert judged.errors == []
    assert "M21" not in judge(lambda: UNEVEN[spelling](True)).all_ids
