"""Train and eval mode, dropout and batch normalisation: three spellings of each fault, and loops that resemble them."""

import pytest
import torch
import torch.nn.functional as F
from loops import blobs, mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SGD, Adam = torch.optim.SGD, torch.optim.Adam
X, Y = blobs(256)
X_VAL, Y_VAL = blobs(128, seed=7)


def net(*extra):
    return nn.Sequential(nn.Linear(8, 32), *(extra or (nn.BatchNorm1d(32),)), nn.ReLU(), nn.Linear(32, 3))


class Functional(nn.Module):
    """Dropout as a function, rightly switched by the mode."""

    def __init__(self, dropout=lambda self, x: F.dropout(x, 0.3, self.training)):
        super().__init__()
        self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 3)
        self.dropout = dropout

    def forward(self, x):
        return self.head(self.dropout(self, self.body(x).relu()))


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, x):
        return self.head(F.dropout(self.body(x).relu(), 0.3, training=self.training))


def epochs(model, *, count=3, size=32, optimizer=None, before=None, evaluate=None, x=X, y=Y):
    """Train; ``before(model)`` runs at the start of every epoch, ``evaluate(model)`` at its end."""
    optimizer = optimizer or Adam(model.parameters(), lr=1e-2)
    for _ in range(count):
        if before is not None:
            before(model)
        for i in range(0, len(x), size):
            optimizer.zero_grad()
            F.cross_entropy(model(x[i : i + size]), y[i : i + size]).backward()
            optimizer.step()
        if evaluate is not None:
            evaluate(model)


def check(model, *, mode=None, graph=False, size=32, x=X_VAL, y=Y_VAL):
    """Return the loss on other data."""
    if mode is not None:
        model.train(mode)
    with torch.set_grad_enabled(graph):
        losses = [F.cross_entropy(model(x[i : i + size]), y[i : i + size]) for i in range(0, len(x), size)]
    return float(sum(losses).detach()) / len(losses)


def eval_once(model):
    check(model, mode=False)


def eval_and_back(model):
    check(model, mode=False)
    model.train()


# ---------------------------------------------------------------- M06

EVAL_TRAINING = {
    "never switched back": lambda: epochs(net(), evaluate=eval_once),
    "functional dropout": lambda: epochs(Reading(), evaluate=eval_once, optimizer=None),
    "transformer layer": lambda: epochs(
        nn.Sequential(nn.Unflatten(1, (1, 8)), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(),
                      nn.Linear(8, 3)), evaluate=eval_once
    ),
    "from the start": lambda: epochs(net(nn.Dropout(0.2)).eval()),
}  # fmt: skip


@pytest.mark.parametrize("spelling", EVAL_TRAINING)
def test_training_in_eval_mode(judge, spelling):
    judged = judge(EVAL_TRAINING[spelling])
    assert judged.ids == ["M06"], judged
    assert judged["M06"].severity == ("warning" if spelling == "from the start" else "error")
    assert judged["M06"].step == (0 if spelling == "from the start" else 8)
    assert "model.train()" in judged["M06"].hint


def test_a_mode_that_nothing_asks_for_is_no_fault(judge):
    judged = judge(lambda: epochs(mlp(), evaluate=eval_once))
    assert judged.ids == [], judged


# ---------------------------------------------------------------- M07


def loader_validation(model):
    with torch.no_grad():
        for x, y in DataLoader(TensorDataset(X_VAL, Y_VAL), 32):
            F.cross_entropy(model(x), y)


TRAIN_VALIDATION = {
    "slices": lambda: epochs(net(), evaluate=check),
    "loader": lambda: epochs(net(nn.Dropout(0.4)), evaluate=loader_validation),
    "all at once": lambda: epochs(Reading(), count=4, evaluate=lambda m: check(m, size=128)),
}


@pytest.mark.parametrize("spelling", TRAIN_VALIDATION)
def test_validation_in_train_mode(judge, spelling):
    judged = judge(TRAIN_VALIDATION[spelling])
    assert judged.ids == ["M07"], judged
    assert "test_loop_modes.py:" in judged["M07"].source


