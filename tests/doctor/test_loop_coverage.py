"""Who is trained and who is not: three spellings of each fault, and the loops that resemble them."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, fit, mlp
from torch import nn

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def train(model, optimizer, *, steps=24, loss=F.cross_entropy, data=None):
    fit(model, data, optimizer=optimizer, steps=steps, loss=loss)


class Net(nn.Module):
    def __init__(self, body=None, head=None):
        super().__init__()
        self.body = body or mlp(classes=16)
        self.head = head or nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x).relu())


# ---------------------------------------------------------------- M01


def head_replaced_after_optimizer():
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    model.head = nn.Linear(16, 3)
    train(model, optimizer)


def decoder_forgotten():
    encoder, decoder = mlp(classes=4), mlp(features=4, classes=8)
    opt = Adam(encoder.parameters(), lr=1e-3)
    x, _ = blobs()
    for _ in range(20):
        opt.zero_grad()
        F.mse_loss(decoder(encoder(x)), x).backward()
        opt.step()


def layer_added_after_optimizer():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
    optimizer = Adam(model.parameters())
    model.append(nn.Linear(32, 1))
    x, _ = blobs()
    train(model, optimizer, loss=nn.MSELoss(), data=(x, x[:, :1]))


@pytest.mark.parametrize(
    "spelling", [head_replaced_after_optimizer, decoder_forgotten, layer_added_after_optimizer]
)
def test_parameter_not_optimized(judge, spelling):
    judged = judge(spelling)
    assert judged.ids == ["M01"], judged
    assert judged["M01"].step <= 3


@pytest.mark.parametrize("is_given", [False, True])
def test_a_head_that_comes_later(judge, is_given):
    def train_in_two_phases():
        body, (x, y) = mlp(classes=8), blobs(64)
        optimizer = SGD(body.parameters(), lr=0.05)
        for _ in range(20):
            optimizer.zero_grad()
            body(x).square().mean().backward()
            optimizer.step()
        head = nn.Linear(8, 3)
        if is_given:
            optimizer.add_param_group({"params": head.parameters()})
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(head(body(x)), y).backward()
            optimizer.step()

    assert judge(train_in_two_phases).ids == ([] if is_given else ["M01"])


def test_the_parameters_and_the_line_of_the_optimizer_are_named(judge):
    finding = judge(head_replaced_after_optimizer)["M01"]
    line = head_replaced_after_optimizer.__code__.co_firstlineno + 2
    assert finding.severity == "error"
    assert finding.site == "model.head.weight"  # the old head is another one
    assert finding.source.endswith(f"test_loop_coverage.py:{line}")
    assert f"it was made at test_loop_coverage.py:{line}" in finding.hint


# ---------------------------------------------------------------- M02


def model_copied_after_optimizer():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    model = copy.deepcopy(model)
    train(model, optimizer)


def model_made_again():
    model = Net()
    optimizer = Adam(model.parameters())
    model = Net()
    train(model, optimizer)


def parameters_replaced():
    model = mlp(classes=1)
    opt = SGD(model.parameters(), lr=0.1)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    x, _ = blobs()
    train(model, opt, loss=F.mse_loss, data=(x, x[:, :1]))


@pytest.mark.parametrize("spelling", [model_copied_after_optimizer, model_made_again, parameters_replaced])
def test_optimizer_holds_dead_parameters(judge, spelling):
    judged = judge(spelling)
    assert judged.ids == ["M02"], judged
    assert judged["M02"].step <= 2
    assert "build it after the model was copied" in judged["M02"].hint


def test_an_optimizer_that_is_kept_for_the_next_model(judge):
    """Folds of one data set: each gets a model of its own, and all of them the first one's optimizer."""

    def folds():
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
        model = mlp()
        train(model, optimizer)

    judged = judge(folds)
    assert judged.ids == ["M02"], judged
    assert "build a new one for each new model" in judged["M02"].hint


# ---------------------------------------------------------------- M03


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(16, 16)


class UnusedParameter(Net):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))


class UnusedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
        self.extra = nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8))

    def forward(self, x):
        return self.blocks(x.unsqueeze(1))


@pytest.mark.parametrize("make", [Unused, UnusedParameter, UnusedBlock])
def test_unused_layer(judge, make):
    model = make()
    judged = judge(lambda: train(model, Adam(model.parameters())))
    assert judged.ids == ["M03"], judged
    assert judged["M03"].severity == "warning"
    assert judged["M03"].site in {"spare", "temperature", "extra.0"}


# ---------------------------------------------------------------- M04


class PlainList(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 16), nn.Linear(16, 16)]
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.out(x)


class PlainDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = {"in": nn.Sequential(nn.Linear(8, 16), nn.Tanh())}
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.parts["in"](x))


class MadeInForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(nn.Linear(8, 16)(x).relu())


@pytest.mark.parametrize("make", [PlainList, PlainDict, MadeInForward])
def test_unregistered_module(judge, make):
    model = make()
    judged = judge(lambda: train(model, SGD(model.parameters(), lr=0.1)))
    assert judged.ids == ["M04"], judged
    assert judged["M04"].step <= 3
    told = {PlainList: "PlainList.layers is a plain list", PlainDict: "use nn.ModuleDict"}
    assert told.get(make, "a new Linear is made in every forward") in judged["M04"].hint


# ---------------------------------------------------------------- M05


def all_frozen():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.requires_grad = False
    train(model, optimizer)


def wrong_part_frozen():
    model = Net()
    model.head.requires_grad_(False)
    train(model, Adam(model.head.parameters()))


def frozen_but_for_the_input():
    model = mlp(classes=1)
    model.requires_grad_(False)
    opt = SGD(model.parameters(), lr=0.1)
    x, _ = blobs()
    x.requires_grad_()
    for _ in range(10):
        opt.zero_grad()
        F.mse_loss(model(x), torch.zeros(256, 1)).backward()
        opt.step()


@pytest.mark.parametrize("spelling", [all_frozen, wrong_part_frozen, frozen_but_for_the_input])
def test_nothing_trainable(judge, spelling):
    judged = judge(spelling, error=RuntimeError)
    assert judged.ids[0] == "M05", judged
    assert "requires_grad=False" in judged["M05"].hint


# ---------------------------------------------------------------- L08


class Detached(Net):
    def forward(self, x):
        return self.head(self.body(x).relu().detach())


class WithoutGrad(Net):
    def forward(self, x):
        with torch.no_grad():
            x = self.body(x)
        return self.head(x.relu())


class ThroughNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks[:2]:
            x = x + block(x).relu()
        x = torch.from_numpy(x.detach().numpy())
        for block in self.blocks[2:]:
            x = x + block(x).relu()
        return self.out(self.norm(x))


@pytest.mark.parametrize("make", [Detached, WithoutGrad, ThroughNumpy])
def test_graph_cut(judge, make):
    model = make()
    judged = judge(lambda: train(model, Adam(model.parameters())))
    assert judged.ids == ["L08"], judged
    between = {
        Detached: "between body.2 and head",
        WithoutGrad: "it runs under no_grad between body.2 and head",
    }
    assert between.get(make, "between blocks.1 and blocks.2") in judged["L08"].hint


class Stepped(Net):
    """Its hidden units are on or off: their slope is 0 wherever there is one."""

    def forward(self, x):
        return self.head(torch.round(torch.sigmoid(self.body(x))))


def test_gradients_of_exactly_zero(judge):
    model = Stepped()
    judged = judge(lambda: train(model, Adam(model.parameters())))
    assert judged.ids == ["L08"], judged
    assert judged["L08"].severity == "warning"
    assert "between body.2.weight and head.weight has no slope" in judged["L08"].hint


