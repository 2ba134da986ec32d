"""Faults in spellings that hide them, each beside the loop that looks like it and is right."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loops import blobs, fit, mlp
from torch import nn

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def settings(steps=12, lr=0.05):
    """Return a small model, its optimizer and batches."""
    model = mlp()
    x, y = blobs(32 * steps)
    return model, SGD(model.parameters(), lr=lr), list(zip(x.split(32), y.split(32), strict=True))


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize(("is_first", "ids"), [(True, ["O03"]), (False, [])])
def test_a_step_at_the_head_of_every_turn(judge, is_first, ids):
    def train():
        model, optimizer, batches = settings()
        if not is_first:
            optimizer.step()  # sets the optimizer up
        for x, y in batches:
            if is_first:
                optimizer.step()
                optimizer.zero_grad()  # before the backward
            F.cross_entropy(model(x), y).backward()
            if not is_first:
                optimizer.step()
                optimizer.zero_grad()

    judged = judge(train)
    assert judged.ids == ids, judged


@pytest.mark.parametrize(("is_new", "ids"), [(False, ["O04"]), (True, [])])
def test_a_second_step_on_gradients_that_were_clipped_once_more(judge, is_new, ids):
    def train():
        model, optimizer, batches = settings()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if is_new:
                for parameter in model.parameters():
                    parameter.grad.copy_(
                        torch.randn_like(parameter)
                    )  # noise on purpose, written over the gradient
            nn.utils.clip_grad_value_(model.parameters(), 100.0)
            optimizer.step()

    judged = judge(train)
    assert judged.ids == ids, judged


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("loss", [F.multilabel_soft_margin_loss, F.soft_margin_loss])
@pytest.mark.parametrize(("squash", "ids"), [(torch.sigmoid, ["L03"]), (lambda scores: scores, [])])
def test_probabilities_in_a_loss_of_scores(judge, loss, squash, ids):
    def train():
        model, optimizer, batches = settings()
        for x, _ in batches:
            goal = (x[:, :3] > 0).float()
            goal = 2 * goal - 1 if loss is F.soft_margin_loss else goal
            optimizer.zero_grad()
            loss(squash(model(x)), goal).backward()
            optimizer.step()

    judged = judge(train)
    assert judged.ids == ids, judged


@pytest.mark.parametrize(("classes", "ids"), [(5, ["D02"]), (6, [])])
def test_labels_of_ctc_beyond_its_classes(judge, classes, ids):
    """What lies behind the length of a sequence is padding and may be anything."""

    def train():
        model = nn.Linear(4, classes)
        optimizer = Adam(model.parameters(), 1e-2)
        lengths = torch.tensor([3, 2])
        for _ in range(12):
            labels = torch.tensor([[1, 5, 2], [3, 4, 99]])
            scores = model(torch.randn(2, 9, 4)).log_softmax(-1).transpose(0, 1)
            optimizer.zero_grad()
            F.ctc_loss(scores, labels, torch.tensor([9, 9]), lengths, zero_infinity=True).backward()
            optimizer.step()

    judged = judge(train)
    assert judged.ids == ids, judged
    if ids:
        assert judged["D02"].evidence["classes"] == classes


# ---------------------------------------------------------------- scaled gradients


@pytest.mark.parametrize(("is_unscaled", "ids"), [(False, ["N05"]), (True, [])])
def test_scaled_gradients_clipped_by_hand(judge, is_unscaled, ids):
    def train():
        model, optimizer, batches = settings()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for x, y in batches:
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if is_unscaled:
                scaler.unscale_(optimizer)
            norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
            for parameter in model.parameters():
                parameter.grad.mul_(0.01 / norm)
            scaler.step(optimizer)
            scaler.update()

    judged = judge(train)
    assert judged.ids == ids, judged


def test_scaled_gradients_may_be_weighted(judge):
    def train():
        model, optimizer, batches = settings()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            for parameter in model.parameters():
                parameter.grad.mul_((1 + number) / len(batches))  # a warm-up
            scaler.step(optimizer)
            scaler.update()

    assert judge(train).ids == []


# ---------------------------------------------------------------- weights that are kept


@pytest.mark.parametrize(("is_copied", "ids"), [(False, ["P05"]), (True, [])])
def test_best_weights_that_are_the_models_own(judge, is_copied, ids):
    def train():
        model, optimizer, batches = settings()
        best = {}
        for number, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if number == 4:
                best = {name: p.data.clone() if is_copied else p.data for name, p in model.named_parameters()}
        model.load_state_dict(best)

    judged = judge(train)
    assert judged.ids == ids, judged
    if ids:
        assert "own tensors" in judged["P05"].hint


# ---------------------------------------------------------------- models that are called in train mode


def test_a_generator_may_be_looked_at_in_train_mode(judge):
    """Its fake samples are made once for both steps: the second loss comes after the other model's backward."""

    def train():
        maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        of_maker, of_critic = Adam(maker.parameters(), 1e-3), Adam(critic.parameters(), 1e-3)
        always = torch.randn(8, 4)
        for step in range(30):
            fake = maker(torch.randn(8, 4))
            of_critic.zero_grad()
            (F.softplus(-critic(torch.randn(8, 2))) + F.softplus(critic(fake.detach()))).mean().backward()
            of_critic.step()
            of_maker.zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            of_maker.step()
            if step % 6 == 5:
                with torch.no_grad():
                    maker(always)

    assert judge(train).ids == []