def new_batch(*, has_loss):
    """Give the model one batch that nobody has seen, and compute a loss of it or not."""

    def run(model):
        x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
        with torch.no_grad():
            scores = model(x)
            if has_loss:
                F.cross_entropy(scores, y)

    return run


@pytest.mark.parametrize(("has_loss", "ids"), [(True, ["M07"]), (False, [])])
def test_one_new_batch_in_each_validation(judge, has_loss, ids):
    judged = judge(lambda: epochs(net(nn.Dropout(0.2)), count=5, evaluate=new_batch(has_loss=has_loss)))
    assert judged.ids == ids, judged
    assert all(judged[id].step == 8 for id in ids)


# ---------------------------------------------------------------- M08


def always_dropout(_self, x):
    return F.dropout(x, p=0.3)


def fresh_dropout(_self, x):
    return nn.Dropout(0.3)(x)


def attention_dropout(_self, x):
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.2)[:, 0]


@pytest.mark.parametrize("dropout", [always_dropout, fresh_dropout, attention_dropout])
def test_dropout_in_eval(judge, dropout):
    judged = judge(lambda: epochs(Functional(dropout), evaluate=eval_and_back))
    assert judged.ids == ["M08"], judged
    assert judged["M08"].evidence["p"] in (0.3, 0.2)
    line = dropout.__code__.co_firstlineno + 1
    assert judged["M08"].source.endswith(f"test_loop_modes.py:{line}")


def written_out(_self, x):
    return x * (torch.rand_like(x) > 0.3) / 0.7


def whole_rows(_self, x):
    return x * (x.new_empty(len(x), 1).bernoulli_(0.7) / 0.7)


def floored(_self, x):
    return x * (0.7 + torch.rand(len(x), 1)).floor_() / 0.7


def scaled_first(_self, x):
    mask = torch.bernoulli(torch.full_like(x, 0.7)).div_(0.7)
    return mask * x


def scaled_before(_self, x):
    return (x / 0.7) * (torch.rand_like(x) < 0.7)


@pytest.mark.parametrize("dropout", [written_out, whole_rows, floored, scaled_first, scaled_before])
def test_dropout_that_is_written_out(judge, dropout):
    judged = judge(lambda: epochs(Functional(dropout), count=3, evaluate=eval_and_back))
    assert judged.ids == ["M08"], judged
    assert judged["M08"].severity == "warning"
    assert judged["M08"].evidence["p"] == pytest.approx(0.3, abs=0.001)
    assert judged["M08"].source.startswith(__file__)


def in_training(self, x):
    return x * (torch.rand_like(x) > 0.3) / 0.7 if self.training else x


def hidden_parts(_self, x):
    """As masked models hide what they have to find: nothing is made larger for it."""
    return x * (torch.rand_like(x) > 0.3)


def sampled(_self, x):
    return torch.bernoulli(torch.sigmoid(x)) * 2 + x


@pytest.mark.parametrize("dropout", [in_training, hidden_parts, sampled])
def test_random_numbers_in_eval_that_are_no_dropout(judge, dropout):
    assert judge(lambda: epochs(Functional(dropout), count=3, evaluate=eval_and_back)).ids == []


def test_dropout_that_is_written_out_in_a_model_that_is_never_evaluated(judge):
    assert judge(lambda: epochs(Functional(written_out), count=3)).ids == []


# ---------------------------------------------------------------- M16

EXTREME = {
    "module": lambda: epochs(net(nn.Dropout(0.95)), count=1),
    "function": lambda: epochs(Functional(lambda self, x: F.dropout(x, 0.9, self.training)), count=1),
    "attention": lambda: epochs(
        nn.Sequential(nn.Unflatten(1, (1, 8)), nn.TransformerEncoderLayer(8, 2, 16, 0.92, batch_first=True),
                      nn.Flatten(), nn.Linear(8, 3)), count=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("spelling", EXTREME)
def test_extreme_dropout(judge, spelling):
    judged = judge(EXTREME[spelling])
    assert judged.ids == ["M16"], judged
    assert judged["M16"].step == 0


# ---------------------------------------------------------------- M19


class FunctionalNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, x):
        return self.head(F.batch_norm(self.body(x), None, None, training=True))


FEW_VALUES = {
    "two samples": lambda: epochs(net(), count=1, size=2, x=X[:24], y=Y[:24]),
    "function": lambda: epochs(FunctionalNorm(), count=1, size=2, x=X[:24], y=Y[:24]),
    "pooled to one pixel": lambda: epochs(
        nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 8, 2), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 3)),
        count=1, size=2, x=X[:24], y=Y[:24],
    ),
    "one sample": lambda: epochs(net(), count=1, size=1),
}  # fmt: skip


