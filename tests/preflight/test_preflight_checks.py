"""Each check of the rehearsal on a model with the fault it is for, and on its healthy twin."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clew
from clew.errors import UsageError

X, Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def check(name, model, batch=(X, Y), *, lr=1e-2, loss_fn=F.cross_entropy, optimizer=None, **more):
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    return clew.preflight(model, batch, loss_fn=loss_fn, optimizer=optimizer, only=name, **more)[name]


def mlp(*, classes=3, inner=()):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *inner, nn.Linear(16, classes))


class Through(nn.Module):
    """A model with a function of one's own between its layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(8, 16), nn.Linear(16, 3), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


# ------------------------------------------------------------------------ learning


def test_one_batch():
    assert check("one-batch", mlp()).status == "ok"
    broken = check("one-batch", nn.Linear(9, 3))
    assert broken.status == "failed"
    assert "RuntimeError" in broken.text


def test_what_follows_is_not_checked_when_one_batch_fails():
    report = clew.preflight(nn.Linear(9, 3), (X, Y), loss_fn=F.cross_entropy)
    assert report.named("failed") == ["one-batch"]
    assert {each.text for each in report.checks[1:]} == {"one batch does not go through"}
    assert (report.is_ready, report.exit_code) == (False, 2)


@pytest.mark.parametrize(
    ("loss_fn", "scale", "target"),
    [
        (F.cross_entropy, 100.0, Y),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), 100.0, F.one_hot(Y, 3).float()),
        (nn.MSELoss(), 1.0, 50 + torch.randn(16, 3)),
    ],
)
def test_first_loss_far_from_chance(loss_fn, scale, target):
    model = mlp()
    with torch.no_grad():
        model[-1].weight.mul_(scale)
    found = check("initial-loss", model, (X, target), loss_fn=loss_fn)
    assert found.status == "warning"
    assert found.evidence["loss"] > 2 * found.evidence["expected"]


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (F.cross_entropy, Y),
        (nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum"), Y),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), F.one_hot(Y, 3).float()),
        (lambda output, y: F.nll_loss(output.log_softmax(1), y), Y),
        (nn.HuberLoss(), torch.randn(16, 3)),
        (lambda output, _: output.square().mean(), Y),
    ],
)
def test_first_loss_as_expected(loss_fn, target):
    assert check("initial-loss", mlp(), (X, target), loss_fn=loss_fn).status == "ok"


def test_first_loss_is_finite():
    assert check("initial-loss", Through(lambda h: h / (h - h))).status == "failed"


def test_gradient_that_is_cut_off():
    found = check("gradients", Through(torch.detach))
    assert found.status == "failed"
    assert found.evidence["parameters"] == ["first.weight", "first.bias"]
    assert "no gradient arrives" in found.text
    assert check("gradients", Through(torch.relu)).status == "ok"


def test_parameter_in_no_optimizer():
    model = mlp()
    found = check("gradients", model, optimizer=torch.optim.Adam(model[0].parameters()))
    assert found.evidence["parameters"] == ["2.weight", "2.bias"]
    assert "in no optimizer" in found.text


def test_parameter_that_is_not_used_is_a_warning():
    model = Through(torch.tanh)
    model.spare = nn.Linear(4, 4)
    found = check("gradients", model)
    assert (found.status, found.evidence["parameters"]) == ("warning", ["spare.weight", "spare.bias"])


def test_learning_rate_of_zero():
    assert "do not move" in check("gradients", mlp(), lr=0.0).text


def test_a_head_that_starts_at_zero_is_healthy():
    model = mlp()
    nn.init.zeros_(model[2].weight)
    assert check("gradients", model).status == "ok"


@pytest.mark.parametrize("frozen", [False, True])
def test_overfit_healthy(frozen):
    model = mlp(inner=(nn.Dropout(0.3),))
    model[0].requires_grad_(not frozen)
    assert check("overfit", model, lr=0.1).status == "ok"


def test_overfit_with_a_loss_that_does_not_depend_on_the_model():
    found = check("overfit", Through(lambda h: 0 * h), loss_fn=lambda output, _: (0 * output).sum() + 1.0)
    assert found.status == "failed"


def test_overfit_in_the_wrong_direction():
    model = mlp()
    climbing = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    assert check("overfit", model, optimizer=climbing).status == "failed"


def test_overfit_with_a_rate_that_is_too_small():
    found = check("overfit", mlp(), lr=1e-9)
    assert found.status == "warning"
    assert "Adam" in found.hint


