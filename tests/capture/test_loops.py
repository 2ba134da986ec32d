"""What is recorded of loops of every shape: steps, sites, ordinals and true values."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from clew.capture import clock as clocks
from clew.capture.torch import recorder as recorders


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


def data(n=6):
    return torch.randn(n, 4), torch.randint(0, 2, (n,))


def train(model, optimizer, steps, *, accumulate=1):
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            x, y = data()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_a_plain_loop_leaves_every_kind_in_order_of_execution(record):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with record() as memory:
        train(model, optimizer, 3)
    assert memory.steps == [0, 1, 2]
    assert memory.names(kind="output", step=1) == ["body.0", "body.1", "body.2", "body", "head", "(model)"]
    grads = memory.names(kind="grad_output", step=1)
    assert grads == ["head", "(model)", "body.2", "body", "body.1", "body.0"]
    parameters = [name for name, _ in model.named_parameters()]
    for kind in ("param", "grad", "update"):
        assert memory.names(kind=kind, step=2) == parameters
    assert "body.1.running_mean" in memory.names(kind="buffer", step=0)
    assert memory.names(kind="batch", step=0) == ["batch.0"]
    assert [value for _, value in memory.scalars("lr")] == [0.1, 0.1, 0.1]
    assert len(memory.scalars("loss")) == 3


def test_the_numbers_are_those_of_the_tensors(record):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = data()
    with record() as memory:
        before = model.head.weight.detach().clone()
        output = model(x)
        output.retain_grad()
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
    (out,) = memory.stats(kind="output", site="head")
    torch.testing.assert_close(out["mean"], output.detach().double().mean().item())
    (grad_out,) = memory.stats(kind="grad_output", site="head")
    torch.testing.assert_close(grad_out["l2"], output.grad.double().norm().item(), rtol=1e-6, atol=0)
    (grad,) = memory.stats(kind="grad", site="head.weight")
    torch.testing.assert_close(grad["l2"], model.head.weight.grad.double().norm().item(), rtol=1e-6, atol=0)
    (param,) = memory.stats(kind="param", site="head.weight")
    torch.testing.assert_close(param["l2"], before.double().norm().item(), rtol=1e-6, atol=0)
    (update,) = memory.stats(kind="update", site="head.weight")
    moved = (model.head.weight.detach() - before).double().norm().item()
    torch.testing.assert_close(update["l2"], moved, rtol=1e-6, atol=0)
    norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm().item()
    torch.testing.assert_close(memory.scalars("grad_norm")[0][1], norm, rtol=1e-6, atol=0)
    assert memory.scalars("loss") == [(0, loss.item())]


def test_accumulation_is_one_step_with_several_calls(record):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record() as memory:
        train(model, optimizer, 2, accumulate=3)
    assert memory.steps == [0, 1]
    assert [row[3] for row in memory.rows(kind="output", site="head", step=1)] == [0, 1, 2]
    assert len(memory.rows(kind="grad", site="head.weight", step=1)) == 1
    assert len(memory.scalars("loss")) == 6


def test_two_models_with_two_optimizers_keep_their_names_apart(record):
    maker, judge = nn.Sequential(nn.Linear(2, 4)), nn.Sequential(nn.Linear(4, 1))
    first = torch.optim.Adam(judge.parameters())
    second = torch.optim.Adam(maker.parameters())
    with record(optimizers=[first, second]) as memory:
        for _ in range(2):
            fake = maker(torch.randn(3, 2))
            first.zero_grad()
            judge(fake.detach()).mean().backward()
            first.step()
            second.zero_grad()
            judge(fake).mean().neg().backward()
            second.step()
    assert memory.steps == [0, 1, 2, 3]
    assert set(memory.names(kind="grad")) == {
        "judge.0.weight",
        "judge.0.bias",
        "maker.0.weight",
        "maker.0.bias",
    }
    assert set(memory.names(kind="grad", step=1)) == {"maker.0.weight", "maker.0.bias"}


def test_two_optimizers_that_step_together_share_a_step(record):
    model = Net()
    one = torch.optim.SGD(model.body.parameters(), lr=0.1)
    two = torch.optim.SGD(model.head.parameters(), lr=0.2)
    with record() as memory:
        for _ in range(3):
            x, y = data()
            F.cross_entropy(model(x), y).backward()
            one.step()
            two.step()
    assert memory.steps == [0, 1, 2]
    assert len(memory.rows(kind="update", step=1)) == len(list(model.parameters()))


def test_of_buffers_the_end_of_the_step_stands(record):
    model = Net()
    one = torch.optim.SGD(model.body.parameters(), lr=0.1)
    two = torch.optim.SGD(model.head.parameters(), lr=0.1)
    found = []
    with record() as memory:
        for step in range(3):
            F.cross_entropy(model(data()[0]), data()[1]).backward()
            one.step()
            model.body[1].running_mean.add_(step)
            two.step()
            found.append(model.body[1].running_mean.double().norm().item())
    assert memory.steps == [0, 1, 2]
    rows = memory.stats(kind="buffer", site="body.1.running_mean")
    torch.testing.assert_close([row["l2"] for row in rows], found, rtol=1e-6, atol=0)


def test_a_parameter_of_two_optimizers_has_a_row_for_each(record):
    model = nn.Linear(4, 1)
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    two = torch.optim.SGD([model.weight], lr=0.3)
    with record(hashes=True) as memory:
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            one.step()
            two.step()
    for kind in ("param", "grad", "update"):
        assert [row[3] for row in memory.rows(kind=kind, site="weight", step=1)] == [0, 1]
        assert [row[3] for row in memory.rows(kind=kind, site="bias", step=1)] == [0]
    moved = [round(row["l2"], 5) for row in memory.stats(kind="update", site="weight", step=1)]
    assert moved == [0.4, 1.2]
    grads = [row["l2"] ** 2 for row in memory.stats(kind="grad", step=1)]
    torch.testing.assert_close(memory.scalars("grad_norm")[1][1], (grads[0] + grads[1]) ** 0.5)


def test_a_step_that_is_tried_again_is_there_once(record):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail():
        raise ValueError("on purpose")

    with record() as memory:
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(ValueError, match="on purpose"):
            optimizer.step(fail)
        with torch.no_grad():
            model.bias.fill_(3.0)
        optimizer.step()
    for kind in ("param", "grad", "update"):
        assert memory.names(kind=kind) == ["weight", "bias"]
    assert memory.stats(kind="param", site="bias")[0]["mean"] == 3.0


def test_gradients_gathered_by_hand_are_those_of_the_last_pass(record):
    weight = nn.Linear(4, 1, bias=False)
    with record() as memory:
        for _ in range(2):
            out = weight(torch.ones(2, 4))
            out.sum().backward(retain_graph=True)
            out.sum().backward()
            with torch.no_grad():
                weight.weight.sub_(0.1 * weight.weight.grad)
            weight.weight.grad = None
    assert [row["max"] for row in memory.stats(kind="grad")] == [4.0, 4.0]
    assert [row[3] for row in memory.rows(kind="grad_output", step=0)] == [0, 1]


def test_losses_of_several_numbers_are_told_apart(record):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record() as memory:
        for _ in range(2):
            out = model(torch.randn(3, 4)).sum(0)
            out.backward(torch.ones(2))
        optimizer.step()
    assert [row[3] for row in memory.rows(kind="loss")] == [0, 1]


def test_a_closure_that_runs_the_model_belongs_to_its_step(record):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(5, 4)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with record() as memory:
        optimizer.step(closure)
        optimizer.step(closure)
    assert memory.steps == [0, 1]
    assert len(memory.rows(kind="output", step=0)) >= 2
    assert len(memory.rows(kind="grad", step=0)) == 2


def test_hand_written_updates_are_steps_too(record):
    model = nn.Linear(4, 1)
    with record() as memory:
        for _ in range(3):
            model(torch.randn(5, 4)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
    assert memory.steps == [0, 1, 2]
    assert [len(memory.rows(kind="grad", step=step)) for step in memory.steps] == [2, 2, 2]


def test_evaluation_alone_counts_a_call_as_a_step(record):
    model = Net().eval()
    with record() as memory, torch.no_grad():
        for _ in range(4):
            model(data()[0])
    assert memory.steps == [0, 1, 2, 3]
    assert {row[4] for row in memory.rows(kind="output")} == {1}


def test_validation_between_steps_is_marked_and_sampled(record):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record() as memory:
        train(model, optimizer, 1)
        model.eval()
        with torch.inference_mode():
            for _ in range(5):
                model(data()[0])
        model.train()
        train(model, optimizer, 1)
    assert memory.steps == [0, 1]
    modes = [row[4] for row in memory.rows(kind="output", site="head")]
    assert modes == [0, 1, 0]


@pytest.fixture(params=["short", "slow"])
def way(request, monkeypatch):
    """Record by the compiled way and by its twin in Python."""
    if request.param == "slow":
        monkeypatch.setattr(recorders.Recorder, "_make_tray", lambda _: None)
        monkeypatch.setattr(recorders, "make_clock", clocks.StepClock)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_calls_are_counted_for_each_mode_apart(record, way, checkpointed):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def act():
        model.eval()
        with torch.no_grad():
            model(torch.randn(1, 4))
        model.train()

    with record() as memory:
        for _ in range(2):
            act()
            for _ in range(2):
                x = torch.randn(3, 4, requires_grad=True)
                out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
                out.sum().backward()
                act()
            optimizer.step()
    for site, step in (("0", 0), ("0", 1)):
        calls = [(row[4], row[3]) for row in memory.rows(kind="output", site=site, step=step)]
        assert calls == [(1, 0), (0, 0), (0, 1)]
        assert [row[4] for row in memory.rows(kind="grad_output", site=site, step=step)] == [0, 0]
        assert [row[3] for row in memory.rows(kind="grad_output", site=site, step=step)] == [0, 1]
        batches = [(row[4], row[3]) for row in memory.rows(kind="batch", step=step)]
        assert batches == [(1, 0), (0, 0), (0, 1)]


def test_checkpointed_blocks_give_outputs_once_and_gradients(record):
    for reentrant in (True, False):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record() as memory:
            x, y = data()
            x.requires_grad_()
            hidden = checkpoint(model.body, x, use_reentrant=reentrant)
            F.cross_entropy(model.head(hidden), y).backward()
            optimizer.step()
        assert memory.steps == [0]
        assert len(memory.rows(kind="output", site="body.0")) == 1, reentrant
        assert len(memory.rows(kind="grad_output", site="body.0")) == 1, reentrant


def test_many_calls_of_one_module_merge_into_the_last_ordinal(record):
    cell = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    with record(histograms=True, hashes=True) as memory:
        state = torch.ones(1, 3)
        for _ in range(40):
            state = cell(state)
        state.sum().backward()
        optimizer.step()
    rows = memory.rows(kind="output", site="(cell)")
    assert [row[3] for row in rows] == list(range(16))
    assert rows[0][5]["count"] == 3
    assert rows[15][5]["count"] == 25 * 3


def test_outputs_of_every_shape_are_named_by_their_leaves(record):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 4)

        def forward(self, x, extra=None):
            out, state = self.rnn(x)
            return {"out": out, "state": state, "text": "no tensor", "none": None}

    model = Many()
    with record() as memory:
        model(torch.randn(2, 1, 3), extra=torch.ones(2))["out"].sum().backward()
    names = memory.names(kind="output")
    assert names == [
        "rnn[0]",
        "rnn[1][0]",
        "rnn[1][1]",
        "(model)[out]",
        "(model)[state][0]",
        "(model)[state][1]",
    ]
    assert memory.names(kind="batch") == ["batch.0", "batch.extra"]


def test_outputs_that_cannot_be_looked_into_are_told_of_and_left_alone(record):
    class Odd:
        """Complains of whatever is asked of it."""

        def __init__(self, tensor):
            object.__setattr__(self, "tensor", tensor)

        def __getattribute__(self, name):
            if name != "__class__":
                raise AssertionError(f"{name} was asked for")
            return object.__getattribute__(self, name)

    class Gives(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.wrap = wrap

        def forward(self, x):
            return self.wrap(x)

    deep = torch.zeros(1)
    for _ in range(8):
        deep = [deep]
    wraps = {
        "odd": Odd,
        "lazily": lambda x: (part for part in [x]),
        "inside": lambda x: {"x": x, "rest": (None, 3, "text", {x})},
        "long": lambda x: [x] * 70,
        "deep": lambda _: deep,
        "nothing": lambda x: (x, None, 1.5, 2, True, "text", x.dtype, x.device, 1j, x.numpy()),
        "none": lambda _: None,
    }
    model = nn.ModuleDict({name: Gives(wrap) for name, wrap in wraps.items()})
    with record(model) as memory:
        for _ in range(2):
            given = {name: model[name](torch.ones(2)) for name in wraps}
    assert len(list(given["lazily"])) == 1  # nobody has taken from it
    assert memory.session.recorder.unseen == {
        "odd": f"it gives an object of class {Odd.__qualname__}, which is not looked into",
        "lazily": "it gives an object of class generator, which is not looked into",
        "inside[rest][3]": "it gives an object of class set, which is not looked into",
        "long": "it gives all but the first 64 parts of a list, which is not looked into",
        "deep[0][0][0][0][0][0]": "it gives an object of class list, which is not looked into",
    }
    assert memory.session.recorder.guard.total == 0


def test_tied_and_shared_parts_are_one_site(record):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.out = nn.Linear(4, 5, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x):
            return self.out(self.embed(x))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record() as memory:
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert memory.names(kind="grad") == ["embed.weight"]


def test_a_second_model_takes_over_the_names_of_the_first(record):
    with record() as memory:
        for _ in range(2):
            model = Net()
            optimizer = torch.optim.Adam(model.parameters())
            train(model, optimizer, 2)
    assert memory.steps == [0, 1, 2, 3]
    assert set(memory.names(kind="grad")) == {name for name, _ in model.named_parameters()}


def test_a_skipped_step_of_the_scaler_is_a_step_and_says_so(record):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with record() as memory:
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 4)) * factor).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert memory.steps == [0, 1, 2]
    assert [value for _, value in memory.scalars("scaler.skipped")] == [0.0, 1.0, 0.0]
    assert [value for _, value in memory.scalars("scaler.scale")] == [8.0, 8.0, 4.0]


def test_clipping_shows_the_norm_before_and_after(record):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record() as memory:
        (model(torch.ones(2, 4)) * 100).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert memory.scalars("clip.norm_before")[0][1] > 100
    torch.testing.assert_close(memory.scalars("grad_norm")[0][1], 1.0, rtol=1e-4, atol=0)


def test_modules_outside_the_tree_get_a_name(record):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = [nn.Linear(4, 4), nn.Linear(4, 2)]

        def forward(self, x):
            return self.parts[1](self.parts[0](x))

    model = Hidden()
    with record() as memory:
        model(torch.randn(2, 4)).sum().backward()
    assert memory.names(kind="output") == ["<Linear>", "<Linear>#2", "model"]


def test_only_the_wanted_sites_and_kinds(record):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(sites=("body.*", "!*.1*"), kinds=("output", "grad")) as memory:
        train(model, optimizer, 1)
    assert memory.names() == ["body.0", "body.2", "body.0.weight", "body.0.bias"]


def test_optimizer_state_on_request(record):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with record(kinds=("state",)) as memory:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert "weight@exp_avg" in memory.names(kind="state")
