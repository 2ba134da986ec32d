"""Trainings that look strange and are right: the doctor has nothing to say about any of them."""

import copy
import itertools

import torch
import torch.nn.functional as F
from loops import blobs, fit, mlp
from torch import nn

Adam, SGD = torch.optim.Adam, torch.optim.SGD
LOOPS = {}


def healthy(function):
    """Add a loop to the list."""
    LOOPS[function.__name__] = function
    return function


def batches(x, *others, size=32, steps=60):
    """Yield so many batches, round and round."""
    for step in range(steps):
        rows = torch.arange(step * size, (step + 1) * size) % len(x)
        yield tuple(each[rows] for each in (x, *others))


def descend(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


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


# ---------------------------------------------------------------- parts that do not train


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


@healthy
def low_rank_adapters():
    body = mlp(layers=3)
    fit(body, steps=20)
    model = nn.Sequential(*(Lora(m) if isinstance(m, nn.Linear) else m for m in body))
    trained = [p for p in model.parameters() if p.requires_grad]
    fit(model, steps=60, optimizer=Adam(trained, 1e-2))


@healthy
def head_that_starts_at_zero():
    model = mlp(layers=3)
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    fit(model, steps=60)


@healthy
def frozen_body_and_its_statistics():
    body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU()).requires_grad_(False)
    model = nn.Sequential(body, nn.Linear(32, 3))
    body.eval()
    fit(model, steps=60, optimizer=SGD(model[1].parameters(), 0.1))


@healthy
def teacher_and_student():
    teacher = fit(mlp(hidden=64), steps=30).eval().requires_grad_(False)
    student = mlp(hidden=16)
    optimizer = Adam(student.parameters(), 1e-2)
    x, y = blobs()
    for inputs, targets in batches(x, y):
        with torch.no_grad():
            goal = F.softmax(teacher(inputs) / 2, 1)
        scores = student(inputs)
        soft = F.kl_div(F.log_softmax(scores / 2, 1), goal, reduction="batchmean")
        descend(soft + 0.1 * F.cross_entropy(scores, targets), optimizer)


@healthy
def layers_unfrozen_one_by_one():
    model, (x, y) = mlp(layers=3), blobs()
    model[0].requires_grad_(False)
    optimizer = SGD(model.parameters(), 0.05)
    for step, (inputs, targets) in enumerate(batches(x, y)):
        if step == 30:
            model[0].requires_grad_(True)
        descend(F.cross_entropy(model(inputs), targets), optimizer)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(mlp(8, 16, 3) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(1).topk(1)
        out = torch.zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = (chosen[:, 0] == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows])
        return out


@healthy
def mixture_of_experts():
    model = Experts()
    fit(model, steps=60, optimizer=Adam(model.parameters(), 1e-2))


# ---------------------------------------------------------------- steps of another kind


@healthy
def accumulated_gradients():
    model, (x, y) = mlp(), blobs()
    optimizer = SGD(model.parameters(), 0.2)
    for step, (inputs, targets) in enumerate(batches(x, y, size=8, steps=160)):
        (F.cross_entropy(model(inputs), targets) / 4).backward()
        if step % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@healthy
def sharpness_aware():
    model, (x, y) = mlp(), blobs()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            scale = 0.05 / torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * scale for p in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()


@healthy
def lbfgs_with_closure():
    model, (x, y) = mlp(), blobs()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(15):
        optimizer.step(closure)


@healthy
def weights_updated_by_hand():
    model, (x, y) = mlp(), blobs()
    for inputs, targets in batches(x, y):
        loss = F.cross_entropy(model(inputs), targets)
        for parameter, grad in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.data -= 0.1 * grad


@healthy
def averaged_weights():
    model, (x, y) = mlp(), blobs()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = SGD(model.parameters(), 0.1)
    for step, (inputs, targets) in enumerate(batches(x, y)):
        descend(F.cross_entropy(model(inputs), targets), optimizer)
        if step > 30:
            average.update_parameters(model)


@healthy
def moving_average_used_for_evaluation():
    model, (x, y) = mlp(), blobs()
    slow = copy.deepcopy(model).requires_grad_(False)
    optimizer = Adam(model.parameters(), 1e-2)
    criterion = nn.CrossEntropyLoss()
    for step, (inputs, targets) in enumerate(batches(x, y)):
        descend(criterion(model(inputs), targets), optimizer)
        with torch.no_grad():
            for theirs, ours in zip(slow.parameters(), model.parameters(), strict=True):
                theirs.lerp_(ours, 0.1)
            if step % 10 == 9:
                criterion(slow(x), y)


def scheduled(make, lr=0.1, optimizer=SGD, steps=80):
    model = mlp()
    chosen = optimizer(model.parameters(), lr=lr)
    schedule = make(chosen)
    fit(model, optimizer=chosen, steps=steps, after=lambda _: schedule.step())


