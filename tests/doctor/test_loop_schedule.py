"""Schedules, seeds, scalers and precision: three spellings of each fault, and loops that resemble them."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loops import blobs, mlp
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
X, Y = blobs(512)


def descend(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def rows(steps, size=32):
    for step in range(steps):
        chosen = torch.arange(step * size, (step + 1) * size) % len(X)
        yield X[chosen], Y[chosen]


# ---------------------------------------------------------------- O05


def schedule_first(make, *, epochs=3, optimizer=SGD):
    model = mlp()
    opt = optimizer(model.parameters(), lr=0.05)
    scheduler = make(opt)
    for _ in range(epochs):
        scheduler.step()
        for x, y in rows(6):
            descend(F.cross_entropy(model(x), y), opt)


def wrong_order_in_a_step():
    model = mlp(classes=1)
    opt = Adam(model.parameters(), lr=1e-2)
    scheduler = schedules.ExponentialLR(opt, 0.999)
    for x, _ in rows(12):
        opt.zero_grad()
        F.mse_loss(model(x), x[:, :1]).backward()
        scheduler.step()
        opt.step()


EARLY = {
    "before each epoch": lambda: schedule_first(lambda o: schedules.StepLR(o, 10)),
    "cosine": lambda: schedule_first(lambda o: schedules.CosineAnnealingLR(o, 50), optimizer=AdamW),
    "in a step": wrong_order_in_a_step,
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("spelling", EARLY)
def test_scheduler_before_optimizer(judge, spelling):
    judged = judge(EARLY[spelling])
    assert judged.ids == ["O05"], judged
    assert judged["O05"].step == 0


# ---------------------------------------------------------------- O06


def per_batch(make, *, size=8, epochs=2, accumulate=1, lr=0.05):
    model = mlp()
    opt = SGD(model.parameters(), lr=lr)
    scheduler = make(opt)
    loader = DataLoader(TensorDataset(X, Y), size)
    for _ in range(epochs):
        for number, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            if number % accumulate == accumulate - 1:
                opt.step()
                opt.zero_grad()
                scheduler.step()


SHORT = {
    "cosine": lambda: per_batch(lambda o: schedules.CosineAnnealingLR(o, T_max=20)),
    "steps": lambda: per_batch(lambda o: schedules.StepLR(o, 10, gamma=0.5)),
    "milestones": lambda: per_batch(lambda o: schedules.MultiStepLR(o, [12, 24])),
    "exponential": lambda: per_batch(lambda o: schedules.ExponentialLR(o, 0.9)),
    "function": lambda: per_batch(lambda o: schedules.LambdaLR(o, lambda epoch: 0.85**epoch)),
}


@pytest.mark.parametrize("spelling", SHORT)
def test_epoch_schedule_per_batch(judge, spelling):
    judged = judge(SHORT[spelling])
    assert judged.ids == ["O06"], judged
    assert "out of the loop over batches" in judged["O06"].hint


# ---------------------------------------------------------------- O15


def optimizer_in_the_loop(make, *, steps=12):
    model = mlp()
    for x, y in rows(steps):
        optimizer = make(model.parameters())
        descend(F.cross_entropy(model(x), y), optimizer)


def optimizer_in_each_epoch():
    model = mlp(classes=1)

    def epoch():
        opt = Adam(model.parameters(), lr=1e-2)
        for x, _ in rows(5):
            descend(F.l1_loss(model(x), x[:, :1]), opt)

    for _ in range(5):
        epoch()


def an_optimizer_for_each_parameter():
    model = mlp()
    for x, y in rows(12):
        own = [SGD([parameter], lr=0.05, momentum=0.9) for parameter in model.parameters()]
        F.cross_entropy(model(x), y).backward()
        for optimizer in own:
            optimizer.step()
            optimizer.zero_grad()


REMADE = {
    "adam": lambda: optimizer_in_the_loop(lambda p: Adam(p, lr=1e-2)),
    "momentum": lambda: optimizer_in_the_loop(lambda p: SGD(p, lr=0.05, momentum=0.9)),
    "epoch": optimizer_in_each_epoch,
    "each parameter": an_optimizer_for_each_parameter,
}


@pytest.mark.parametrize("spelling", REMADE)
def test_optimizer_recreated(judge, spelling):
    judged = judge(REMADE[spelling])
    assert judged.ids == ["O15"], judged


# ---------------------------------------------------------------- P09


def seeded(seed, *, steps=12, loss=F.cross_entropy, every=1):
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
    optimizer = Adam(model.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(rows(steps)):
        if step % every == 0:
            seed()
        descend(loss(model(x), y), optimizer)


def everything(value=7):
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


RESEEDED = {
    "torch": lambda: seeded(lambda: torch.manual_seed(0)),
    "everything": lambda: seeded(everything, every=4, steps=30),
    "numpy": lambda: seeded(lambda: np.random.seed(3), loss=nn.CrossEntropyLoss()),
}


@pytest.mark.parametrize("spelling", RESEEDED)
def test_reseeding_in_loop(judge, spelling):
    judged = judge(RESEEDED[spelling])
    assert judged.ids == ["P09"], judged
    assert "test_loop_schedule.py" in judged["P09"].source


# ---------------------------------------------------------------- N05


def scaled(use, *, model=None, make=SGD, loss=F.cross_entropy, steps=10, targets=None):
    """Train with a loss that is scaled; ``use(scaler, loss, optimizer, model)`` does the rest."""
    model = model or mlp()
    optimizer = make(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in rows(steps):
        optimizer.zero_grad()
        use(scaler, loss(model(x), targets(x) if targets else y), optimizer, model)


def plain_step(scaler, loss, optimizer, _model):
    scaler.scale(loss).backward()
    optimizer.step()
    scaler.update()


def early_clip(scaler, loss, optimizer, model):
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def clamped(change):
    """Return a step that changes the scaled gradients one by one."""

    def use(scaler, loss, optimizer, model):
        scaler.scale(loss).backward()
        for parameter in model.parameters():
            change(parameter.grad)
        scaler.step(optimizer)
        scaler.update()

    return use


def cut_by_value(scaler, loss, optimizer, model):
    scaler.scale(loss).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()


def unscaled_loss(scaler, loss, optimizer, _model):
    scaler.scale(torch.zeros(()))
    loss.backward()
    scaler.step(optimizer)
    scaler.update()


def no_update(scaler, loss, optimizer, _model):
    scaler.scale(loss).backward()
    scaler.step(optimizer)


MISUSED = {
    "clipped too early": lambda: scaled(early_clip, make=Adam),
    "regression clipped": lambda: scaled(
        early_clip, model=mlp(classes=1), loss=F.mse_loss, targets=lambda x: x[:, :1]
    ),
    "clipped by value": lambda: scaled(cut_by_value),
    "clamped": lambda: scaled(clamped(lambda gradient: gradient.clamp_(-1, 1)), make=Adam),
    "clamped data": lambda: scaled(
        clamped(lambda gradient: gradient.data.clamp_(-0.1, 0.1)), model=mlp(layers=3)
    ),
    "no update": lambda: scaled(no_update),
    "plain step": lambda: scaled(plain_step, make=Adam),
}


@pytest.mark.parametrize("spelling", MISUSED)
def test_scaler_misuse(judge, spelling):
    judged = judge(MISUSED[spelling], error=(RuntimeError, AssertionError))
    assert judged.ids == ["N05"], judged
    assert judged["N05"].step <= 1


@pytest.mark.parametrize(
    "use", [clamped(lambda gradient: gradient.mul_(0.5)), clamped(lambda gradient: gradient[:1].zero_())]
)
def test_scaled_gradients_may_be_averaged_and_masked(judge, use):
    assert judge(lambda: scaled(use)).ids == []


# ---------------------------------------------------------------- N10 and T05


def half(make, **settings):
    model = mlp().half()
    optimizer = make(model.parameters(), lr=1e-3, **settings)
    for x, y in rows(4):
        descend(F.cross_entropy(model(x.half()).float(), y), optimizer)


HALF = {"adam": lambda: half(Adam), "adamw": lambda: half(AdamW), "nadam": lambda: half(torch.optim.NAdam)}


@pytest.mark.parametrize("spelling", HALF)
def test_half_precision_adam_eps(judge, spelling):
    judged = judge(HALF[spelling])
    assert judged.ids == ["N10"], judged
    assert judged["N10"].step == 0


def double(model, loss=F.cross_entropy):
    optimizer = SGD(model.double().parameters(), lr=0.05)
    for x, y in rows(24):
        descend(loss(model(x.double()), y), optimizer)


def anomaly():
    torch.autograd.set_detect_anomaly(True)
    try:
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.05)
        for x, y in rows(24):
            descend(F.cross_entropy(model(x), y), optimizer)
    finally:
        torch.autograd.set_detect_anomaly(False)


SLOW = {
    "double": lambda: double(mlp()),
    "double and deeper": lambda: double(mlp(layers=3), nn.CrossEntropyLoss()),
    "anomaly": anomaly,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("spelling", SLOW)
def test_slow_debug_setting(judge, spelling):
    judged = judge(SLOW[spelling])
    assert judged.ids == ["T05"], judged


# ---------------------------------------------------------------- right, though it looks like one of these


def unscaled_before_clipping(scaler, loss, optimizer, model):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def wound_forward():
    model = mlp()
    opt = SGD(model.parameters(), lr=0.05)
    scheduler = schedules.StepLR(opt, 10)
    for _ in range(5):
        scheduler.step()
    for x, y in rows(10):
        descend(F.cross_entropy(model(x), y), opt)


def phases():
    model = mlp()
    for lr in (0.1, 0.05, 0.01):
        optimizer = SGD(model.parameters(), lr=lr)
        for x, y in rows(8):
            descend(F.cross_entropy(model(x), y), optimizer)


def tasks_from_one_start():
    model, start = mlp(), mlp().state_dict()
    for _ in range(6):
        model.load_state_dict(start)
        optimizer = SGD(model.parameters(), lr=0.05)
        for x, y in rows(3):
            descend(F.cross_entropy(model(x), y), optimizer)


def seed_set_aside():
    def seed():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            torch.randn(4)

    seeded(seed)


def seed_that_changes():
    numbers = iter(range(100))
    seeded(lambda: torch.manual_seed(next(numbers)))


def seed_in_a_closure():
    model, (x, y) = mlp(), next(iter(rows(1)))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        torch.manual_seed(3)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x + 0.01 * torch.randn_like(x)), y)
        loss.backward()
        return loss

    for _ in range(8):
        optimizer.step(closure)


RIGHT = {
    "seed in a closure": seed_in_a_closure,
    "cosine over all steps": lambda: per_batch(lambda o: schedules.CosineAnnealingLR(o, 128)),
    "one cycle": lambda: per_batch(lambda o: schedules.OneCycleLR(o, 0.1, total_steps=129)),
    "warm-up": lambda: per_batch(lambda o: schedules.LinearLR(o, 0.1, total_iters=10)),
    "accumulated": lambda: per_batch(lambda o: schedules.CosineAnnealingLR(o, 32), accumulate=4),
    "slow steps": lambda: per_batch(lambda o: schedules.StepLR(o, 10, gamma=0.97)),
    "clipped rightly": lambda: scaled(unscaled_before_clipping),
    "half with a larger eps": lambda: half(Adam, eps=1e-4),
    "half with momentum": lambda: half(SGD, momentum=0.9),
    **{
        loop.__name__: loop
        for loop in (wound_forward, phases, tasks_from_one_start, seed_set_aside, seed_that_changes)
    },
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("loop", RIGHT)
def test_right_schedules(judge, loop):
    judged = judge(RIGHT[loop])
    assert judged.ids == [], judged
