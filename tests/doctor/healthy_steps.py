"""Frozen parts and steps of another kind: trainings that look strange and are right."""

import copy

import torch
import torch.nn.functional as F
from healthy_loops import batches, descend, healthy
from loops import blobs, fit, mlp
from torch import nn

Adam, SGD = torch.optim.Adam, torch.optim.SGD


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


@healthy
def phases_and_then_an_optimizer_for_each_parameter():
    model = mlp()
    for lr in (1e-2, 3e-3, 1e-3):
        fit(model, steps=20, optimizer=torch.optim.AdamW(model.parameters(), lr))
    own = {p: SGD([p], 1e-3) for p in model.parameters()}

    def step(parameter):
        own[parameter].step()
        own[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    x, y = blobs()
    for inputs, targets in batches(x, y):
        F.cross_entropy(model(inputs), targets).backward()
    for handle in handles:
        handle.remove()


@healthy
def four_phases_of_one_model():
    model = mlp()
    fit(model, steps=20, optimizer=Adam(model.parameters(), 1e-2))
    fit(model, steps=20, optimizer=SGD(model.parameters(), 1e-2))
    fit(model, steps=20, optimizer=Adam(model.parameters(), 1e-3))
    fit(model, steps=20, optimizer=SGD(model.parameters(), 1e-3))
