"""Loops that change when they have long been known, and are right before and after: nothing is found in them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, mlp
from torch import nn
from torch.nn.utils import clip_grad_norm_

SGD, Adam = torch.optim.SGD, torch.optim.Adam
STEPS, START = 110, 50


def batches(steps=STEPS):
    x, y = blobs()
    for step in range(steps):
        rows = torch.arange(step * 32, (step + 1) * 32) % len(x)
        yield step, x[rows], y[rows]


def fit(model, loss, optimizer=None, after=None):
    optimizer = optimizer or SGD(model.parameters(), lr=0.05)
    for step, x, y in batches():
        optimizer.zero_grad()
        loss(model, step >= START, x, y).backward()
        optimizer.step()
        if after is not None:
            after(step, optimizer)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList()

    def forward(self, x):
        hidden = self.encoder(x).relu()
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return self.head(hidden)


def plain(model, _late, x, y):
    return F.cross_entropy(model(x), y)


# ---------------------------------------------------------------- models that grow, freeze and thaw


def grows_with_its_optimizer():
    model = Net()

    def grow(step, optimizer):
        if step in (START, START + 20):
            block = nn.Linear(16, 16)
            model.blocks.append(block)
            optimizer.add_param_group({"params": block.parameters()})

    fit(model, plain, Adam(model.parameters(), lr=1e-3), grow)


def thaws_with_its_optimizer():
    model = Net()
    model.encoder.requires_grad_(False)

    def thaw(step, optimizer):
        if step == START:
            model.encoder.requires_grad_(True)
            optimizer.add_param_group({"params": model.encoder.parameters(), "lr": 1e-3})

    fit(model, plain, SGD(model.head.parameters(), lr=0.05), thaw)


def thaws_what_was_held_all_along():
    model = Net()
    model.encoder.requires_grad_(False)
    fit(model, plain, None, lambda step, _: model.encoder.requires_grad_(step >= START))


def freezes_its_encoder():
    model = Net()
    fit(model, plain, None, lambda step, _: model.encoder.requires_grad_(step < START))


def head_and_optimizer_replaced():
    model = Net()
    for phase in range(2):
        if phase:
            model.head = nn.Linear(16, 2)
        optimizer = Adam(model.parameters(), lr=1e-3)
        for _, x, y in batches(START):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y.clamp(max=1) if phase else y).backward()
            optimizer.step()


def pretrains_then_probes():
    """An autoencoder first; then a classifier on its codes, which are not trained any more."""
    encoder, decoder, head = nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(6, 3)
    first, second = (
        Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2),
        Adam(head.parameters(), lr=1e-2),
    )
    for step, x, y in batches():
        optimizer = first if step < START else second
        optimizer.zero_grad()
        if step < START:
            loss = F.mse_loss(decoder(encoder(x).relu()), x)
        else:
            loss = F.cross_entropy(head(encoder(x).relu().detach()), y)
        loss.backward()
        optimizer.step()


def task_is_over():
    """Both heads run all the time and one optimizer holds everything, but one task is over at some step."""
    trunk, heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 1)])
    optimizer = Adam([*trunk.parameters(), *heads.parameters()], lr=1e-3)
    for step, x, y in batches():
        hidden = trunk(x).relu()
        first, second = F.cross_entropy(heads[0](hidden), y), F.mse_loss(heads[1](hidden), x[:, :1])
        optimizer.zero_grad()
        (first + second if step < START else second).backward()
        optimizer.step()


def codes_are_kept_from_some_step_on():
    """The encoder is done: its codes are computed once, and one optimizer goes on with what is left."""
    encoder, head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 3)
    optimizer = Adam([*encoder.parameters(), *head.parameters()], lr=1e-3)
    x, y = blobs()
    kept = None
    for step in range(STEPS):
        rows = torch.arange(step * 32, (step + 1) * 32) % len(x)
        if step == START:
            with torch.no_grad():
                kept = encoder(x)
        optimizer.zero_grad()
        F.cross_entropy(head(encoder(x[rows]) if kept is None else kept[rows]), y[rows]).backward()
        optimizer.step()


# ---------------------------------------------------------------- data


def batches_of_other_sizes():
    """The last batch of an epoch is smaller, once it is a single sample; then all of them grow."""
    model, (x, y) = mlp(), blobs(97)
    optimizer = SGD(model.parameters(), lr=0.05)
    for epoch in range(30):
        size = 16 if epoch < 15 else 32
        for at in range(0, len(x), size):
            optimizer.zero_grad()
            F.cross_entropy(model(x[at : at + size]), y[at : at + size]).backward()
            optimizer.step()


def curriculum_of_lengths():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.body, self.out = (
                nn.Embedding(9, 8),
                nn.GRU(8, 12, batch_first=True),
                nn.Linear(12, 9),
            )

        def forward(self, tokens):
            return self.out(self.body(self.words(tokens))[0])

    model = Reader()
    optimizer = Adam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        tokens = torch.randint(1, 9, (16, 5 if step < START else 16 if step < START + 20 else 17))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


def soft_targets_from_some_step_on():
    def loss(model, late, x, y):
        share = torch.rand(())
        other = torch.randperm(len(x))
        if not late:
            return F.cross_entropy(model(x), y)
        hot = F.one_hot(y, 3).float()
        mixed = share * hot + (1 - share) * hot[other]
        return F.cross_entropy(model(share * x + (1 - share) * x[other]), mixed)

    fit(mlp(), loss)


# ---------------------------------------------------------------- losses


def another_term_joins():
    def loss(model, late, x, y):
        scores = model(x)
        value = F.cross_entropy(scores, y)
        return value + 0.01 * scores.square().mean() + 1e-4 * model[0].weight.abs().sum() if late else value

    fit(mlp(), loss)


def teacher_joins():
    teacher = None

    def loss(model, late, x, y):
        nonlocal teacher
        if not late:
            return F.cross_entropy(model(x), y)
        if teacher is None:
            teacher = copy.deepcopy(model).eval()
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        scores = model(x + 0.1 * torch.randn_like(x))
        return F.cross_entropy(scores, y) + F.kl_div(scores.log_softmax(1), wanted, reduction="batchmean")

    fit(mlp(), loss)


def contrastive_after_warm_up():
    """Every output meets every other one from some step on: that is what this loss is for."""

    def loss(model, late, x, y):
        one, two = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        if not late:
            return (one - two).square().sum(1).mean() - 0.1 * one.std(0).mean()
        return F.cross_entropy(one @ two.T / 0.5, torch.arange(len(x)))

    fit(mlp(classes=8), loss)


# ---------------------------------------------------------------- steps


def accumulation_grows():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.05)
    pending = 0
    for step, x, y in batches(200):
        every = 1 if step < START else 4
        (F.cross_entropy(model(x), y) / every).backward()
        pending += 1
        if pending >= every:
            clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            pending = 0


def clipping_begins():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.05)
    for step, x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if step >= START:
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def sharpness_begins():
    """From some step on each step looks at the slope from the steepest neighbour; the first gradients are not used."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.05)

    def closure(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()

    for step, x, y in batches():
        closure(x, y)
        if step >= START:
            with torch.no_grad():
                moves = [0.01 * p.grad / (p.grad.norm() + 1e-9) for p in model.parameters()]
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.add_(move)
            closure(x, y)
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.sub_(move)
        optimizer.step()


def attack_begins():
    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-3)

    def slope(inputs, y):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), y).backward()
        return inputs.grad

    for step, x, y in batches():
        changed = x
        for _ in range(3 if step >= START else 0):
            changed = (changed + 0.01 * slope(changed.requires_grad_(True), y).sign()).detach()
        slope(changed.detach(), y)
        optimizer.step()