def test_overfit_while_the_rate_warms_up():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-8 * (step + 1))

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        schedule.step()

    found = clew.preflight(model, (X,), step=step, optimizer=optimizer, only="overfit")["overfit"]
    assert found.status == "ok"
    assert "warming up" in found.text


def test_overfit_while_a_schedule_for_a_short_run_ends():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 4))

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        schedule.step()

    found = clew.preflight(model, (X,), step=step, optimizer=optimizer, only="overfit")["overfit"]
    assert found.status == "ok"


def test_dropout_that_stays_on_in_evaluation():
    found = check("train-eval", Through(lambda h: F.dropout(h, 0.5)))
    assert found.status == "failed"
    assert "dropout is on" in found.hint


def test_running_statistics_that_do_not_follow():
    data = (20 * X + 100, Y)
    assert check("train-eval", mlp(inner=(nn.BatchNorm1d(16, momentum=0.0),)), data).status == "warning"
    assert check("train-eval", mlp(inner=(nn.BatchNorm1d(16),)), data).status == "ok"


def test_dropout_that_follows_the_mode():
    assert check("train-eval", mlp(inner=(nn.Dropout(0.5),)), lr=0.1).status == "ok"


# ------------------------------------------------------------------------ samples


class Recurrent(nn.Module):
    def __init__(self, *, batch_first):
        super().__init__()
        self.lstm, self.last = nn.LSTM(8, 16, batch_first=batch_first), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.lstm(x)[0]).mean(1)


@pytest.mark.parametrize(
    "function", [lambda h: h.softmax(0), lambda h: h - h.mean(0), lambda h: h + h.roll(1, 0)]
)
def test_samples_that_see_each_other(function):
    assert check("samples", Through(function)).status == "failed"


def test_a_recurrent_layer_along_the_batch():
    data = (torch.randn(16, 5, 8), Y)
    assert check("samples", Recurrent(batch_first=False), data).status == "failed"
    assert check("samples", Recurrent(batch_first=True), data).status == "ok"


@pytest.mark.parametrize("inner", [nn.BatchNorm1d(16), nn.LayerNorm(16), nn.Dropout(0.5), nn.Softmax(1)])
def test_samples_on_their_own(inner):
    assert check("samples", mlp(inner=(inner,))).status == "ok"


def test_a_model_that_changes_from_call_to_call_is_not_judged():
    for model in (Through(F.dropout), Counting(is_buffer=False)):
        for name in ("samples", "batch-size"):
            assert check(name, model).status == "not checked"


def test_what_is_no_batch_is_not_judged():
    assert check("samples", mlp(), (X[:1], Y[:1])).status == "not checked"


def test_batch_size_that_is_built_in():
    found = check("batch-size", Through(lambda h: h.view(16, -1)))
    assert found.status == "failed"
    assert "do not go through" in found.text
    assert check("batch-size", Through(lambda h: h.view(len(h), -1))).status == "ok"


def test_a_dimension_that_vanishes_for_one_sample():
    found = check("batch-size", Through(lambda h: h.squeeze()))
    assert found.status == "failed"
    assert "squeeze" in found.hint


# ------------------------------------------------------------------------ the future

TOKENS = torch.randint(0, 20, (4, 13), generator=torch.Generator().manual_seed(2))


class Language(nn.Module):
    def __init__(self, *, mixer):
        super().__init__()
        self.embedding, self.mixer, self.last = nn.Embedding(20, 16), mixer, nn.Linear(16, 20)

    def forward(self, tokens):
        return self.last(self.mixer(self.embedding(tokens)))


class Attention(nn.Module):
    def __init__(self, *, causal):
        super().__init__()
        self.lead, self.causal = nn.Linear(16, 48), causal

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.lead(x).chunk(3, -1), is_causal=self.causal)


class Convolution(nn.Module):
    def __init__(self, *, left, right):
        super().__init__()
        self.layer, self.padding = nn.Conv1d(16, 16, 3), (left, right)

    def forward(self, x):
        return self.layer(F.pad(x.transpose(1, 2), self.padding)).transpose(1, 2)


def language_loss(logits, targets):
    return F.cross_entropy(logits.reshape(-1, 20), targets.reshape(-1))


