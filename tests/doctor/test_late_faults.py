"""Faults that begin when the loop has long been known: a second phase, a grown model, a flag that flips.

Almost no step is recorded here after the first ones: what is seen then is seen because the loop is not what it was.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, mlp
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

SGD, Adam = torch.optim.SGD, torch.optim.Adam
LENGTH = 40
"""Steps after the fault has begun."""


def batches(start, length=LENGTH):
    x, y = blobs()
    for step in range(start + length + start // 10):
        rows = torch.arange(step * 32, (step + 1) * 32) % len(x)
        yield step >= start, x[rows], y[rows]


def fit(start, model, loss, optimizer=None, lr=1e-2):
    """Train with a loss of ``(model, late, x, y)``."""
    optimizer = optimizer or SGD(model.parameters(), lr=lr)
    for late, x, y in batches(start):
        optimizer.zero_grad()
        loss(model, late, x, y).backward()
        optimizer.step()


# ---------------------------------------------------------------- gradients


def clearing_by_hand_is_forgotten(start):
    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-4)
    for late, x, y in batches(start):
        if not late:
            for parameter in model.parameters():
                parameter.grad = None
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def second_loop_without_clearing(start):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-3)
    seen = list(batches(start))
    for _, x, y in seen[:start]:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for _, x, y in seen[start:]:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def monitor_forgets_the_gradients(start):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-2)
    for late, x, y in batches(start):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if late:
            for parameter in model.parameters():
                parameter.grad = None
        optimizer.step()


def monitor_zeroes_the_gradients(start):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-2)
    for late, x, y in batches(start):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if late:
            for parameter in model.parameters():
                parameter.grad.zero_()
        optimizer.step()


def accumulation_that_clears_each_time(start):
    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-3)
    for step, (late, x, y) in enumerate(batches(start, 4 * LENGTH)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if not late or step % 4 == 3:
            optimizer.step()


def second_step(start):
    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-3)
    for late, x, y in batches(start):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if late:
            optimizer.step()


def clipping_moves_before_backward(start):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-2)
    for late, x, y in batches(start):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if late:
            clip_grad_norm_(model.parameters(), 1.0)
        loss.backward()
        if not late:
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


# ---------------------------------------------------------------- losses


def softmax_comes_in(start):
    fit(start, mlp(), lambda m, late, x, y: F.cross_entropy(m(x).softmax(1) if late else m(x), y))


def log_goes_out(start):
    fit(start, mlp(), lambda m, late, x, y: F.nll_loss(m(x) if late else m(x).log_softmax(1), y))


def sigmoid_comes_in(start):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.gives_shares = mlp(classes=1), False

        def forward(self, x):
            return self.body(x).sigmoid() if self.gives_shares else self.body(x)

    def loss(model, late, x, y):
        model.gives_shares = late
        return F.binary_cross_entropy_with_logits(model(x), (y > 0).float().unsqueeze(1))

    fit(start, Net(), loss)


def targets_lose_a_dimension(start):
    def loss(model, late, x, y):
        return ((model(x) - (x.sum(1) if late else x.sum(1, keepdim=True))) ** 2).mean()

    fit(start, mlp(classes=1), loss, lr=1e-3)


def outputs_lose_a_dimension(start):
    criterion = nn.SmoothL1Loss()

    def loss(model, late, x, y):
        return criterion(model(x).squeeze(1) if late else model(x), x[:, :1])

    fit(start, mlp(classes=1), loss, lr=1e-3)


def loss_becomes_a_number(start):
    def loss(model, late, x, y):
        value = F.cross_entropy(model(x), y)
        return torch.tensor(value.item(), requires_grad=True) if late else value

    fit(start, mlp(), loss)


def factor_changes_its_sign(start):
    fit(start, mlp(), lambda model, late, x, y: (0.5 - late) * F.cross_entropy(model(x), y))


def stream_gets_stuck(start):
    x, y = blobs()
    rows = torch.arange((start + LENGTH) * 32) % len(x)
    rows[start * 32 :] = 5
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-2)
    for inputs, labels in DataLoader(TensorDataset(x[rows], y[rows.flip(0)]), batch_size=32):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def masks_are_not_scaled(start):
    def loss(model, late, x, y):
        mask = (y > 0).float().unsqueeze(1)
        return F.binary_cross_entropy_with_logits(model(x), mask * 255 if late else mask)

    fit(start, mlp(classes=1), loss)


def one_batch_is_all_padding(start):
    def loss(model, late, x, y):
        return F.cross_entropy(model(x), torch.full_like(y, -100) if late else y)

    fit(start, mlp(), loss)


# ---------------------------------------------------------------- models


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head, self.is_cut = nn.Linear(8, 16), nn.Linear(16, 3), False
        self.blocks = nn.ModuleList()
        self.extra = []
        self.scale = None

    def forward(self, x):
        hidden = self.encoder(x).relu()
        for block in [*self.blocks, *self.extra]:
            hidden = hidden + block(hidden).tanh()
        hidden = hidden if self.scale is None else hidden * self.scale
        return self.head(hidden.detach() if self.is_cut else hidden)


def changed(change):
    """Return a training in which something is done to the model when the fault begins."""

    def train(start, optimizer=None):
        model, is_done = Net(), False
        optimizer = optimizer(model) if optimizer else Adam(model.parameters(), lr=1e-3)
        for late, x, y in batches(start):
            if late and not is_done:
                is_done = True
                change(model)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    train.__name__ = change.__name__
    return train


@changed
def detach_comes_in(model):
    model.is_cut = True


@changed
def block_grows(model):
    model.blocks.append(nn.Linear(16, 16))


@changed
def head_is_replaced(model):
    model.head = nn.Linear(16, 3)


@changed
def parameter_is_added(model):
    model.scale = nn.Parameter(torch.ones(16))


@changed
def hidden_block_grows(model):
    model.extra.append(nn.Linear(16, 16))


def unfrozen_but_not_held(start):
    model = Net()
    model.encoder.requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for late, x, y in batches(start):
        if late:
            model.encoder.requires_grad_(True)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def encoder_goes_quiet(start):
    encoder, head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 3)
    optimizer = SGD([*encoder.parameters(), *head.parameters()], lr=1e-2, momentum=0.9)
    for late, x, y in batches(start):
        with torch.set_grad_enabled(not late):
            codes = encoder(x)
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(head(codes), y).backward()
        optimizer.step()


def optimizer_of_a_copy(start):
    model = mlp()
    optimizer, is_done = SGD(model.parameters(), lr=1e-2), False
    for late, x, y in batches(start):
        if late and not is_done:
            is_done = True
            optimizer = SGD(copy.deepcopy(model).parameters(), lr=1e-3)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def seed_in_every_step(start):
    def loss(model, late, x, y):
        if late:
            torch.manual_seed(7)
        return F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)

    fit(start, mlp(), loss)


FAULTS = {
    "O01": [clearing_by_hand_is_forgotten, second_loop_without_clearing],
    "O02": [monitor_forgets_the_gradients, monitor_zeroes_the_gradients, accumulation_that_clears_each_time],
    "O04": [second_step],
    "O13": [clipping_moves_before_backward],
    "L01": [softmax_comes_in],
    "L02": [log_goes_out],
    "L03": [sigmoid_comes_in],
    "L05": [targets_lose_a_dimension, outputs_lose_a_dimension],
    "L06": [loss_becomes_a_number],
    "L10": [factor_changes_its_sign],
    "L08": [detach_comes_in, encoder_goes_quiet],
    "D03": [stream_gets_stuck],
    "D02": [masks_are_not_scaled],
    "D13": [one_batch_is_all_padding],
    "M01": [block_grows, head_is_replaced, parameter_is_added, unfrozen_but_not_held],
    "M02": [optimizer_of_a_copy],
    "M04": [hidden_block_grows],
    "P09": [seed_in_every_step],
}
CASES = [(id, train) for id, spellings in FAULTS.items() for train in spellings]
RESTING = ("O02", "O04", "L05", "L08", "M01", "P09")
"""Those that are tried again after the probes have come to rest."""


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("id", "train"), CASES, ids=[f"{id}-{train.__name__}" for id, train in CASES])
def test_late_faults(judge, id, train):
    judged = judge(train, 60, budget="0.01%")
    assert judged.ids[:1] == [id], judged
    assert 60 <= judged[id].step <= 85


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("id", RESTING)
def test_faults_after_the_probes_have_come_to_rest(judge, id):
    judged = judge(FAULTS[id][0], 330, budget="0.01%")
    assert judged.ids == [id], judged
    assert 330 <= judged[id].step <= 420
