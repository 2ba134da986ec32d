"""How a loss is put together: three spellings of each fault, and the losses that resemble them."""

import math

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, fit, mlp
from torch import nn

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def loop(step, parameters, *, steps=12, optimizer=None):
    """Train with ``step() -> loss``."""
    optimizer = optimizer or SGD(list(parameters), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        step().backward()
        optimizer.step()


def conv_net(classes=3):
    return nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, classes))


class Segment(nn.Module):
    """Gives a score per class and pixel, with the softmax it should not have."""

    def __init__(self, classes=3):
        super().__init__()
        self.conv = nn.Conv2d(1, classes, 3, padding=1)

    def forward(self, x):
        return self.conv(x).softmax(1)


def numbers(samples=64):
    x, _ = blobs(samples)
    return x, x[:, 0] * 2 - x[:, 1]


# ---------------------------------------------------------------- the wrong thing goes in


def softmax_layer():
    fit(nn.Sequential(mlp(), nn.Softmax(dim=1)), steps=12)


def softmax_of_pixels():
    model = Segment()
    x, y = torch.randn(4, 1, 8, 8), torch.randint(0, 3, (4, 8, 8))
    loop(lambda: nn.CrossEntropyLoss()(model(x), y), model.parameters())


def sigmoid_and_smoothing():
    model = conv_net()
    x, y = blobs(64)
    loop(
        lambda: F.cross_entropy(torch.sigmoid(model(x[:, None])), y, label_smoothing=0.1), model.parameters()
    )


def soft_targets_of_probabilities():
    model = mlp()
    x, y = blobs()
    goal = F.one_hot(y, 3).float()
    loop(
        lambda: -(goal * F.log_softmax(F.softmax(model(x), -1), -1)).sum(1).mean(),
        model.parameters(),
        optimizer=Adam(model.parameters()),
    )


def nll_of_softmax():
    fit(nn.Sequential(mlp(), nn.Softmax(-1)), steps=12, loss=F.nll_loss)


def nll_of_scores():
    fit(mlp(layers=3), steps=12, loss=nn.NLLLoss(), lr=0.01)


def nll_of_pixels():
    model = nn.Conv2d(1, 3, 3, padding=1)
    x, y = torch.randn(4, 1, 8, 8), torch.randint(0, 3, (4, 8, 8))
    loop(lambda: F.nll_loss(model(x), y), model.parameters())


def sigmoid_layer():
    x, y = blobs(classes=2)
    fit(
        nn.Sequential(mlp(classes=1), nn.Sigmoid()),
        (x, y.float()[:, None]),
        loss=nn.BCEWithLogitsLoss(),
        steps=12,
    )


def sigmoid_function():
    model = mlp(classes=1)
    x, y = blobs(classes=2)
    loop(
        lambda: F.binary_cross_entropy_with_logits(torch.sigmoid(model(x)).squeeze(1), y.float()),
        model.parameters(),
    )


def softmax_for_labels():
    model = mlp(classes=4)
    x, _ = blobs()
    goal = (x[:, :4] > 0).float()
    loop(lambda: nn.BCEWithLogitsLoss()(model(x).softmax(1), goal), model.parameters())


def distill(student_side, *, log_target=False):
    student, teacher = mlp(), mlp(layers=3).eval().requires_grad_(False)
    x, _ = blobs()

    def step():
        goal = F.log_softmax(teacher(x), 1) if log_target else F.softmax(teacher(x), 1)
        return F.kl_div(student_side(student(x)), goal, reduction="batchmean", log_target=log_target)

    loop(step, student.parameters(), optimizer=SGD(student.parameters(), lr=0.01))


WRONG_INPUT = {
    "L01": [softmax_layer, softmax_of_pixels, sigmoid_and_smoothing, soft_targets_of_probabilities],
    "L02": [nll_of_softmax, nll_of_scores, nll_of_pixels],
    "L03": [sigmoid_layer, sigmoid_function, softmax_for_labels],
    "L04": [
        lambda: distill(lambda s: F.softmax(s, 1)),
        lambda: distill(lambda s: s),
        lambda: distill(lambda s: F.softmax(s / 2, 1), log_target=True),
    ],
}


@pytest.mark.parametrize(("id", "spelling"), [(id, each) for id in WRONG_INPUT for each in WRONG_INPUT[id]])
def test_wrong_input(judge, id, spelling):
    judged = judge(spelling)
    assert judged.ids == [id], judged
    assert judged.errors == [id]
    assert judged[id].step <= 2
    assert "test_loop_loss.py:" in judged[id].source or "loops.py:" in judged[id].source