@healthy
def warm_up_from_zero_and_cosine():
    scheduled(
        lambda o: torch.optim.lr_scheduler.LambdaLR(
            o, lambda s: min(s / 20, 1) * (1 + torch.cos(torch.tensor(s / 80 * 3.14159)).item()) / 2
        )
    )


@healthy
def one_cycle():
    scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=81))


@healthy
def warm_restarts():
    scheduled(lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 20))


@healthy
def search_for_a_rate():
    scheduled(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 1.15), lr=1e-6, steps=70)


@healthy
def other_optimizers():
    for make in (torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.NAdam):
        model = mlp()
        fit(model, optimizer=make(model.parameters()), steps=20)


@healthy
def new_model_in_each_fold():
    x, y = blobs()
    for fold in range(3):
        keep = torch.arange(len(x)) % 3 != fold
        fit(mlp(), (x[keep], y[keep]), steps=20)


@healthy
def learning_to_learn():
    meta = mlp(1, 16, 1, nn.Tanh)
    outer = SGD(meta.parameters(), 0.1)
    for _ in range(25):
        phase = torch.rand(1) * 3
        learner = copy.deepcopy(meta)
        inner = SGD(learner.parameters(), 0.02)
        for _ in range(3):
            x = torch.rand(16, 1) * 4
            descend(F.mse_loss(learner(x), torch.sin(x + phase)), inner)
        outer.zero_grad()
        for ours, theirs in zip(meta.parameters(), learner.parameters(), strict=True):
            ours.grad = ours.data - theirs.data
        outer.step()


@healthy
def scaler_that_finds_its_scale():
    model, (x, y) = mlp(), blobs()
    optimizer, scaler = SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for step, (inputs, targets) in enumerate(batches(x, y)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        if step in (0, 1, 2, 30):
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()


@healthy
def bfloat16_by_autocast():
    model, (x, y) = mlp(), blobs()
    optimizer = Adam(model.parameters(), 1e-3)
    for inputs, targets in batches(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        descend(loss, optimizer)


# ---------------------------------------------------------------- sequences and graphs


def text(samples=128, length=12, vocabulary=20):
    start = torch.randint(0, vocabulary, (samples, 1))
    return (start + torch.arange(length)) % vocabulary


class Reader(nn.Module):
    """A small transformer; ``causal`` masks the future with minus infinity."""

    def __init__(self, vocabulary=20, causal=True):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, 32), nn.Parameter(torch.randn(12, 32) * 0.02)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, vocabulary)
        self.causal = causal

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if self.causal else None
        return self.head(self.layer(self.embed(ids) + self.place[: ids.shape[1]], src_mask=mask))


@healthy
def causal_language_model():
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for (ids,) in batches(text(), size=16):
        descend(F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()), optimizer)


@healthy
def masked_language_model():
    model = Reader(21, causal=False)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for (ids,) in batches(text(), size=16):
        hidden = torch.rand(ids.shape) < 0.15
        hidden[:, 0] = True
        targets = ids.masked_fill(~hidden, -100)
        descend(
            F.cross_entropy(model(ids.masked_fill(hidden, 20)).flatten(0, 1), targets.flatten()), optimizer
        )