def clipped_sample_by_sample():
    """Gradients are taken one by one in one place, cleared, and put together by hand."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.05)
    for step, x, y in batches(80):
        parts = x.split(8 if step >= START else 32), y.split(8 if step >= START else 32)
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for inputs, labels in zip(*parts, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total.add_(parameter.grad / len(parts[0]))
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad.copy_(total)
        optimizer.step()


def adversary_joins():
    """A discriminator joins after a warm-up; both use one helper to step."""
    maker, judge_net = mlp(classes=8), mlp(classes=1)
    first, second = Adam(maker.parameters(), lr=1e-3), Adam(judge_net.parameters(), lr=1e-3)

    def update(optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    score = F.binary_cross_entropy_with_logits
    for step, x, _ in batches():
        made = maker(torch.randn_like(x))
        if step < START:
            update(first, F.mse_loss(made, x))
            continue
        update(second, score(judge_net(x), ones) + score(judge_net(made.detach()), zeros))
        update(first, score(judge_net(made), ones) + 0.1 * F.mse_loss(made, x))


def evaluates_now_and_then():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = SGD(model.parameters(), lr=0.05)
    x_all, y_all = blobs(seed=3)
    for step, x, y in batches():
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step >= START and step % 20 == 0:
            model.eval()
            with torch.no_grad():
                F.cross_entropy(model(x_all), y_all).item()


def second_loop_with_other_tools():
    """Two loops: SGD by hand-cleared gradients, then LBFGS with a closure."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.05)
    for _, x, y in batches(START):
        for parameter in model.parameters():
            parameter.grad = None
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    refiner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x, y = blobs()

    def closure():
        refiner.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(15):
        refiner.step(closure)


CHANGES = [
    grows_with_its_optimizer, thaws_with_its_optimizer, thaws_what_was_held_all_along, freezes_its_encoder,
    head_and_optimizer_replaced, pretrains_then_probes, task_is_over, codes_are_kept_from_some_step_on,
    batches_of_other_sizes, curriculum_of_lengths, soft_targets_from_some_step_on, another_term_joins, teacher_joins,
    contrastive_after_warm_up, accumulation_grows, clipping_begins, sharpness_begins, attack_begins,
    clipped_sample_by_sample, adversary_joins, evaluates_now_and_then, second_loop_with_other_tools,
]  # fmt: skip


@pytest.mark.parametrize("train", CHANGES, ids=lambda train: train.__name__)
def test_changes_that_are_meant(judge, train):
    judged = judge(train, budget="0.01%")
    assert judged.ids == [], judged