@pytest.mark.parametrize(("dim", "id"), [(0, "M09"), (2, "L02")])
def test_a_log_softmax_over_another_dimension(judge, dim, id):
    model = nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), nn.LogSoftmax(dim))
    x, y = torch.randn(8, 1, 6), torch.randint(0, 3, (8, 6))
    judged = judge(lambda: loop(lambda: F.nll_loss(model(x), y), model.parameters()))
    assert judged.ids == [id], judged
    assert dim == 0 or "over another dimension" in judged[id].hint


def test_a_divergence_with_its_arguments_swapped(judge):
    model = mlp()
    x, y = blobs(64)
    goal = F.one_hot(y, 3).float().mul(0.9).add(0.1 / 3)
    judged = judge(
        lambda: loop(
            lambda: F.kl_div(goal, model(x).softmax(1), reduction="batchmean"), model.parameters(), steps=6
        )
    )
    assert judged.ids == ["L04"], judged
    assert "other way round" in judged["L04"].hint


def pick_by_place(out, y):
    return -out[torch.arange(len(y)), y].mean()


def pick_by_gather(out, y):
    return -out.gather(1, y[:, None]).sum() / len(y)


def pick_by_product(out, y):
    return (out * F.one_hot(y, 3)).sum(1).neg().mean()


@pytest.mark.parametrize("pick", [pick_by_place, pick_by_gather, pick_by_product])
def test_a_likelihood_written_out_without_its_logarithm(judge, pick):
    judged = judge(lambda: fit(mlp(), loss=pick, steps=12, lr=0.01))
    assert judged.ids == ["L02"], judged
    assert judged["L02"].step <= 2
    assert judge(lambda: fit(mlp(), loss=lambda out, y: pick(out.log_softmax(1), y), steps=12)).ids == []
    assert judge(lambda: fit(mlp(), loss=lambda out, y: pick(out.softmax(1), y), steps=12)).ids == []


# ---------------------------------------------------------------- shapes


def broadcast_in(loss):
    model = mlp(classes=1)
    x, y = numbers()
    loop(lambda: loss(model(x), y), model.parameters(), optimizer=SGD(model.parameters(), lr=1e-3))


def broadcast_of_flat_output():
    model = nn.Sequential(mlp(classes=1), nn.Flatten(0))
    x, y = numbers()
    loop(lambda: (model(x) - y[:, None]).abs().mean(), model.parameters(), optimizer=Adam(model.parameters()))


def broadcast_of_weights():
    model = mlp(classes=1)
    x, y = numbers()
    weights = torch.rand(64)
    loop(
        lambda: torch.mean((model(x) - y[:, None]).square() * weights),
        model.parameters(),
        optimizer=Adam(model.parameters()),
    )


def broadcast_of_weights_for_losses():
    model = mlp()
    x, y = blobs(64)
    weights = torch.rand(64, 1)
    loop(lambda: torch.mean(weights * F.cross_entropy(model(x), y, reduction="none")), model.parameters())


BROADCAST = [
    broadcast_of_weights_for_losses,
    lambda: broadcast_in(lambda out, y: ((out - y) ** 2).mean()),
    lambda: broadcast_in(lambda out, y: (y - out).pow(2).sum() / 64),
    broadcast_of_flat_output,
    broadcast_of_weights,
]


@pytest.mark.parametrize("spelling", BROADCAST)
def test_broadcast_by_hand(judge, spelling):
    judged = judge(spelling)
    assert judged.ids == ["L05"], judged
    assert judged["L05"].step <= 2
    assert judged["L05"].evidence["comparisons"] == 64 * 64


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [F.mse_loss, nn.SmoothL1Loss(), nn.HuberLoss(), F.l1_loss, nn.MSELoss()])
def test_broadcast_in_a_loss_of_torch(judge, loss):
    judged = judge(lambda: broadcast_in(loss))
    assert judged.ids == ["L05"], judged
    assert "64 outputs are compared with every target (64x64)" in judged["L05"].hint


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_broadcast_of_maps_without_their_channel(judge):
    model = nn.Conv2d(3, 1, 3, padding=1)
    x = torch.randn(4, 3, 6, 6)
    judged = judge(lambda: loop(lambda: F.l1_loss(model(x), x.mean(1)), model.parameters()))
    assert judged.ids == ["L05"], judged
    assert judged["L05"].evidence["shape"] == "4x4x6x6"


def test_a_kernel_between_outputs_and_data_is_meant(judge):
    model = mlp(classes=1)
    x, y = numbers()

    def discrepancy():
        out, goal = model(x), y[:, None]
        own, cross = (torch.exp(-((out - other.T) ** 2)).mean() for other in (out, goal))
        return own - 2 * cross

    assert judge(lambda: loop(discrepancy, model.parameters())).ids == []


