"""Games, reinforcement and representations: trainings that look strange and are right."""

import copy

import torch
import torch.nn.functional as F
from healthy_loops import batches, descend, healthy
from loops import blobs, mlp
from torch import nn

Adam, SGD = torch.optim.Adam, torch.optim.SGD


# ---------------------------------------------------------------- games


@healthy
def gan():
    maker, critic = mlp(4, 32, 2), mlp(2, 32, 1)
    ours, theirs = Adam(maker.parameters(), 1e-3), Adam(critic.parameters(), 1e-3)
    judge = nn.BCEWithLogitsLoss()
    for _ in range(60):
        real, noise = torch.randn(32, 2) + 2, torch.randn(32, 4)
        fake = maker(noise)
        descend(
            judge(critic(real), torch.ones(32, 1)) + judge(critic(fake.detach()), torch.zeros(32, 1)), theirs
        )
        descend(judge(critic(fake), torch.ones(32, 1)), ours)


@healthy
def wgan_with_clipped_weights():
    maker, critic = mlp(4, 32, 2), mlp(2, 32, 1)
    ours, theirs = (
        torch.optim.RMSprop(maker.parameters(), 5e-4),
        torch.optim.RMSprop(critic.parameters(), 5e-4),
    )
    for step in range(60):
        fake = maker(torch.randn(32, 4))
        descend(critic(fake.detach()).mean() - critic(torch.randn(32, 2) + 2).mean(), theirs)
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.05, 0.05)
        if step % 5 == 4:
            descend(-critic(maker(torch.randn(32, 4))).mean(), ours)


@healthy
def wgan_with_penalty():
    maker, critic = mlp(4, 32, 2), mlp(2, 32, 1, nn.LeakyReLU)
    ours, theirs = Adam(maker.parameters(), 1e-3), Adam(critic.parameters(), 1e-3)
    for _ in range(40):
        real, fake = torch.randn(32, 2) + 2, maker(torch.randn(32, 4)).detach()
        between = (real + torch.rand(32, 1) * (fake - real)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
        descend(critic(fake).mean() - critic(real).mean() + penalty, theirs)
        descend(-critic(maker(torch.randn(32, 4))).mean(), ours)


@healthy
def spectral_norm_and_hinge():
    maker = mlp(4, 32, 2)
    critic = nn.Sequential(
        *(
            nn.utils.parametrizations.spectral_norm(m) if isinstance(m, nn.Linear) else m
            for m in mlp(2, 32, 1)
        )
    )
    ours, theirs = Adam(maker.parameters(), 1e-3), Adam(critic.parameters(), 1e-3)
    for _ in range(40):
        fake = maker(torch.randn(32, 4))
        descend(
            F.relu(1 - critic(torch.randn(32, 2) + 2)).mean() + F.relu(1 + critic(fake.detach())).mean(),
            theirs,
        )
        descend(-critic(fake).mean(), ours)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.1 * grad


@healthy
def gradient_reversal():
    body, label, domain = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 2)
    optimizer = SGD([*body.parameters(), *label.parameters(), *domain.parameters()], 0.05)
    x, y = blobs()
    for inputs, targets in batches(x, y):
        hidden = F.relu(body(inputs))
        place = (inputs[:, 0] > 0).long()
        descend(
            F.cross_entropy(label(hidden), targets) + F.cross_entropy(domain(Reversed.apply(hidden)), place),
            optimizer,
        )


@healthy
def fast_gradient_sign():
    model, (x, y) = mlp(), blobs()
    optimizer = SGD(model.parameters(), 0.1)
    for inputs, targets in batches(x, y):
        leaf = inputs.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(leaf), targets), leaf)
        descend(F.cross_entropy(model(inputs + 0.1 * slope.sign()), targets), optimizer)


# ---------------------------------------------------------------- reinforcement


@healthy
def deep_q():
    model = mlp(4, 32, 2)
    target = copy.deepcopy(model)
    optimizer = Adam(model.parameters(), 1e-3)
    for step in range(80):
        state = torch.randn(32, 4)
        action = torch.randint(0, 2, (32, 1))
        reward = (state[:, :1] > 0).float() * (action == 1)
        after = state + 0.1 * torch.randn(32, 4)
        with torch.no_grad():
            goal = reward + 0.9 * target(after).amax(1, keepdim=True)
        descend(F.smooth_l1_loss(model(state).gather(1, action), goal), optimizer)
        if step % 20 == 19:
            target.load_state_dict(model.state_dict())


@healthy
def policy_gradient():
    model = mlp(4, 32, 2)
    optimizer = Adam(model.parameters(), 1e-2)
    for _ in range(60):
        state = torch.randn(24, 4)
        chosen = torch.distributions.Categorical(logits=model(state))
        action = chosen.sample()
        reward = ((state[:, 0] > 0).long() == action).float()
        descend(-(chosen.log_prob(action) * (reward - reward.mean())).sum(), optimizer)