def test_a_loss_whose_weight_is_zero_for_a_while(judge):
    """The body learns from the second loss alone; what the first one sees of it is detached."""
    model = nn.ModuleDict({"body": mlp(classes=12), "again": nn.Linear(12, 8), "head": nn.Linear(12, 3)})
    x, y = blobs()

    def ramp():
        optimizer = Adam(model.parameters(), lr=1e-3)
        for step in range(24):
            rows = torch.arange(step * 32, step * 32 + 32) % len(x)
            hidden = model["body"](x[rows])
            loss = F.cross_entropy(model["head"](hidden.detach()), y[rows])
            loss = loss + (step > 14) * F.mse_loss(model["again"](hidden), x[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert judge(ramp).ids == []


def test_everything_cut_is_told_at_once(judge):
    model = mlp(classes=1)
    opt = SGD(model.parameters(), lr=0.1)
    x, _ = blobs()

    def loop():
        for _ in range(8):
            opt.zero_grad()
            out = model(x).detach().requires_grad_()
            F.mse_loss(out, x[:, :1]).backward()
            opt.step()

    judged = judge(loop)
    # The loss hangs on a tensor of its own, so the cause is the loss; that nothing in the model learns follows from it.
    assert judged.ids == ["L06"], judged
    assert [each.id for each in judged["L06"].explains] == ["L08"]
    assert judged["L06"].step <= 2


def actor_without_gradients(with_grad):
    actor, critic, (x, _) = mlp(classes=2), mlp(classes=1), blobs(64)
    optimizer = Adam([*actor.parameters(), *critic.parameters()])
    for _ in range(18):
        with torch.set_grad_enabled(with_grad):
            chosen = F.log_softmax(actor(x), 1)[:, 0]
        value = critic(x)[:, 0]
        optimizer.zero_grad()
        ((value - x[:, 0]).square().mean() - (chosen * x[:, 1]).mean()).backward()
        optimizer.step()


@pytest.mark.parametrize("with_grad", [False, True])
def test_a_model_that_runs_under_no_grad_only(judge, with_grad):
    judged = judge(lambda: actor_without_gradients(with_grad))
    assert judged.ids == ([] if with_grad else ["L08"]), judged
    if judged.ids:
        assert judged["L08"].severity == "warning"
        assert "actor.0, actor.2" in judged["L08"].hint


# ---------------------------------------------------------------- right, though it looks like one of these


def frozen_backbone():
    model = Net()
    model.body.requires_grad_(False)
    train(model, SGD(model.head.parameters(), lr=0.1))


def frozen_backbone_in_optimizer():
    model = Net()
    model.body.requires_grad_(False)
    train(model, SGD(model.parameters(), lr=0.1))


def byol():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = mlp(classes=8)
            self.predictor = mlp(classes=8)
            self.target = copy.deepcopy(self.online)

        def forward(self, a, b):
            with torch.no_grad():
                goal = self.target(b)
            return self.predictor(self.online(a)), goal

    model = Pair()
    opt = Adam(model.parameters(), lr=1e-3)
    x, _ = blobs()
    for _ in range(24):
        guess, goal = model(x + torch.randn_like(x), x + torch.randn_like(x))
        opt.zero_grad()
        (2 - 2 * F.cosine_similarity(guess, goal).mean()).backward()
        opt.step()
        with torch.no_grad():
            for slow, fast in zip(model.target.parameters(), model.online.parameters(), strict=True):
                slow.lerp_(fast, 0.01)


def teacher_without_no_grad():
    teacher, student = mlp(layers=3).eval(), mlp()
    opt = SGD(student.parameters(), lr=0.1)
    x, _ = blobs()
    for _ in range(20):
        opt.zero_grad()
        goal = F.softmax(teacher(x), 1)
        F.kl_div(F.log_softmax(student(x), 1), goal, reduction="batchmean").backward()
        opt.step()


def hidden_teacher():
    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.teacher = [mlp(layers=3).requires_grad_(False).eval()]

        def forward(self, x):
            return self.net(x), self.teacher[0](x)

    model = Student()
    opt = SGD(model.parameters(), lr=0.1)
    x, _ = blobs()
    for _ in range(20):
        opt.zero_grad()
        F.mse_loss(*model(x)).backward()
        opt.step()


def hidden_but_optimized():
    model = PlainList()
    hidden = [p for layer in model.layers for p in layer.parameters()]
    train(model, SGD([*model.parameters(), *hidden], lr=0.1))


def optimized_input():
    model = mlp()
    x, y = blobs()
    delta = torch.zeros_like(x, requires_grad=True)
    opt = Adam([delta], lr=0.01)
    for _ in range(20):
        opt.zero_grad()
        (F.cross_entropy(model(x + delta), y) + delta.square().mean()).backward()
        opt.step()


def updated_by_hand():
    model = Net()
    opt = SGD(model.head.parameters(), lr=0.1)
    x, y = blobs()
    for _ in range(20):
        opt.zero_grad()
        model.body.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        for p in model.body.parameters():
            p.data -= 0.1 * p.grad


def no_optimizer():
    model = mlp()
    x, y = blobs()
    for _ in range(20):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)


def master_weights():
    model = mlp().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    opt = SGD(masters, lr=0.1)
    x, y = blobs()
    for _ in range(20):
        model.zero_grad()
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
        opt.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)


