"""Targets that a loss cannot use: three spellings of each fault, and the targets that resemble them."""

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, fit, mlp
from torch import nn

Adam = torch.optim.Adam


def labels_from_one():
    x, y = blobs()
    fit(mlp(), (x, y + 1))


def label_minus_one():
    x, y = blobs()
    y[7] = -1
    model = mlp()
    opt = Adam(model.parameters())
    for _ in range(5):
        opt.zero_grad()
        nn.NLLLoss()(F.log_softmax(model(x), 1), y).backward()
        opt.step()


def one_hot_of_too_few_classes():
    x, y = blobs(classes=4)
    model = mlp()
    opt = Adam(model.parameters())
    for _ in range(5):
        opt.zero_grad()
        goal = F.one_hot(y, 3).float()
        F.binary_cross_entropy_with_logits(model(x), goal).backward()
        opt.step()


def gathered_by_hand():
    x, y = blobs(classes=5)
    model = mlp()
    opt = Adam(model.parameters())
    for _ in range(5):
        opt.zero_grad()
        (-F.log_softmax(model(x), 1).gather(1, y[:, None])).mean().backward()
        opt.step()


@pytest.mark.parametrize(
    "train", [labels_from_one, label_minus_one, one_hot_of_too_few_classes, gathered_by_hand]
)
def test_the_exception_is_translated(judge, train):
    judged = judge(train, error=(IndexError, RuntimeError))
    assert judged.ids == ["D02"], judged
    assert judged["D02"].step == 0
    file = "loops.py:" if train is labels_from_one else "test_loop_targets.py:"
    assert file in judged["D02"].source


def test_labels_that_start_at_one_are_told(judge):
    finding = judge(labels_from_one, error=IndexError)["D02"]
    assert finding.evidence["highest_target"] == 3
    assert finding.evidence["classes"] == 3
    assert finding.hint == "labels run to 3 but the model has 3 outputs: subtract 1, or add an output"


def binary(goal, loss=F.binary_cross_entropy_with_logits, last=None):
    x, _ = blobs()
    model = nn.Sequential(mlp(classes=1), last or nn.Identity())
    fit(model, (x, goal(x)), loss=loss, lr=1e-3, steps=12)


WRONG_BINARY = [
    lambda: binary(lambda x: x[:, :1].sign()),
    lambda: binary(lambda x: 255.0 * (x[:, :1] > 0)),
    lambda: binary(lambda x: 2.0 * (x[:, :1] > 0), loss=nn.BCELoss(), last=nn.Sigmoid()),
]


@pytest.mark.parametrize("train", WRONG_BINARY)
def test_binary_targets_out_of_range(judge, train):
    judged = judge(train, error=RuntimeError)
    assert judged.ids == ["D02"], judged
    assert judged["D02"].step <= 1


# ---------------------------------------------------------------- language models


class Tagger(nn.Module):
    def __init__(self, words=40, recurrent=True):
        super().__init__()
        self.embed = nn.Embedding(words, 16)
        self.mix = nn.GRU(16, 16, batch_first=True) if recurrent else nn.Linear(16, 16)
        self.out = nn.Linear(16, words)

    def forward(self, ids):
        z = self.mix(self.embed(ids))
        return self.out(z[0] if isinstance(z, tuple) else z)


def speak(model, make_targets, *, steps=12, loss=F.cross_entropy, **options):
    opt = Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        ids = torch.randint(1, 40, (8, 16))
        inputs, targets = make_targets(ids)
        opt.zero_grad()
        loss(model(inputs).reshape(-1, 40), targets.reshape(-1), **options).backward()
        opt.step()


def masked(ids):
    hidden = torch.rand(ids.shape) < 0.15
    hidden[:, 0] = True
    return ids.masked_fill(hidden, 0), ids.masked_fill(~hidden, -100)


def padded(ids):
    targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    targets[:, 6:] = -100
    return ids, targets


def all_ignored_in_the_end(model, step=6):
    rounds = iter(range(100))

    def targets(ids):
        inputs, targets = padded(ids)
        return inputs, targets.fill_(-100) if next(rounds) == step else targets

    speak(model, targets)


ALL_IGNORED = {
    "ignore_index equals every target": (
        lambda: speak(Tagger(), lambda ids: (ids, torch.zeros_like(ids)), ignore_index=0), 0
    ),
    "one batch of padding": (lambda: all_ignored_in_the_end(Tagger()), 6),
    "nll of pixels": (
        lambda: fit(
            nn.Conv2d(1, 3, 1), (torch.randn(32, 1, 4, 4), torch.full((32, 4, 4), 255)), batch=8,
            loss=lambda out, y: F.nll_loss(F.log_softmax(out, 1), y, ignore_index=255),
        ), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("spelling", ALL_IGNORED)
def test_all_targets_ignored(judge, spelling):
    train, step = ALL_IGNORED[spelling]
    judged = judge(train)
    assert judged.ids == ["D13"], judged
    assert judged["D13"].step == step


class Judging(nn.Module):
    """Computes its own loss, as models of language do that are given the labels as well."""

    def __init__(self):
        super().__init__()
        self.tagger = Tagger()

    def forward(self, ids, mask, labels):
        return F.cross_entropy(self.tagger(ids).flatten(0, 1), labels.flatten())


def judge_inside(shift):
    model = Judging()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(8):
        ids = torch.randint(2, 20, (4, 12))
        optimizer.zero_grad()
        model(ids, torch.ones_like(ids), ids.roll(-shift, 1).clone()).backward()
        optimizer.step()


@pytest.mark.parametrize("shift", [0, 1])
def test_unshifted_targets_inside_the_model(judge, shift):
    assert judge(lambda: judge_inside(shift)).ids == ([] if shift else ["D15"])


UNSHIFTED = {
    "recurrent": lambda: speak(Tagger(), lambda ids: (ids, ids)),
    "with padding": lambda: speak(Tagger(), lambda ids: (ids, ids.masked_fill(ids < 4, -100))),
    "feed-forward, nll": lambda: speak(
        Tagger(recurrent=False), lambda ids: (ids, ids), loss=lambda s, t: F.nll_loss(F.log_softmax(s, -1), t)
    ),
}


@pytest.mark.parametrize("spelling", UNSHIFTED)
def test_unshifted_targets(judge, spelling):
    judged = judge(UNSHIFTED[spelling])
    assert judged.ids == ["D15"], judged
    assert "inputs[:, 1:]" in judged["D15"].hint


RIGHT = {
    "next token": lambda: speak(Tagger(), lambda ids: (ids[:, :-1], ids[:, 1:])),
    "next token, rolled": lambda: speak(Tagger(), lambda ids: (ids, ids.roll(-1, 1))),
    "masked": lambda: speak(Tagger(), masked),
    "padded": lambda: speak(Tagger(), padded),
    "soft binary targets": lambda: binary(lambda x: torch.sigmoid(x[:, :1])),
    "smoothed binary targets": lambda: binary(lambda x: 0.05 + 0.9 * (x[:, :1] > 0)),
    "sum over ignored": lambda: speak(
        Tagger(), lambda ids: (ids, torch.zeros_like(ids)), steps=3, ignore_index=0, reduction="sum"
    ),
}


@pytest.mark.parametrize("loop", RIGHT)
def test_right_targets(judge, loop):
    judged = judge(RIGHT[loop])
    assert judged.ids == [], judged


def test_what_needs_another_forward_is_said(judge):
    diagnosis = judge(RIGHT["soft binary targets"]).diagnosis
    why = {each.id: each.why for each in diagnosis.not_checked}
    assert why["M18"].endswith("with a changed token")