@healthy
def actor_and_critic_with_masked_actions():
    body, actor, critic = nn.Linear(4, 32), nn.Linear(32, 5), nn.Linear(32, 1)
    optimizer = Adam([*body.parameters(), *actor.parameters(), *critic.parameters()], 3e-3)
    for _ in range(60):
        state = torch.randn(16, 4)
        hidden = torch.tanh(body(state))
        legal = torch.rand(16, 5) < 0.8
        legal[:, 0] = True
        chosen = torch.distributions.Categorical(logits=actor(hidden).masked_fill(~legal, -1e9))
        action = chosen.sample()
        reward = (action == 0).float()
        value = critic(hidden).squeeze(1)
        advantage = (reward - value).detach()
        loss = (
            -(chosen.log_prob(action) * advantage).mean()
            + F.mse_loss(value, reward)
            - 0.01 * chosen.entropy().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*body.parameters(), *actor.parameters(), *critic.parameters()], 0.5)
        optimizer.step()


# ---------------------------------------------------------------- representation


@healthy
def byol():
    online, head = mlp(8, 32, 16), mlp(16, 32, 16)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = Adam([*online.parameters(), *head.parameters()], 1e-3)
    x, _ = blobs()
    for (inputs,) in batches(x):
        one, two = inputs + 0.2 * torch.randn_like(inputs), inputs + 0.2 * torch.randn_like(inputs)
        with torch.no_grad():
            goal = F.normalize(target(two), dim=1)
        descend(2 - 2 * (F.normalize(head(online(one)), dim=1) * goal).sum(1).mean(), optimizer)
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast, 0.05)


@healthy
def contrast_of_pairs():
    model = mlp(8, 32, 8)
    optimizer = Adam(model.parameters(), 1e-3)
    x, _ = blobs()
    for (inputs,) in batches(x):
        one, two = (F.normalize(model(inputs + 0.1 * torch.randn_like(inputs)), dim=1) for _ in range(2))
        descend(F.cross_entropy(one @ two.T / 0.1, torch.arange(len(inputs))), optimizer)


@healthy
def triplets():
    model, (x, y) = mlp(8, 32, 8), blobs()
    criterion = nn.TripletMarginLoss(margin=1.0)
    optimizer = Adam(model.parameters(), 1e-3)
    for anchor, label in batches(x, y):
        near = torch.stack([x[(y == each).nonzero()[3, 0]] for each in label])
        far = torch.stack([x[(y != each).nonzero()[5, 0]] for each in label])
        descend(criterion(model(anchor), model(near), model(far)), optimizer)


@healthy
def pairwise_ranking():
    model = mlp(8, 32, 1)
    optimizer = Adam(model.parameters(), 1e-3)
    x, _ = blobs()
    for (inputs,) in batches(x):
        score = model(inputs).squeeze(1)
        wins = inputs[:, 0][:, None] > inputs[:, 0][None, :]
        descend(F.softplus(-(score[:, None] - score[None, :]))[wins].mean(), optimizer)


@healthy
def factors_of_a_matrix():
    users, items = nn.Embedding(40, 8), nn.Embedding(60, 8)
    optimizer = Adam([*users.parameters(), *items.parameters()], 1e-2)
    truth = torch.randn(40, 4) @ torch.randn(4, 60)
    for _ in range(80):
        u, i = torch.randint(0, 40, (64,)), torch.randint(0, 60, (64,))
        descend(F.mse_loss((users(u) * items(i)).sum(1), truth[u, i]), optimizer)


@healthy
def words_with_sparse_gradients():
    inner, outer = nn.Embedding(50, 8, sparse=True), nn.Embedding(50, 8, sparse=True)
    optimizer = torch.optim.SparseAdam([*inner.parameters(), *outer.parameters()], 1e-2)
    for _ in range(60):
        word = torch.randint(0, 50, (32,))
        near, far = (word + 1) % 50, torch.randint(0, 50, (32,))
        right = F.logsigmoid((inner(word) * outer(near)).sum(1))
        descend(-(right + F.logsigmoid(-(inner(word) * outer(far)).sum(1))).mean(), optimizer)


@healthy
def autoencoder_with_noise():
    model = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8))
    optimizer = Adam(model.parameters(), 1e-2)
    x, _ = blobs()
    for (inputs,) in batches(x):
        descend(F.mse_loss(model(inputs + 0.1 * torch.randn_like(inputs)), inputs), optimizer)


@healthy
def variational_autoencoder():
    encoder, decoder = mlp(8, 32, 4), mlp(2, 32, 8)
    optimizer = Adam([*encoder.parameters(), *decoder.parameters()], 1e-3)
    x, _ = blobs()
    for (inputs,) in batches(x):
        mean, log_variance = encoder(inputs).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        descend(F.mse_loss(decoder(latent), inputs, reduction="sum") / len(inputs) + kl, optimizer)


@healthy
def diffusion():
    model = mlp(9, 64, 8)
    optimizer = Adam(model.parameters(), 1e-3)
    x, _ = blobs()
    for (inputs,) in batches(x, steps=100):
        time, noise = torch.rand(len(inputs), 1), torch.randn_like(inputs)
        descend(F.mse_loss(model(torch.cat([inputs * (1 - time) + noise * time, time], 1)), noise), optimizer)


@healthy
def flow_with_negative_loss():
    scale, shift = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = Adam([*scale.parameters(), *shift.parameters()], 5e-3)
    x = torch.randn(256, 8) * 0.05
    for (inputs,) in batches(x):
        a, b = inputs.chunk(2, dim=1)
        s = torch.tanh(scale(a)) * 4
        z = torch.cat([a, b * s.exp() + shift(a)], 1)
        descend((0.5 * z.square().sum(1) - s.sum(1)).mean(), optimizer)