# ---------------------------------------------------------------- tokens that are to be repeated


class Packed(nn.Module):
    """Packs a sequence into one code and unpacks it; without a code, each place has its own token."""

    def __init__(self, *, has_code):
        super().__init__()
        self.has_code = has_code
        self.tokens = nn.Embedding(20, 16)
        self.read = nn.GRU(16, 16, batch_first=True)
        self.unpack = nn.Linear(16, 8 * 16)
        self.scores = nn.Linear(16, 20)

    def forward(self, ids):
        seen, code = self.read(self.tokens(ids))
        return self.scores(self.unpack(code[0]).view(-1, 8, 16).tanh() if self.has_code else seen)


@pytest.mark.parametrize(
    ("has_code", "steps", "ids"), [(True, 8, []), (False, 8, ["D15"]), (False, 2, ["D15"])]
)
def test_tokens_that_are_repeated(judge, has_code, steps, ids):
    def train():
        model = Packed(has_code=has_code)
        optimizer = Adam(model.parameters(), 1e-3)
        for _ in range(steps):
            words = torch.randint(0, 20, (8, 8))
            optimizer.zero_grad()
            F.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
            optimizer.step()

    judged = judge(train)
    assert judged.ids == ids, judged
    if ids:
        assert judged["D15"].step == 0


# ---------------------------------------------------------------- parameters beside the model


@pytest.mark.parametrize(("is_own", "ids"), [(True, ["M02"]), (False, [])])
def test_a_model_that_runs_on_copies_of_its_parameters(judge, is_own, ids):
    def train():
        model = mlp()
        copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        optimizer = SGD(model.parameters() if is_own else copies.values(), 0.05)
        x, y = blobs()
        for _ in range(8):
            optimizer.zero_grad()
            F.cross_entropy(torch.func.functional_call(model, copies, (x,)), y).backward()
            optimizer.step()

    judged = judge(train)
    assert judged.ids == ids, judged
    if ids:
        assert judged["M02"].step <= 2
        assert "give the optimizer the copies" in judged["M02"].hint


# ---------------------------------------------------------------- scores of agreement


def dice(shares, mask):
    common = (shares * mask).sum((1, 2))
    return ((2 * common + 1) / (shares.sum((1, 2)) + mask.sum((1, 2)) + 1)).mean()


def overlap(shares, mask):
    common = (shares * mask).flatten(1).sum(-1)
    return (common / (shares.flatten(1).sum(-1) + mask.flatten(1).sum(-1) - common).clamp_min(1e-6)).mean()


def both_classes(shares, mask):
    return (dice(shares, mask) + dice(1 - shares, 1 - mask)) / 2


