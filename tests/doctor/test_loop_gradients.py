"""The order of backward, clearing, clipping and step: faults in three spellings, and loops that resemble them."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, mlp
from torch import nn
from torch.nn.utils import clip_grad_norm_

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def batches(steps=24, size=32, data=None):
    x, y = data if data is not None else blobs()
    for step in range(steps):
        rows = torch.arange(step * size, (step + 1) * size) % len(x)
        yield x[rows], y[rows]


# ---------------------------------------------------------------- zero_grad is missing


def never_cleared():
    model = mlp()
    opt = SGD(model.parameters(), lr=0.01)
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()


def cleared_once_per_epoch():
    model = mlp(classes=1)
    optimizer = Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    x, _ = blobs()
    for _ in range(3):
        optimizer.zero_grad()
        for i in range(0, 256, 32):
            criterion(model(x[i : i + 32]), x[i : i + 32, :1]).backward()
            optimizer.step()


def one_of_two_cleared():
    encoder, head = mlp(classes=16), nn.Linear(16, 3)
    first, second = SGD(encoder.parameters(), lr=0.01), SGD(head.parameters(), lr=0.01)
    for x, y in batches():
        first.zero_grad()
        F.nll_loss(F.log_softmax(head(encoder(x)), 1), y).backward()
        first.step()
        second.step()


def closure_without_clearing():
    model = mlp()
    opt = SGD(model.parameters(), lr=0.01)
    for x, y in batches():

        def closure(x=x, y=y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)


STALE = [never_cleared, cleared_once_per_epoch, one_of_two_cleared, closure_without_clearing]


def test_missing_zero_grad_in_a_second_phase(judge):
    def train():
        model, (x, y) = mlp(), blobs(32)
        optimizer = SGD(model.parameters(), lr=1e-3)
        for step in range(70):
            if step < 50:
                optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    assert judge(train).ids == ["O01"]


@pytest.mark.parametrize("train", STALE)
def test_missing_zero_grad(judge, train):
    judged = judge(train)
    assert judged.ids == ["O01"], judged
    assert judged["O01"].step <= 2
    assert "zero_grad()" in judged["O01"].hint
    assert "test_loop_gradients.py:" in judged["O01"].source


# ---------------------------------------------------------------- cleared between backward and step


def erased_by_optimizer():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()


def erased_to_zeros_by_model():
    model = mlp(classes=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, _ in batches():
        F.mse_loss(model(x), x[:, :1]).backward()
        model.zero_grad(set_to_none=False)
        optimizer.step()


def erased_by_hand():
    model = mlp()
    adam = Adam(model.parameters())
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad = None
        adam.step()


def erased_before_a_step_with_an_idle_closure():
    """As frameworks step when the user has called backward."""
    model = mlp()
    opt = SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        opt.zero_grad()
        opt.step(lambda: None)


def erased_by_a_callback_that_differentiates():
    """Something is measured between backward and step, and clears what it finds."""
    model = mlp(classes=1)
    optimizer = SGD(model.parameters(), lr=0.05)
    for x, _ in batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :1]).backward()
        model.zero_grad()
        torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        optimizer.step()


ERASED = [
    erased_by_a_callback_that_differentiates,
    erased_by_optimizer,
    erased_to_zeros_by_model,
    erased_by_hand,
    erased_before_a_step_with_an_idle_closure,
]


@pytest.mark.parametrize("train", ERASED)
def test_gradients_erased(judge, train):
    judged = judge(train)
    assert judged.ids == ["O02"], judged
    assert judged["O02"].step <= 2


def test_the_line_that_erases_is_named(judge):
    finding = judge(erased_by_optimizer)["O02"]
    line = erased_by_optimizer.__code__.co_firstlineno + 6
    assert f"cleared at test_loop_gradients.py:{line}" in finding.hint
    assert finding.source.endswith(f"test_loop_gradients.py:{line + 1}")


# ---------------------------------------------------------------- step before backward


def step_first():
    model = mlp()
    opt = SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        opt.step()
        loss.backward()


def step_then_clear_then_backward():
    model = nn.Linear(8, 1)
    opt = Adam(model.parameters())
    for x, _ in batches():
        loss = F.smooth_l1_loss(model(x), x[:, :1])
        opt.step()
        opt.zero_grad()
        loss.backward()


def step_that_makes_backward_raise():
    class Trainer:
        def __init__(self):
            self.net = mlp()
            self.opt = SGD(self.net.parameters(), lr=0.1)

        def forward(self, x, y):
            return nn.CrossEntropyLoss()(self.net(x), y)

    trainer = Trainer()
    for x, y in batches():
        loss = trainer.forward(x, y)
        trainer.opt.step()
        trainer.net.zero_grad()
        loss.backward()


@pytest.mark.parametrize("train", [step_first, step_then_clear_then_backward, step_that_makes_backward_raise])
def test_step_before_backward(judge, train):
    judged = judge(train, error=RuntimeError)
    assert judged.ids == ["O03"], judged
    assert judged["O03"].step <= 2
    assert "behind loss.backward()" in judged["O03"].hint


# ---------------------------------------------------------------- two steps on one gradient


def stepped_twice():
    model = mlp()
    opt = SGD(model.parameters(), lr=0.01)
    for x, y in batches():
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.step()


def stepped_in_helper_and_loop():
    model = mlp(classes=1)
    opt = Adam(model.parameters())

    def update(loss):
        opt.zero_grad(set_to_none=False)
        loss.backward()
        opt.step()

    for x, _ in batches():
        update(F.l1_loss(model(x), x[:, :1]))
        opt.step()


def stepped_after_scaler():
    model = mlp()
    opt = SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for x, y in batches():
        opt.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()
        opt.step()


@pytest.mark.parametrize("train", [stepped_twice, stepped_in_helper_and_loop, stepped_after_scaler])
def test_double_step(judge, train):
    judged = judge(train)
    assert judged.ids == ["O04"], judged
    assert judged["O04"].step <= 3


def test_gradients_erased_before_a_scaler_looks_for_them(judge):
    def train():
        model = mlp()
        opt, scaler = SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        for x, y in batches():
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            opt.zero_grad()
            scaler.step(opt)

    judged = judge(train, error=AssertionError)
    assert judged.ids == ["O02"], judged
    assert "so that the scaler finds none" in judged["O02"].hint


# ---------------------------------------------------------------- clipping finds nothing


def clip_of_used_up_iterator():
    model = mlp()
    parameters = filter(lambda p: p.requires_grad, model.parameters())
    opt = SGD(parameters, lr=0.1)
    for x, y in batches():
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        clip_grad_norm_(parameters, 1.0)
        opt.step()


def clip_before_backward():
    model = mlp(classes=1)
    opt = Adam(model.parameters())
    for x, _ in batches():
        opt.zero_grad()
        loss = F.mse_loss(model(x), x[:, :1])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        loss.backward()
        opt.step()


def clip_before_backward_on_zeros():
    model = mlp()
    opt = SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        model.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.5)
        loss.backward()
        opt.step()


def clip_of_an_average():
    model = mlp()
    average = copy.deepcopy(model)
    opt = SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        clip_grad_norm_(average.parameters(), 1.0)
        opt.step()


@pytest.mark.parametrize(
    "train",
    [clip_of_used_up_iterator, clip_before_backward, clip_before_backward_on_zeros, clip_of_an_average],
)
def test_clip_sees_no_gradients(judge, train):
    judged = judge(train)
    assert judged.ids == ["O13"], judged
    assert judged["O13"].step <= 3
    assert "clip_grad_norm_" not in judged["O13"].source


# ---------------------------------------------------------------- right, though it looks like one of these


def plain(zero=lambda opt, model: opt.zero_grad()):
    model = mlp()
    opt = SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        zero(opt, model)
        F.cross_entropy(model(x), y).backward()
        clip_grad_norm_(model.parameters(), 5.0)
        opt.step()


def clear_by_hand(opt, model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def accumulation():
    model = mlp()
    opt = SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches(steps=40)):
        (F.cross_entropy(model(x), y) / 4).backward()
        if i % 4 == 3:
            opt.step()
            opt.zero_grad()


def sam():
    model = mlp()
    opt = SGD(model.parameters(), lr=0.05)
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            steps = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
            for p, e in zip(model.parameters(), steps, strict=True):
                p.add_(e)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), steps, strict=True):
                p.sub_(e)
        opt.step()
        opt.zero_grad()


def adversarial():
    model = mlp()
    opt = SGD(model.parameters(), lr=0.05)
    for x, y in batches():
        x = x.clone().requires_grad_()  # noqa: PLW2901
        F.cross_entropy(model(x), y).backward()
        bad = (x + 0.1 * x.grad.sign()).detach()
        opt.zero_grad()
        F.cross_entropy(model(bad), y).backward()
        opt.step()


def lbfgs():
    model = mlp(classes=1)
    x, _ = blobs()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure():
        opt.zero_grad()
        loss = F.mse_loss(model(x), x[:, :1])
        loss.backward()
        return loss

    for _ in range(10):
        opt.step(closure)


def momentum_by_hand():
    """Gradients that are decayed instead of cleared."""
    model = mlp()
    opt = SGD(model.parameters(), lr=0.02)
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        opt.step()
        with torch.no_grad():
            for p in model.parameters():
                p.grad.mul_(0.5)


def gradients_by_hand():
    """No backward at all: evolution strategies and implicit gradients write ``.grad`` themselves."""
    model = mlp(classes=1)
    opt = SGD(model.parameters(), lr=0.05)
    for x, _ in batches():
        loss = F.mse_loss(model(x), x[:, :1])
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = g
        opt.step()


def set_up_by_an_empty_step():
    model = mlp()
    opt = SGD(model.parameters(), lr=0.1)
    opt.step()
    for x, y in batches():
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()


def gan():
    make, judge_ = mlp(features=4, classes=8), mlp(classes=1)
    opt_g, opt_d = Adam(make.parameters(), lr=2e-3), Adam(judge_.parameters(), lr=2e-3)
    bce = nn.BCEWithLogitsLoss()
    for x, _ in batches():
        fake = make(torch.randn(32, 4))
        opt_g.zero_grad()
        bce(judge_(fake), torch.ones(32, 1)).backward()
        opt_g.step()
        opt_d.zero_grad()
        (bce(judge_(x), torch.ones(32, 1)) + bce(judge_(fake.detach()), torch.zeros(32, 1))).backward()
        opt_d.step()


def skipped_by_scaler():
    model = mlp()
    opt = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=1000)
    for x, y in batches():
        opt.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()


def two_tasks_in_turns():
    body, heads = mlp(classes=16), nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)])
    opt = Adam([*body.parameters(), *heads.parameters()], lr=1e-3)
    for (x, y), head in zip(batches(), itertools.cycle(heads)):
        opt.zero_grad()
        F.cross_entropy(head(body(x)), y).backward()
        opt.step()


RIGHT = {
    "plain": plain,
    "cleared by the model": lambda: plain(lambda opt, model: model.zero_grad(set_to_none=False)),
    "cleared by hand": lambda: plain(clear_by_hand),
    **{
        loop.__name__: loop
        for loop in (
            accumulation,
            sam,
            adversarial,
            lbfgs,
            momentum_by_hand,
            gradients_by_hand,
            set_up_by_an_empty_step,
            gan,
            skipped_by_scaler,
            two_tasks_in_turns,
        )
    },
}


@pytest.mark.parametrize("loop", RIGHT)
def test_right_loops(judge, loop):
    judged = judge(RIGHT[loop])
    assert judged.ids == [], judged