# ---------------------------------------------------------------- nothing, one class, the wrong way


def rewrapped():
    model = mlp()
    x, y = blobs()
    loop(lambda: torch.tensor(F.cross_entropy(model(x), y).item(), requires_grad=True), model.parameters())


def detached():
    model = mlp(classes=1)
    x, y = numbers()
    loop(lambda: F.mse_loss(model(x)[:, 0], y).detach().requires_grad_(), model.parameters())


def computed_without_grad():
    model = conv_net()
    x, y = blobs(64)
    opt = SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        opt.zero_grad()
        with torch.no_grad():
            loss = F.cross_entropy(model(x[:, None]), y)
        loss.backward()
        opt.step()


def plain_number():
    model = mlp()
    x, y = blobs()
    loop(lambda: F.cross_entropy(model(x), y).item(), model.parameters())


@pytest.mark.parametrize("spelling", [rewrapped, detached, computed_without_grad, plain_number])
def test_detached_loss(judge, spelling):
    judged = judge(spelling, error=(RuntimeError, AttributeError))
    assert judged.ids == ["L06"], judged
    assert judged["L06"].step == 0


def one_class():
    x, _ = blobs()
    fit(mlp(classes=1), (x, torch.zeros(256, dtype=torch.long)), steps=12)


def one_class_of_pixels():
    model = nn.Conv2d(1, 1, 3, padding=1)
    x, y = torch.randn(4, 1, 8, 8), torch.zeros(4, 8, 8, dtype=torch.long)
    loop(lambda: F.cross_entropy(model(x), y), model.parameters())


def one_class_by_parts():
    model = conv_net(1)
    x, _ = blobs(64)
    goal = torch.ones(64, 1)
    loop(lambda: nn.CrossEntropyLoss()(model(x[:, None]), goal), model.parameters())


@pytest.mark.parametrize("spelling", [one_class, one_class_of_pixels, one_class_by_parts])
def test_one_class(judge, spelling):
    judged = judge(spelling)
    assert judged.ids == ["L07"], judged


def negated():
    model = mlp()
    x, y = blobs()
    loop(
        lambda: -F.cross_entropy(model(x), y), model.parameters(), optimizer=SGD(model.parameters(), lr=1e-3)
    )


def negative_weight():
    model = mlp(classes=1)
    x, y = numbers()

    def step():
        return -0.1 * F.mse_loss(model(x)[:, 0], y) + 1e-4 * sum(p.square().sum() for p in model.parameters())

    loop(step, model.parameters(), optimizer=SGD(model.parameters(), lr=1e-3))


def maximizing_optimizer():
    model = mlp(classes=1)
    x, y = blobs(classes=2)
    loop(
        lambda: nn.BCEWithLogitsLoss(reduction="none")(model(x)[:, 0], y.float()).mean(),
        model.parameters(),
        optimizer=SGD(model.parameters(), lr=1e-3, maximize=True),
    )


@pytest.mark.parametrize("spelling", [negated, negative_weight, maximizing_optimizer])
def test_maximising(judge, spelling):
    judged = judge(spelling)
    assert judged.ids == ["L10"], judged
    assert judged["L10"].severity == "warning"


# ---------------------------------------------------------------- right, though it looks like one of these


def focal():
    model = mlp()
    x, y = blobs()

    def step():
        logs = F.log_softmax(model(x), 1)
        return F.nll_loss((1 - logs.exp()) ** 2 * logs, y)

    loop(step, model.parameters())


def log_of_softmax():
    fit(nn.Sequential(mlp(), nn.Softmax(1)), loss=lambda p, y: F.nll_loss(torch.log(p + 1e-8), y))


def pairs():
    model = mlp(classes=1)
    x, y = numbers()

    def step():
        score = model(x)
        difference = score - score.T
        return F.softplus(-difference * torch.sign(y[:, None] - y[None, :])).mean()

    loop(step, model.parameters(), optimizer=Adam(model.parameters()))


def proportional_hazards():
    model = mlp(classes=1)
    x, time = numbers()
    at_risk = (time[None, :] >= time[:, None]).float()

    def step():
        risk = model(x)
        return -(risk - torch.log((torch.exp(risk.T) * at_risk).sum(1, keepdim=True))).mean()

    loop(step, model.parameters(), optimizer=Adam(model.parameters()))


def quantiles():
    model = mlp(classes=3)
    x, y = numbers()
    levels = torch.tensor([0.1, 0.5, 0.9])

    def step():
        error = y[:, None] - model(x)
        return torch.maximum(levels * error, (levels - 1) * error).mean()

    loop(step, model.parameters(), optimizer=Adam(model.parameters()))