@pytest.mark.parametrize("spelling", FEW_VALUES)
def test_batchnorm_on_tiny_batches(judge, spelling):
    judged = judge(FEW_VALUES[spelling], error=ValueError)
    assert judged.ids == ["M19"], judged
    assert judged["M19"].step <= 2


# ---------------------------------------------------------------- M22 and T02


SPECTRAL = {
    "linear": lambda make: nn.Sequential(make(nn.Linear(8, 32)), nn.ReLU(), nn.Linear(32, 3)),
    "convolution": lambda make: nn.Sequential(
        nn.Unflatten(1, (2, 4)), make(nn.Conv1d(2, 6, 3)), nn.Flatten(), nn.ReLU(), nn.Linear(12, 3)
    ),
    "last layer": lambda make: nn.Sequential(mlp(classes=16), nn.Tanh(), make(nn.Linear(16, 3))),
}


def spectral(form, make):
    model = SPECTRAL[form](make)
    check(model, mode=False)
    epochs(model.train(), count=1)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated")
@pytest.mark.parametrize("form", SPECTRAL)
def test_spectral_norm_before_training(judge, form):
    judged = judge(lambda: spectral(form, torch.nn.utils.spectral_norm))
    assert judged.ids == ["M22"], judged
    assert judged["M22"].site in ("0", "1", "2")
    assert judge(lambda: spectral(form, torch.nn.utils.parametrizations.spectral_norm)).ids == []


def accumulated_evaluation(model):
    model.eval()
    total = 0.0
    for i in range(0, 128, 8):
        total = total + F.cross_entropy(model(X_VAL[i : i + 8]), Y_VAL[i : i + 8])
    model.train()


GRAPH_IN_EVAL = {
    "summed loss": lambda: epochs(net(), evaluate=accumulated_evaluation),
    "short passes": lambda: epochs(
        mlp(), count=4, evaluate=lambda m: (check(m, mode=False, graph=True), m.train())
    ),
    "kept outputs": lambda: epochs(
        Reading(), evaluate=lambda m: ([m.eval()(X_VAL[i : i + 8]) for i in range(0, 128, 8)], m.train())
    ),
}


@pytest.mark.parametrize("spelling", GRAPH_IN_EVAL)
def test_evaluation_builds_graph(judge, spelling):
    judged = judge(GRAPH_IN_EVAL[spelling])
    assert judged.ids == ["T02"], judged


# ---------------------------------------------------------------- right, though it looks like one of these


def frozen_batchnorm(model):
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()


def monte_carlo():
    model = net(nn.Dropout(0.3))

    def evaluate(model):
        model.eval()
        model[1].train()
        with torch.no_grad():
            for i in range(0, 128, 32):
                torch.stack([model(X_VAL[i : i + 32]) for _ in range(5)]).mean(0)
        model.train()

    epochs(model, evaluate=evaluate)


def monte_carlo_in_train_mode():
    def evaluate(model):
        with torch.no_grad():
            for i in range(0, 128, 32):
                torch.stack([model(X_VAL[i : i + 32]) for _ in range(5)]).mean(0)

    epochs(net(nn.Dropout(0.3)), evaluate=evaluate)


def refreshed_statistics():
    def evaluate(model):
        torch.optim.swa_utils.update_bn(DataLoader(TensorDataset(X, Y), 32), model)

    epochs(net(), evaluate=evaluate)


def generator():
    make = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
    critic = mlp(classes=1)
    opt_g, opt_d = Adam(make.parameters()), Adam(critic.parameters())
    bce = nn.BCEWithLogitsLoss()
    fixed = torch.randn(64, 4)
    for step in range(20):
        with torch.no_grad():
            fake = make(torch.randn(32, 4))
        opt_d.zero_grad()
        (bce(critic(X[:32]), torch.ones(32, 1)) + bce(critic(fake), torch.zeros(32, 1))).backward()
        opt_d.step()
        opt_g.zero_grad()
        bce(critic(make(torch.randn(32, 4))), torch.ones(32, 1)).backward()
        opt_g.step()
        if step % 2:
            with torch.no_grad():
                make(fixed)


