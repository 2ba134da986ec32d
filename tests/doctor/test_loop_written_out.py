"""Losses that are written out by hand: with the wrong sign, with the right one, and with none to judge."""

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, mlp
from torch import nn

PICK = torch.arange(64)


def picked(scores, y):
    return F.log_softmax(scores, 1)[PICK, y].mean()


def gathered(scores, y):
    return F.log_softmax(scores, 1).gather(1, y[:, None]).sum() / 64


def one_hot(scores, y):
    return (F.one_hot(y, 3) * torch.log(F.softmax(scores, 1) + 1e-8)).sum(1).mean()


def two_sided(scores, y):
    p, t = torch.sigmoid(scores[:, 0]), (y == 0).float()
    return (t * torch.log(p + 1e-7) + (1 - t) * torch.log(1 - p + 1e-7)).mean()


def categorical(scores, y):
    return torch.distributions.Categorical(logits=scores).log_prob(y).mean()


def normal(scores, y):
    return torch.distributions.Normal(scores[:, 0], F.softplus(scores[:, 1]) + 0.1).log_prob(y.float()).mean()


def squares(scores, y):
    return -((scores[:, 0] - y) ** 2).mean()


def distance(scores, y):
    return -F.l1_loss(scores[:, 0], y.float())


LIKELIHOODS = [picked, gathered, one_hot, two_sided, categorical, normal, squares, distance]


def train(loss, *, steps=5):
    model = nn.Sequential(mlp())
    x, y = (each[:64] for each in blobs())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_a_likelihood_that_is_made_smaller(judge, likelihood):
    judged = judge(lambda: train(likelihood))
    assert judged.ids == ["L10"], judged
    words = "take the minus sign out" if likelihood in (squares, distance) else "minus sign"
    assert words in judged["L10"].hint
    assert judge(lambda: train(lambda scores, y: -likelihood(scores, y))).ids == []


def draw(scores):
    return torch.multinomial(F.softmax(scores.detach(), 1), 1)[:, 0]


def costs(scores, y):
    """A policy whose actions cost something: what is expensive is made less likely."""
    return (F.log_softmax(scores, 1)[PICK, draw(scores)] * torch.rand(64)).mean()


def penalties(scores, y):
    """Every reward is negative."""
    return -(torch.distributions.Categorical(logits=scores).log_prob(draw(scores)) * -torch.rand(64)).mean()


def one_cost_for_all(scores, y):
    return F.log_softmax(scores, 1)[PICK, draw(scores)].sum() * float(torch.rand(()))


def continuous_costs(scores, y):
    action = torch.distributions.Normal(scores, 1.0).sample()
    return (torch.distributions.Normal(scores, 1.0).log_prob(action).sum(1) * torch.rand(64)).mean()


def an_energy(scores, y):
    return -scores.logsumexp(1).mean() + scores.square().mean()


@pytest.mark.parametrize("loss", [costs, penalties, one_cost_for_all, continuous_costs, an_energy])
def test_no_sign_to_judge(judge, loss):
    assert judge(lambda: train(loss)).ids == []


def test_the_game_of_a_generator_keeps_a_right_term(judge):
    def play():
        maker, critic = mlp(classes=8), mlp(classes=1)
        ours, theirs = (torch.optim.SGD(each.parameters(), lr=1e-3) for each in (maker, critic))
        x, _ = blobs(64)
        for _ in range(5):
            theirs.zero_grad()
            real, made = torch.sigmoid(critic(x)), torch.sigmoid(critic(maker(x).detach()))
            (-torch.log(real).mean() - torch.log(1 - made).mean()).backward()
            theirs.step()
            ours.zero_grad()
            torch.log(1 - torch.sigmoid(critic(maker(x)))).mean().backward()
            ours.step()

    assert judge(play).ids == []


def numbers_again(scores, y):
    return torch.tensor([F.cross_entropy(scores, y).item()], requires_grad=True).mean()


def through_numpy(scores, y):
    return torch.from_numpy(scores.detach().numpy()).requires_grad_().square().mean()


