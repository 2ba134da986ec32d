"""Steps of one's own: optimizers that the user wrote, and updates by hand, that go up, nowhere, or rightly down."""

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, fit, mlp

X, Y = blobs()


class Plain(torch.optim.Optimizer):
    """Gradient descent; a negative rate makes it climb."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


class Momentum(Plain):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                speed = self.state[p].setdefault("speed", torch.zeros_like(p))
                speed.mul_(0.9).add_(p.grad)
                p.data = p.data - group["lr"] * speed


class Climber(torch.optim.SGD):
    """Torch's own, with its own sign."""

    def __init__(self, params, lr):
        super().__init__(params, abs(lr), maximize=lr < 0)


def own(kind, lr, loss=F.cross_entropy):
    model = mlp()
    fit(model, optimizer=kind(model.parameters(), lr), loss=loss, steps=12)


def by_hand(lr, loss=F.cross_entropy, *, is_bound_anew=False):
    model = mlp()
    for at in range(20):
        rows = torch.arange(at * 32, at * 32 + 32) % len(X)
        model.zero_grad()
        loss(model(X[rows]), Y[rows]).backward()
        with torch.no_grad():
            for p in model.parameters():
                if is_bound_anew:
                    p = p - lr * p.grad  # noqa: PLW2901 - the fault itself
                else:
                    p.sub_(lr * p.grad)


def score(outputs, targets):
    return -F.cross_entropy(outputs, targets)


def squares(outputs, targets):
    return (outputs - F.one_hot(targets, 3)).pow(2).mean()


@pytest.mark.parametrize(
    "loop",
    [
        lambda: own(Plain, -0.01),
        lambda: own(Momentum, -0.01, squares),
        lambda: own(Climber, -0.01),
        lambda: by_hand(-0.01),
        lambda: by_hand(-0.01, squares),
        lambda: by_hand(0.01, score),
        lambda: own(Plain, 0.01, score),
    ],
)
def test_a_step_of_ones_own_that_makes_the_loss_worse(judge, loop):
    judged = judge(loop)
    assert judged.ids == ["L10"], judged
    assert judged["L10"].step == 0


def test_the_hint_says_what_to_do_with_the_step(judge):
    assert "the step of optimizer adds the gradient" in judge(lambda: own(Plain, -0.01))["L10"].hint
    assert "the update by hand adds the gradient" in judge(lambda: by_hand(-0.01))["L10"].hint


@pytest.mark.parametrize(
    "loop",
    [
        lambda: own(Plain, 0.01),
        lambda: own(Plain, -0.01, score),
        lambda: own(Climber, -0.01, score),
        lambda: own(Momentum, 0.01, squares),
        lambda: by_hand(0.01),
        lambda: by_hand(-0.01, score),
    ],
)
def test_a_step_of_ones_own_that_makes_the_loss_better(judge, loop):
    assert judge(loop).ids == []


def test_a_perturbation_that_climbs_beside_a_frozen_model_is_an_attack(judge):
    model = mlp().requires_grad_(False)

    class Shift(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.model = torch.nn.Parameter(torch.zeros(1, 8)), model

        def forward(self, x):
            return self.model(x + self.shift)

    def attack():
        attacked = Shift()
        for at in range(20):
            attacked.zero_grad()
            F.cross_entropy(attacked(X[at : at + 32]), Y[at : at + 32]).backward()
            with torch.no_grad():
                attacked.shift += 0.05 * attacked.shift.grad.sign()

    assert judge(attack).ids == []


def test_a_game_in_which_one_side_climbs(judge):
    """The optimizer of torch's steps first, so that the other one is not the first to be seen."""

    def play():
        maker, critic = mlp(classes=8), mlp(classes=1)
        down, up = torch.optim.Adam(maker.parameters(), 1e-3), Plain(critic.parameters(), -0.01)
        for at in range(12):
            made = maker(X[at : at + 32])
            down.zero_grad()
            F.softplus(-critic(made)).mean().backward()
            down.step()
            up.zero_grad()
            real, false = critic(X[at : at + 32]), critic(made.detach())
            (F.logsigmoid(real).mean() + F.logsigmoid(-false).mean()).backward()
            up.step()

    assert judge(play).ids == []


def test_an_update_by_hand_that_only_gives_a_name_to_a_new_tensor(judge):
    judged = judge(lambda: by_hand(0.01, is_bound_anew=True))
    assert judged.ids == ["O11"], judged
    assert judged.errors == []
    assert "p -= lr * p.grad" in judged["O11"].hint


def test_gradients_of_single_samples_that_are_only_measured(judge):
    def survey():
        model = mlp()
        for at in range(20):
            model.zero_grad()
            F.cross_entropy(model(X[at : at + 1]), Y[at : at + 1]).backward()

    assert judge(survey).ids == []


def test_gradients_that_are_collected_before_an_update_by_hand(judge):
    """Many passes without a step, none of which clears what the others left."""

    def collect():
        model = mlp()
        for at in range(64):
            rows = torch.arange(at * 8, at * 8 + 8) % len(X)
            (F.cross_entropy(model(X[rows]), Y[rows]) / 16).backward()
            if at % 16 == 15:
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(0.1 * p.grad)
                model.zero_grad()

    assert judge(collect).ids == []