@pytest.mark.parametrize(
    ("loss", "ids"),
    [
        (dice, ["L10"]),
        (overlap, ["L10"]),
        (lambda shares, mask: 1 - dice(shares, mask), []),
        (lambda shares, mask: -overlap(shares, mask), []),
        (lambda shares, mask: 1 - both_classes(shares, mask), []),
        (lambda shares, mask: dice(shares, mask) + F.binary_cross_entropy(shares, 1 - mask), []),
        (lambda shares, mask: dice(shares, torch.eye(6).expand(4, 6, 6)), []),
    ],
)
def test_a_score_of_agreement_that_is_made_smaller(judge, loss, ids):
    """One mask for all may be a region to stay away from, and so may one that another term asks to be empty."""

    def train():
        model = nn.Conv2d(1, 1, 3, padding=1)
        optimizer = Adam(model.parameters(), 1e-2)
        for _ in range(8):
            picture = torch.randn(4, 1, 6, 6)
            optimizer.zero_grad()
            loss(model(picture).sigmoid()[:, 0], (picture[:, 0] > 0).float()).backward()
            optimizer.step()

    judged = judge(train)
    assert judged.ids == ids, judged
    if ids:
        assert "1 - score" in judged["L10"].hint


# ---------------------------------------------------------------- gradients put in place by hand


@pytest.mark.parametrize(("kept", "ids"), [(1.0, ["O01"]), (0.9, []), (0.0, [])])
@pytest.mark.parametrize("is_in_place", [True, False])
def test_derivatives_added_to_gradients_that_were_used(judge, kept, ids, is_in_place):
    """What decays is a momentum."""

    def train():
        model, optimizer, batches = settings(lr=0.01)
        parameters = list(model.parameters())
        for x, y in batches:
            derivatives = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
            for p, derivative in zip(parameters, derivatives, strict=True):
                if p.grad is None:
                    p.grad = derivative.clone()
                elif is_in_place:
                    p.grad += derivative
                else:
                    p.grad = p.grad + derivative
            optimizer.step()
            for p in parameters:
                p.grad = p.grad * kept if kept != 1 else p.grad

    judged = judge(train)
    assert judged.ids == ids, judged


def test_a_first_turn_with_nothing_to_learn_from(judge):
    def train():
        model = nn.Linear(3, 1)
        optimizer = SGD(model.parameters(), 0.02)
        before, state = None, torch.zeros(3)
        for _ in range(12):
            optimizer.zero_grad()
            if before is not None:
                (state[0] - model(before)).square().sum().backward()
            optimizer.step()
            before, state = state, torch.randn(3)

    assert judge(train).ids == []


# ---------------------------------------------------------------- gradients of zero


@pytest.mark.parametrize(("factor", "ids"), [(0.0, ["O11"]), (0.5, [])])
def test_hooks_that_leave_nothing_of_the_gradients(judge, factor, ids):
    def train():
        model, optimizer, batches = settings()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * factor)
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    judged = judge(train)
    assert judged.ids == ids, judged


def test_no_gradient_where_there_is_no_loss(judge):
    """Rewards may stay away for long."""

    def train():
        model, optimizer, batches = settings()
        for x, _ in batches:
            optimizer.zero_grad()
            (0 * model(x).log_softmax(-1)[:, 0]).mean().backward()
            optimizer.step()

    assert "O11" not in judge(train).all_ids


# ---------------------------------------------------------------- sequences with the scores before the places


@pytest.mark.parametrize(("padding", "ids"), [((1, 1), ["M18"]), ((2, 0), [])])
def test_a_convolution_that_sees_the_next_token(judge, padding, ids):
    class Speaker(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.mix = nn.Embedding(20, 16), nn.Conv1d(16, 16, 3)
            self.scores = nn.Conv1d(16, 20, 1)

        def forward(self, ids):
            return self.scores(self.mix(F.pad(self.tokens(ids).mT, padding)).tanh())

    def train():
        model = Speaker()
        optimizer = Adam(model.parameters(), 1e-3)
        for _ in range(24):
            words = torch.randint(0, 20, (8, 12))
            optimizer.zero_grad()
            F.cross_entropy(model(words[:, :-1]), words[:, 1:]).backward()
            optimizer.step()

    judged = judge(train)
    assert judged.ids == ids, judged


def test_a_model_that_tosses_coins_does_not_mix_its_samples(judge):
    """Equal calls toss equal coins when the model is run again, whichever generator they come from."""

    class Sampler(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.scores = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            for _ in range(6):
                coins = (random.random(), float(np.random.rand()))
                x = torch.tanh((self.first if min(coins) < 0.1 else self.second)(x))
            return self.scores(x)

    def train():
        fit(Sampler(), steps=24)

    assert "M09" not in judge(train).all_ids