def pseudo_labels():
    model = net(nn.Dropout(0.2))
    opt = Adam(model.parameters(), lr=1e-3)
    for _ in range(30):
        rows = torch.randint(0, 256, (32,))
        with torch.no_grad():
            goal = model(X[rows] + 0.1 * torch.randn(32, 8)).softmax(1)
        opt.zero_grad()
        loss = F.cross_entropy(model(X[rows]), Y[rows]) + 0.1 * F.cross_entropy(model(X[rows]), goal)
        loss.backward()
        opt.step()


def adversarial_in_eval_mode():
    model = net(nn.BatchNorm1d(32), nn.Dropout(0.2))
    opt = SGD(model.parameters(), lr=0.05)
    for i in range(0, 256, 16):
        model.eval()
        x = X[i : i + 16].clone().requires_grad_()
        F.cross_entropy(model(x), Y[i : i + 16]).backward()
        bad = (x + 0.1 * x.grad.sign()).detach()
        model.train()
        opt.zero_grad()
        F.cross_entropy(model(bad), Y[i : i + 16]).backward()
        opt.step()


def linear_probe():
    body, head = net().eval().requires_grad_(False), nn.Linear(3, 3)
    model = nn.Sequential(body, head).eval()
    epochs(model, optimizer=SGD(head.parameters(), lr=0.1))


def saliency_on_test_data():
    def evaluate(model):
        model.eval()
        for i in range(0, 128, 8):
            x = X_VAL[i : i + 8].clone().requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
        model.train()

    epochs(net(), evaluate=evaluate)


def gradients_in_chunks():
    """Large contrastive batches: first all representations without gradients, then again with them."""
    model = net()
    opt = Adam(model.parameters(), lr=1e-3)
    for _ in range(8):
        with torch.no_grad():
            for i in range(0, 128, 32):
                model(X[i : i + 32])
        opt.zero_grad()
        for i in range(0, 128, 32):
            F.cross_entropy(model(X[i : i + 32]), Y[i : i + 32]).backward()
        opt.step()


def small_last_batch():
    epochs(net(), x=X[:98], y=Y[:98])


def teacher_in_eval_mode():
    teacher, student = net(nn.Dropout(0.3)).eval(), net()
    opt = Adam(student.parameters())
    for _ in range(24):
        opt.zero_grad()
        F.mse_loss(student(X[:32]), teacher(X[:32]).detach()).backward()
        opt.step()


def sampled_from_a_language_model():
    class Speaker(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.drop, self.out = nn.Embedding(20, 16), nn.Dropout(0.1), nn.Linear(16, 20)

        def forward(self, ids):
            return self.out(self.drop(self.embed(ids)))

    model = Speaker()
    opt = Adam(model.parameters())
    for _ in range(10):
        ids = torch.randint(0, 20, (8, 12))
        opt.zero_grad()
        F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:]).backward()
        opt.step()
        with torch.no_grad():
            text = torch.zeros(1, 1, dtype=torch.long)
            for _ in range(5):
                text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)


RIGHT = {
    "eval and back": lambda: epochs(net(), evaluate=eval_and_back),
    "train at the start of an epoch": lambda: epochs(net(), before=nn.Module.train, evaluate=eval_once),
    "functional dropout": lambda: epochs(Functional(), evaluate=eval_and_back),
    "frozen batch norm": lambda: epochs(net(), before=frozen_batchnorm, evaluate=eval_once),
    **{
        loop.__name__: loop
        for loop in (
            monte_carlo, monte_carlo_in_train_mode, refreshed_statistics, generator, pseudo_labels,
            adversarial_in_eval_mode, linear_probe, saliency_on_test_data, gradients_in_chunks, small_last_batch,
            teacher_in_eval_mode, sampled_from_a_language_model,
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("loop", RIGHT)
def test_right_modes(judge, loop):
    judged = judge(RIGHT[loop])
    assert judged.ids == [], judged