@pytest.mark.parametrize(
    ("mixer", "status"),
    [
        (Attention(causal=False), "failed"),
        (Attention(causal=True), "ok"),
        (Convolution(left=1, right=1), "failed"),
        (Convolution(left=2, right=0), "ok"),
    ],
)
def test_future_leak(mixer, status):
    batch = (TOKENS[:, :-1], TOKENS[:, 1:])
    assert check("future", Language(mixer=mixer), batch, loss_fn=language_loss).status == status


def test_future_where_the_shift_is_in_the_loss():
    def loss(logits, targets):
        return F.cross_entropy(logits[:, :-1].reshape(-1, 20), targets[:, 1:].reshape(-1))

    for causal, status in ((False, "failed"), (True, "ok")):
        model = Language(mixer=Attention(causal=causal))
        assert check("future", model, (TOKENS, TOKENS), loss_fn=loss).status == status


def test_labelling_every_place_is_no_forecast():
    model = Language(mixer=Attention(causal=False))
    found = check("future", model, (TOKENS, (TOKENS + 1) % 20), loss_fn=language_loss)
    assert found.status == "not checked"


# ------------------------------------------------------------------------ again


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(x) * (1 + int.from_bytes(os.urandom(4), "big") / 2**34)


def test_same_twice():
    assert check("repeat", Noisy()).status == "warning"
    assert check("repeat", mlp(inner=(nn.Dropout(0.5),))).status == "ok"


class Counting(nn.Module):
    """Its output depends on how often it was called; the counter is saved only as a buffer."""

    def __init__(self, *, is_buffer):
        super().__init__()
        self.last = nn.Linear(8, 3)
        if is_buffer:
            self.register_buffer("calls", torch.zeros(()))
        else:
            self.calls = torch.zeros(())

    def forward(self, x):
        self.calls = self.calls + 1
        return self.last(x) * (1 + 0.1 * self.calls)


def test_state_that_is_not_saved():
    found = check("resume", Counting(is_buffer=False))
    assert found.status == "failed"
    assert "state_dict" in found.hint
    assert check("resume", Counting(is_buffer=True)).status == "ok"


class Forgetful(torch.optim.SGD):
    """Keeps its momentum where ``state_dict`` does not look."""

    def step(self, closure=None):
        self.hidden = getattr(self, "hidden", {})
        for group in self.param_groups:
            for p in group["params"]:
                self.hidden[p] = 0.9 * self.hidden.get(p, 0) + p.grad
                p.data -= group["lr"] * self.hidden[p]


def test_an_optimizer_that_forgets():
    model = mlp()
    assert check("resume", model, optimizer=Forgetful(model.parameters(), lr=0.1)).status == "failed"
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert check("resume", model, optimizer=momentum).status == "ok"


def test_compiled_otherwise():
    def double(h):
        return h * 2 if torch.compiler.is_compiling() else h

    assert check("compile", Through(double)).status == "failed"


def test_without_a_compiler_the_graph_is_compared(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.delenv("CXX", raising=False)
    found = check("compile", mlp())
    assert (found.status, found.evidence["backend"]) == ("not checked", "aot_eager")
    assert "there is none" in found.text


# ------------------------------------------------------------------------ the call


def test_nothing_remains_of_a_rehearsal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = mlp(inner=(nn.BatchNorm1d(16), nn.Dropout(0.5)))
    optimizer = torch.optim.Adam(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    report = clew.preflight(model, (X, Y), loss_fn=F.cross_entropy, optimizer=optimizer, skip="compile")
    assert report.named("failed") == report.named("warning") == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert not list(tmp_path.iterdir())


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 3)

    def forward(self, x, labels):
        logits = self.last(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_model_that_returns_its_loss():
    report = clew.preflight(WithLoss(), {"x": X, "labels": Y}, skip=["compile", "cost"])
    assert report.named("failed") == []
    assert {"initial-loss", "overfit", "samples", "labels"} <= set(report.named("ok"))


@pytest.mark.parametrize(
    ("args", "more", "words"),
    [
        ((mlp, (X, Y)), {}, "expected a torch.nn.Module"),
        ((mlp(),), {}, "nothing to train on"),
        ((mlp(), X), {"loss_fn": F.mse_loss}, "a pair of inputs and targets"),
        ((mlp(), (X, Y)), {"only": "overfitt"}, "did you mean 'overfit'?"),
    ],
)
def test_what_is_wrong_with_the_call_is_told(args, more, words):
    with pytest.raises(UsageError) as caught:
        clew.preflight(*args, **more)
    assert words in str(caught.value)