@healthy
def padded_sequences_in_an_lstm():
    embed, cell, head = (
        nn.Embedding(21, 16, padding_idx=0),
        nn.LSTM(16, 32, batch_first=True),
        nn.Linear(32, 3),
    )
    optimizer = Adam([*embed.parameters(), *cell.parameters(), *head.parameters()], 1e-2)
    for (ids,) in batches(text() + 1, size=16):
        lengths = torch.randint(3, 12, (16,))
        packed = nn.utils.rnn.pack_padded_sequence(
            embed(ids), lengths, batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = cell(packed)
        descend(F.cross_entropy(head(hidden[-1]), ids[:, 0] % 3), optimizer)


@healthy
def sorted_time_series():
    wave = torch.sin(torch.arange(600) / 10)
    x = torch.stack([wave[i : i + 20] for i in range(500)])
    y = wave[20:520, None]
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    fit(model, (x, y), loss=F.mse_loss, steps=80, optimizer=Adam(model.parameters(), 1e-2))


@healthy
def graph_in_one_batch():
    links = (torch.rand(60, 60) < 0.1).float() + torch.eye(60)
    links = ((links + links.T) > 0).float()
    links = links / links.sum(1, keepdim=True)
    x, y = blobs(60)
    one, two = nn.Linear(8, 16), nn.Linear(16, 3)
    known = torch.rand(60) < 0.5
    optimizer = Adam([*one.parameters(), *two.parameters()], 1e-2)
    for _ in range(80):
        out = links @ two(F.relu(links @ one(x)))
        descend(F.cross_entropy(out[known], y[known]), optimizer)


# ---------------------------------------------------------------- odd losses and data


@healthy
def rare_positives():
    x, _ = blobs(512)
    y = (x[:, :1] > 3.2).float()
    model = mlp(8, 32, 1)
    nn.init.constant_(model[-1].bias, -3.0)
    fit(
        model,
        (x, y),
        loss=nn.BCEWithLogitsLoss(pos_weight=torch.tensor(10.0)),
        steps=80,
        optimizer=Adam(model.parameters(), 1e-3),
    )


@healthy
def smoothed_labels_and_mixed_samples():
    model, (x, y) = mlp(), blobs()
    optimizer = SGD(model.parameters(), 0.1)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for inputs, targets in batches(x, y):
        share, order = torch.rand(()), torch.randperm(len(inputs))
        scores = model(share * inputs + (1 - share) * inputs[order])
        descend(
            share * criterion(scores, targets) + (1 - share) * criterion(scores, targets[order]), optimizer
        )


@healthy
def summed_loss():
    fit(mlp(), loss=lambda out, y: F.cross_entropy(out, y, reduction="sum"), lr=3e-3, steps=60)


@healthy
def perfect_fit():
    x, _ = blobs()
    fit(nn.Linear(8, 1), (x, x @ torch.randn(8, 1)), loss=F.mse_loss, lr=0.01, steps=200)


@healthy
def four_points():
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    y = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    fit(
        model,
        (x, y),
        batch=4,
        loss=F.binary_cross_entropy_with_logits,
        steps=200,
        optimizer=Adam(model.parameters(), 0.05),
    )


@healthy
def quantiles():
    x, _ = blobs()
    levels = torch.tensor([0.1, 0.5, 0.9])

    def pinball(out, y):
        miss = y - out
        return torch.maximum(levels * miss, (levels - 1) * miss).mean()

    model = mlp()
    fit(
        model,
        (x, x[:, :1] + torch.randn(len(x), 1)),
        loss=pinball,
        steps=60,
        optimizer=Adam(model.parameters(), 1e-2),
    )


@healthy
def counts():
    x, _ = blobs()
    y = torch.poisson((x[:, :1] * 0.3).exp())
    model = mlp(8, 32, 1)
    fit(model, (x, y), loss=nn.PoissonNLLLoss(), steps=60, optimizer=Adam(model.parameters(), 1e-2))


@healthy
def physics_from_a_derivative():
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = Adam(model.parameters(), 1e-2)
    for _ in range(60):
        t = torch.rand(32, 1, requires_grad=True)
        u = model(t)
        (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        start = model(torch.zeros(1, 1)) - 1
        descend((slope + u).square().mean() + start.square().mean(), optimizer)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Binary(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, x):
        return self.two(Sign.apply(self.one(x)))


@healthy
def binary_activations():
    model = Binary()
    fit(model, steps=60, optimizer=Adam(model.parameters(), 1e-3))


@healthy
def several_tasks():
    body, heads = nn.Linear(8, 32), nn.ModuleDict({"kind": nn.Linear(32, 3), "size": nn.Linear(32, 1)})
    optimizer = Adam([*body.parameters(), *heads.parameters()], 1e-2)
    x, y = blobs()
    for step, (inputs, targets) in enumerate(batches(x, y)):
        hidden = F.gelu(body(inputs))
        if step % 2:
            descend(F.cross_entropy(heads["kind"](hidden), targets), optimizer)
        else:
            descend(F.mse_loss(heads["size"](hidden), inputs[:, :1]), optimizer)


@healthy
def images_in_a_residual_net():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
            nn.init.zeros_(self.norm.weight)

        def forward(self, x):
            return F.relu(x + self.norm(self.conv(x)))

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        Block(),
        Block(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    y = torch.randint(0, 2, (64,))
    x = torch.randn(64, 3, 8, 8) + y[:, None, None, None]
    fit(model, (x, y), batch=16, lr=0.05, steps=50)


@healthy
def validation_that_stays_level():
    model, (x, y) = mlp(), blobs(512)
    criterion = nn.CrossEntropyLoss()
    optimizer = Adam(model.parameters(), 1e-3)
    for step, (inputs, targets) in enumerate(batches(x[:256], y[:256], steps=100)):
        descend(criterion(model(inputs), targets), optimizer)
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                criterion(model(x[256:]), y[256:])
            model.train()


@healthy
def endless_loader_with_workers_of_its_own():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            generator = torch.Generator().manual_seed(0)
            while True:
                x = torch.randn(8, generator=generator)
                yield x, x[:3].argmax()

    model = mlp()
    optimizer = Adam(model.parameters(), 1e-2)
    for x, y in itertools.islice(torch.utils.data.DataLoader(Stream(), batch_size=16), 60):
        descend(F.cross_entropy(model(x), y), optimizer)