def variable(scores, y):
    return 2 * torch.ones(64, requires_grad=True).dot(scores.detach()[:, 0])


@pytest.mark.parametrize("loss", [numbers_again, through_numpy, variable])
def test_a_loss_of_new_tensors(judge, loss):
    judged = judge(lambda: train(loss))
    assert judged.ids == ["L06"], judged
    assert "does not come from the model" in judged["L06"].hint
    assert judged["L06"].source.endswith(f":{train.__code__.co_firstlineno + 6}")


def test_a_multiplier_has_a_loss_of_its_own(judge):
    def play():
        model = mlp()
        x, y = blobs(64)
        multiplier = torch.zeros((), requires_grad=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            value = F.cross_entropy(model(x), y)
            value.backward()
            (multiplier * (1 - value.detach())).backward()
            multiplier.data -= 0.1 * multiplier.grad
            optimizer.step()

    assert judge(play).ids == []


class Shares(nn.Module):
    """A softmax that is written out."""

    def __init__(self, softmax=True):
        super().__init__()
        self.body, self.softmax = mlp(), softmax

    def forward(self, x):
        scores = self.body(x)
        parts = torch.exp(scores - scores.amax(1, keepdim=True))
        return parts / parts.sum(1, keepdim=True) if self.softmax else scores


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(classes=1)

    def forward(self, x):
        return torch.sigmoid(self.body(x)).clamp(1e-6, 1 - 1e-6).view(-1)


def binary_loss(loss):
    return lambda scores, y: loss(scores.view(-1), (y == 0).float())


SQUASHED = {
    "L01": (Shares, F.cross_entropy, lambda: Shares(softmax=False), F.cross_entropy),
    "L02": (
        lambda: nn.Sequential(mlp(), nn.LogSigmoid()),
        F.nll_loss,
        lambda: nn.Sequential(mlp(), nn.LogSoftmax(1)),
        F.nll_loss,
    ),
    "L03": (Clamped, binary_loss(nn.BCEWithLogitsLoss()), Clamped, binary_loss(nn.BCELoss())),
}


def fit_all(model, loss, data=None, steps=5):
    x, y = data or (each[:64] for each in blobs())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("id", SQUASHED)
def test_probabilities_in_the_place_of_scores(judge, id):
    wrong, loss, right, right_loss = SQUASHED[id]
    assert judge(lambda: fit_all(wrong(), loss)).ids == [id]
    assert judge(lambda: fit_all(right(), right_loss)).ids == []


def chosen(wide):
    """The value of an action that was taken, against a target for each sample."""
    action, target = torch.randint(0, 3, (64, 1)), torch.randn(64, 1 if wide else 64)[:, 0]
    return lambda scores, _: ((scores.gather(1, action) - (target[:, None] if wide else target)) ** 2).mean()


def masks(wide):
    picture, mask = torch.randn(8, 1, 6, 6), (torch.rand(8, 1, 6, 6) > 0.5).float()

    def dice(scores, mask):
        p = torch.sigmoid(scores)[:, 0]
        mask = mask[:, 0] if wide else mask
        return 1 - 2 * (p * mask).sum() / (p.sum() + mask.sum())

    return lambda: fit_all(nn.Conv2d(1, 1, 3, padding=1), dice, (picture, mask))


@pytest.mark.parametrize("wide", [False, True])
def test_broadcast_of_chosen_values_and_of_masks(judge, wide):
    assert judge(lambda: fit_all(mlp(), chosen(wide))).ids == ([] if wide else ["L05"])
    assert judge(masks(wide)).ids == ([] if wide else ["L05"])


def normalised(scores, y, *, is_right=False):
    p = F.softplus(scores)
    p = p / p.sum(-1, keepdim=True)
    return F.nll_loss(p.log(), y) if is_right else nn.CrossEntropyLoss()(p, y)


def by_length(scores, y, *, is_right=False):
    shares = F.normalize(scores.square(), p=1, dim=1)
    return F.nll_loss((shares + 1e-6).log(), y) if is_right else F.cross_entropy(shares, y)


def ensemble(scores, y, *, is_right=False):
    p = torch.stack([F.softmax(scores, 1), F.softmax(2 * scores, 1)]).mean(0)
    return F.nll_loss(p.log(), y) if is_right else F.cross_entropy(p, y, label_smoothing=0.1)


def of_a_bag(scores, y, *, is_right=False):
    p, goal = torch.sigmoid(scores).mean(1), (y == 0).float()
    return F.binary_cross_entropy(p, goal) if is_right else F.binary_cross_entropy_with_logits(p, goal)


def at_least_one(scores, y, *, is_right=False):
    p, goal = 1 - (1 - torch.sigmoid(scores)).prod(1), (y == 0).float()
    return F.binary_cross_entropy(p, goal) if is_right else nn.BCEWithLogitsLoss()(p, goal)


def the_largest(scores, y, *, is_right=False):
    p, goal = torch.sigmoid(scores).max(1).values, (y == 0).float()
    loss = F.binary_cross_entropy if is_right else F.binary_cross_entropy_with_logits
    return loss(p.clamp(1e-6, 1 - 1e-6), goal)


NORMALISED = {
    **dict.fromkeys((normalised, by_length, ensemble), "L01"),
    **dict.fromkeys((of_a_bag, at_least_one, the_largest), "L03"),
}


@pytest.mark.parametrize("loss", NORMALISED)
def test_probabilities_by_their_numbers(judge, loss):
    assert judge(lambda: train(loss)).ids == [NORMALISED[loss]]
    assert judge(lambda: train(lambda scores, y: loss(scores, y, is_right=True))).ids == []


def test_scores_between_zero_and_one_are_scores(judge):
    def gated(scores, y):
        return F.cross_entropy(torch.sigmoid(scores) * scores.abs().clamp(max=0.9), y)

    assert judge(lambda: train(gated)).ids == []


def series(wide):
    x = torch.randn(12, 12, 2)
    goal = x[..., 0].cumsum(1)
    cell, head = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
    for _ in range(5):
        optimizer.zero_grad()
        apart = head(cell(x)[0]) - (goal[..., None] if wide else goal)
        torch.log(torch.cosh(apart)).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("wide", [False, True])
def test_broadcast_of_a_series_as_long_as_the_batch(judge, wide):
    assert judge(lambda: series(wide)).ids == ([] if wide else ["L05"])


def bound_of_distributions(x, encode, decode):
    mean, spread = encode(x).chunk(2, -1)
    seen = torch.distributions.Normal(mean, spread.clamp(-3, 3).exp())
    error = torch.distributions.Normal(decode(seen.rsample()), 1.0).log_prob(x).sum(-1)
    known = torch.distributions.Normal(0.0, 1.0)
    return (error - torch.distributions.kl_divergence(seen, known).sum(-1)).mean()


def bound_by_hand(x, encode, decode):
    mean, logs = encode(x).chunk(2, -1)
    z = mean + torch.randn_like(mean) * torch.exp(0.5 * logs)
    divergence = -0.5 * (1 + logs - mean.pow(2) - logs.exp()).sum(1)
    return (-((decode(z) - x) ** 2).sum(1) - divergence).mean()


def bound_of_softplus(x, encode, decode):
    mean, spread = encode(x).chunk(2, -1)
    spread = F.softplus(spread) + 1e-3
    z = mean + torch.randn_like(mean) * spread
    divergence = (mean.square() + spread.square() - 2 * spread.log() - 1).sum(1)
    return -(decode(z) - x).abs().sum(1).mean() - 0.5 * divergence.mean()


@pytest.mark.parametrize("bound", [bound_of_distributions, bound_by_hand, bound_of_softplus])
def test_a_bound_that_is_made_smaller(judge, bound):
    def play(sign):
        encode, decode = nn.Linear(8, 8), nn.Linear(4, 8)
        optimizer = torch.optim.Adam([*encode.parameters(), *decode.parameters()], lr=1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            (sign * bound(torch.randn(32, 8), encode, decode)).backward()
            optimizer.step()

    assert judge(lambda: play(1)).ids == ["L10"]
    assert judge(lambda: play(-1)).ids == []