def histogram_of_scalars():
    model = mlp(classes=1)
    x, y = numbers()
    bins = torch.linspace(-3, 3, 20)

    def step():
        soft = torch.exp(-((model(x) - bins) ** 2)).mean(0)
        return (soft - torch.exp(-((y[:, None] - bins) ** 2)).mean(0)).square().mean()

    loop(step, model.parameters(), optimizer=Adam(model.parameters()))


def saturating_gan():
    make, judge_ = mlp(features=4, classes=8), mlp(classes=1)
    opt_g, opt_d = Adam(make.parameters()), Adam(judge_.parameters())
    x, _ = blobs()
    bce = F.binary_cross_entropy_with_logits
    for _ in range(10):
        opt_d.zero_grad()
        fake = make(torch.randn(256, 4))
        (bce(judge_(x), torch.ones(256, 1)) + bce(judge_(fake.detach()), torch.zeros(256, 1))).backward()
        opt_d.step()
        opt_g.zero_grad()
        (-bce(judge_(fake), torch.zeros(256, 1))).backward()
        opt_g.step()


def attack():
    model = mlp().eval()
    x, y = blobs()
    delta = torch.zeros_like(x, requires_grad=True)
    loop(lambda: -F.cross_entropy(model(x + delta), y), [delta], optimizer=Adam([delta], lr=1e-3))


def domain_reversal():
    body, label, domain = mlp(classes=16), nn.Linear(16, 3), nn.Linear(16, 2)
    x, y = blobs()
    where = (x[:, 0] > 0).long()

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.view_as(z)

        @staticmethod
        def backward(ctx, grad):
            return -0.1 * grad

    def step():
        z = body(x)
        return F.cross_entropy(label(z), y) + F.cross_entropy(domain(Reverse.apply(z)), where)

    loop(step, [*body.parameters(), *label.parameters(), *domain.parameters()])


def reinforce():
    policy = mlp(classes=4)
    x, _ = blobs()

    def step():
        spread = torch.distributions.Categorical(logits=policy(x))
        action = spread.sample()
        reward = (action == 1).float() - 0.5
        return -(spread.log_prob(action) * reward).mean() - 0.01 * spread.entropy().mean()

    loop(step, policy.parameters())


def variational():
    encoder, decoder = mlp(classes=8), mlp(features=4, classes=8)
    x, _ = blobs()
    goal = torch.sigmoid(x)

    def step():
        mean, log_variance = encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        error = F.binary_cross_entropy(torch.sigmoid(decoder(z)), goal, reduction="sum")
        return error / 256 - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()

    loop(
        step,
        [*encoder.parameters(), *decoder.parameters()],
        optimizer=Adam([*encoder.parameters(), *decoder.parameters()]),
    )


def gradient_penalty():
    critic = mlp(classes=1)
    x, _ = blobs()

    def step():
        mix = (x + torch.randn_like(x)).requires_grad_()
        slope = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)[0]
        return critic(x + 1).mean() - critic(x).mean() + 10 * ((slope.norm(2, 1) - 1) ** 2).mean()

    loop(step, critic.parameters(), optimizer=Adam(critic.parameters()))


def hinge():
    model = mlp(classes=1)
    x, y = blobs(classes=2)
    sign = 2 * y.float()[:, None] - 1
    loop(lambda: F.relu(1 - sign * model(x)).mean(), model.parameters())


def smoothed_and_weighted():
    fit(mlp(), loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1))


def checkpointed():
    body, head = mlp(classes=16), nn.Linear(16, 3)
    x, y = blobs()

    def step():
        z = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
        return torch.utils.checkpoint.checkpoint(
            lambda z: F.cross_entropy(head(z), y), z, use_reentrant=False
        )

    loop(step, [*body.parameters(), *head.parameters()])


RIGHT = [
    focal, log_of_softmax, pairs, proportional_hazards, quantiles, histogram_of_scalars, saturating_gan, attack,
    domain_reversal, reinforce, variational, gradient_penalty, hinge, smoothed_and_weighted, checkpointed,
    lambda: distill(lambda s: F.log_softmax(s, 1)),
    lambda: distill(lambda s: F.log_softmax(s / 4, 1), log_target=True),
]  # fmt: skip


@pytest.mark.parametrize("train", RIGHT)
def test_right_losses(judge, train):
    judged = judge(train)
    assert judged.ids == [], judged


def test_a_probe_leaves_no_hook_on_the_graph(judge):
    model = mlp()
    x, y = blobs()
    kept = []

    def step():
        kept.append(F.cross_entropy(model(x), y))
        return kept[-1] * math.pi

    judge(lambda: loop(step, model.parameters(), steps=3))
    assert all(loss.grad_fn is not None and not loss.grad_fn.metadata for loss in kept)