def experts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(8)])
            self.gate = nn.Linear(8, 8)
            self.out = nn.Linear(8, 3)

        def forward(self, x):
            best = self.gate(x).softmax(-1)
            y = torch.zeros_like(x)
            for i, expert in enumerate(self.experts[:5]):  # the others are never chosen in a short run
                rows = best.argmax(-1) % 5 == i
                if rows.any():
                    y[rows] = expert(x[rows]) * best[rows, i : i + 1]
            return self.out(y)

    model = Experts()
    train(model, Adam(model.parameters()), steps=40)


def heads_in_turns():
    body, heads = mlp(classes=16), nn.ModuleList([nn.Linear(16, 3) for _ in range(3)])
    opt = Adam([*body.parameters(), *heads.parameters()], lr=1e-3)
    x, y = blobs()
    for _, head in zip(range(24), itertools.cycle(heads)):
        opt.zero_grad()
        F.cross_entropy(head(body(x)), y).backward()
        opt.step()


def phases():
    model = Net()
    model.body.requires_grad_(False)
    train(model, SGD(model.head.parameters(), lr=0.1))
    model.body.requires_grad_(True)
    train(model, SGD(model.parameters(), lr=0.01))


def lora():
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = mlp().requires_grad_(False)
            self.a = nn.Parameter(torch.randn(4, 8) / 8)
            self.b = nn.Parameter(torch.zeros(3, 4))

        def forward(self, x):
            return self.base(x) + x @ self.a.T @ self.b.T

    model = Lora()
    train(model, Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2))


def gan_with_critic_in_graph():
    make, critic = mlp(features=4, classes=8), mlp(classes=1)
    opt_g, opt_d = Adam(make.parameters()), Adam(critic.parameters())
    x, _ = blobs()
    for _ in range(12):
        opt_d.zero_grad()
        (critic(make(torch.randn(256, 4)).detach()).mean() - critic(x).mean()).backward()
        opt_d.step()
        opt_g.zero_grad()
        (-critic(make(torch.randn(256, 4))).mean()).backward()
        opt_g.step()


def sparse_embedding():
    model = nn.Sequential(nn.EmbeddingBag(100, 8, sparse=True), nn.Linear(8, 3))
    sparse = torch.optim.SparseAdam(model[0].parameters())
    dense = Adam(model[1].parameters())
    for _ in range(20):
        sparse.zero_grad()
        dense.zero_grad()
        F.cross_entropy(model(torch.randint(0, 100, (16, 5))), torch.randint(0, 3, (16,))).backward()
        sparse.step()
        dense.step()


RIGHT = [
    frozen_backbone, frozen_backbone_in_optimizer, byol, teacher_without_no_grad, hidden_teacher, hidden_but_optimized,
    optimized_input, updated_by_hand, no_optimizer, master_weights, experts, heads_in_turns, phases, lora,
    gan_with_critic_in_graph, sparse_embedding,
]  # fmt: skip


@pytest.mark.parametrize("loop", RIGHT)
def test_right_loops(judge, loop):
    judged = judge(loop)
    assert judged.ids == [], judged
