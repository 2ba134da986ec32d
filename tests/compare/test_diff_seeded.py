"""Two trainings that differ in one known way: the verdict names the step, the place and the class of the cause."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clew
from clew.compare.diff import diff_runs

STEPS = 3


class ConvBlock(nn.Module):
    def __init__(self, width, *, noop=False, moved=False, dropout=0.0, bias=True, eps=1e-5):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(width, eps=eps)
        if noop:
            self.noop = nn.Identity()
        self.act = nn.GELU()
        self.drop = nn.Dropout(dropout)
        self.moved = moved

    def forward(self, x):
        h = self.norm(self.conv(x)) if not self.moved else self.conv(self.norm(x))
        if hasattr(self, "noop"):
            h = self.noop(h)
        return x + self.drop(self.act(h))


class TinyConv(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(4, **options) for _ in range(2))
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class TextBlock(nn.Module):
    def __init__(self, width, *, noop=False, moved=False, dropout=0.0, bias=True, eps=1e-5):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.conv = nn.Linear(width, 2 * width, bias=bias)
        if noop:
            self.noop = nn.Identity()
        self.act = nn.GELU()
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)
        self.moved = moved

    def forward(self, x):
        x = self.norm(x + self._attend(x)) if self.moved else x + self._attend(self.norm(x))
        return x + self.down(self.drop(self._widen(self.norm2(x))))

    def _attend(self, x):
        return self.attn(x, x, x, need_weights=False)[0]

    def _widen(self, x):
        x = self.act(self.conv(x))
        return self.noop(x) if hasattr(self, "noop") else x


class TinyText(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.stem = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(TextBlock(8, **options) for _ in range(2))
        self.head = nn.Linear(8, 11)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)


class HalfLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


def make_data(kind):
    generator = torch.Generator().manual_seed(5)
    if kind is TinyConv:
        inputs = [torch.randn(4, 3, 6, 6, generator=generator) for _ in range(STEPS)]
        targets = [torch.randint(0, 5, (4,), generator=generator) for _ in range(STEPS)]
    else:
        inputs = [torch.randint(0, 11, (4, 6), generator=generator) for _ in range(STEPS)]
        targets = [torch.randint(0, 11, (24,), generator=generator) for _ in range(STEPS)]
    return inputs, targets


def train(
    folder,
    name,
    kind,
    *,
    edit=None,
    data=None,
    optimizer=None,
    smoothing=0.0,
    steps=STEPS,
    autocast=False,
    **options,
):
    """Train a tiny model for a few steps and return the recorded run."""
    torch.manual_seed(0)
    plain = {key: options.pop(key) for key in ("bias", "noop") if key in options}
    model = kind(**options)
    if plain:
        # Made after the plain one and given its weights: nothing but the option differs.
        state = model.state_dict()
        model = kind(**plain, **options)
        model.load_state_dict({k: v for k, v in state.items() if k in model.state_dict()})
    if edit is not None:
        edit(model)
    torch.manual_seed(1)
    chosen = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))(model.parameters())
    inputs, targets = make_data(kind)
    if data is not None:
        data(inputs)
    with clew.watch(
        model, chosen, out=str(folder), name=name, budget="off", status=False, doctor=False
    ) as watch:
        for x, y in list(zip(inputs, targets, strict=True))[:steps]:
            chosen.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                output = model(x)
            F.cross_entropy(output.float(), y, label_smoothing=smoothing).backward()
            chosen.step()
    return clew.open_run(watch.path)


def scale(factor):
    def edit(model):
        with torch.no_grad():
            model.blocks[1].conv.weight.mul_(factor)

    return edit


def reseed(model):
    torch.manual_seed(77)
    model.blocks[1].conv.reset_parameters()


def other_gelu(model):
    model.blocks[1].act.approximate = "tanh"


def other_eps(model):
    model.blocks[1].norm.eps = 1e-4


def drop_some(model):
    model.blocks[1].drop.p = 0.5


def half_matmul(model):
    old = model.head
    model.head = HalfLinear(old.in_features, old.out_features)
    model.head.load_state_dict(old.state_dict())


def wrong_operation(model):
    original = model.blocks[1].act.forward
    model.blocks[1].act.forward = lambda x: original(x) * 1.5


def freeze(model):
    model.blocks[1].conv.weight.requires_grad_(False)


def hook_gradient(model):
    model.blocks[1].conv.weight.register_hook(lambda gradient: gradient * 2)


def other_token(inputs):
    x = inputs[1]
    x.view(-1)[3] = (x.view(-1)[3] + 1) % 11


def adam(**options):
    return lambda parameters: torch.optim.Adam(parameters, lr=1e-3, **options)


def sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})


SEEDED = {
    "weight doubled": ({"edit": scale(2.0)}, {}, 0, "weights", "blocks.1.conv.weight", "initial-weight"),
    "weight x1.001": ({"edit": scale(1.001)}, {}, 0, "weights", "blocks.1.conv.weight", "initial-weight"),
    "seed of one layer": ({"edit": reseed}, {}, 0, "weights", "blocks.1.conv.weight", "initial-weight"),
    "eps": ({"edit": other_eps}, {}, 0, "forward", "blocks.1.norm", "argument"),
    "dropout": ({"edit": drop_some}, {}, 0, "forward", "blocks.1.drop", "randomness"),
    "one token": ({"data": other_token}, {}, 1, "data", "batch.0", "data"),
    "learning rate": ({"optimizer": sgd(lr=0.11)}, {}, 0, "update", "stem.weight", "learning-rate"),
    "momentum": ({"optimizer": sgd(momentum=0.8)}, {}, 1, "update", "stem.weight", "optimizer"),
    "betas swapped": (
        {"optimizer": adam(betas=(0.999, 0.9))},
        {"optimizer": adam()},
        0,
        "update",
        None,
        "optimizer",
    ),
    "no-op in each block": ({"noop": True}, {}, 0, "forward", "blocks.0.noop", "structure"),
    "norm moved": ({"moved": True}, {}, 0, "forward", None, "structure"),
    "half-precision matmul": ({"edit": half_matmul}, {}, 0, "forward", "head", "precision"),
    "autocast": ({"autocast": True}, {}, 0, "forward", None, "precision"),
    "label smoothing": ({"smoothing": 0.1}, {}, 0, "loss", "loss", "argument"),
    "missing bias": ({"bias": False}, {}, 0, "weights", "blocks.0.conv.bias", "structure"),
    "other GELU": ({"edit": other_gelu}, {}, 0, "forward", "blocks.1.act", "argument"),
    "wrong operation": ({"edit": wrong_operation}, {}, 0, "forward", "blocks.1.act", "operation"),
    "frozen": ({"edit": freeze}, {}, 0, "backward", "blocks.1.conv.weight", "gradient"),
    "gradient doubled": ({"edit": hook_gradient}, {}, 0, "backward", "blocks.1.conv.weight", "gradient"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("seeded")


@pytest.fixture(scope="module")
def references(folder):
    """The unchanged runs, recorded once for each model and optimizer."""
    runs = {}

    def find(kind, options):
        key = (kind, bool(options))
        if key not in runs:
            runs[key] = train(folder, f"{kind.__name__}-reference-{bool(options)}", kind, **options)
        return runs[key]

    return find


@pytest.mark.parametrize("kind", [TinyConv, TinyText], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", SEEDED)
def test_the_cause_is_named(folder, references, kind, name):
    changed, base, step, phase, site, cause = SEEDED[name]
    run = train(folder, f"{kind.__name__}-{name.replace(' ', '-')}", kind, **changed)
    found = diff_runs(references(kind, base), run)
    assert not found.is_same
    assert found.first is not None, found.sentence
    where = (found.first.step, found.first.phase, found.first.cause)
    assert where == (step, phase, cause), found.sentence
    assert site is None or found.first.site == site, found.sentence
    assert found.first.cause.split("-")[0] in found.sentence


def functional(model):
    block = model.blocks[1]

    def forward(x):
        x = x + block._attend(block.norm(x))
        return x + block.down(block.drop(block._widen(1.01 * block.norm2(x))))

    block.forward = forward


def dropout_inside(model):
    model.blocks[0].act = nn.Sequential(nn.GELU(), nn.Dropout(0.3))


def layer_inside(model):
    model.blocks[0].act = nn.Sequential(nn.GELU(), nn.Tanh())


def other_class(model):
    model.blocks[1].act = nn.ReLU()


def attention_dropout(model):
    model.blocks[1].attn.dropout = 0.5


def one_block_less(model):
    del model.blocks[1]


def all_frozen_norms(model):
    model.eval()


def one_frozen_norm(model):
    model.blocks[1].norm.eval()


def other_momentum(model):
    model.blocks[1].norm.momentum = 0.3


MORE = {
    "code of a block": (TinyText, {"edit": functional}, "blocks.1", "operation"),
    "dropout on one side": (TinyText, {"edit": dropout_inside}, "blocks.0.act.1", "randomness"),
    "layer on one side": (TinyText, {"edit": layer_inside}, "blocks.0.act.1", "structure"),
    "other class": (TinyText, {"edit": other_class}, "blocks.1.act", "argument"),
    "dropout of attention": (TinyText, {"edit": attention_dropout}, "blocks.1.attn", "randomness"),
    "one block less": (TinyText, {"edit": one_block_less}, "blocks.1.norm", "structure"),
    "other optimizer": (TinyText, {"optimizer": adam()}, "stem.weight", "optimizer"),
    "weight decay": (TinyText, {"optimizer": sgd(weight_decay=0.1)}, "stem.weight", "optimizer"),
    "evaluation mode": (TinyConv, {"edit": all_frozen_norms}, "(model)", "argument"),
    "one frozen norm": (TinyConv, {"edit": one_frozen_norm}, "blocks.1.norm", "argument"),
    "momentum of a norm": (TinyConv, {"edit": other_momentum}, "blocks.1.norm", "argument"),
}


@pytest.mark.parametrize("name", MORE)
def test_more_causes_are_named_in_the_first_step(folder, references, name):
    kind, changed, site, cause = MORE[name]
    found = diff_runs(references(kind, {}), train(folder, f"more-{name.replace(' ', '-')}", kind, **changed))
    assert found.first is not None, found.sentence
    assert (found.first.step, found.first.site, found.first.cause) == (0, site, cause), found.sentence


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = TinyText()

    def forward(self, x):
        return self.inner(x)


def test_a_wrapper_is_no_difference_and_hides_none(folder, references):
    found = diff_runs(references(TinyText, {}), train(folder, "wrapped", Wrapped))
    assert found.is_identical, found.sentence
    assert found.only_b == ("inner",)
    found = diff_runs(
        references(TinyText, {}),
        train(folder, "wrapped-eps", Wrapped, edit=lambda model: other_eps(model.inner)),
    )
    assert (found.first.site, found.first.site_b) == ("blocks.1.norm", "inner.blocks.1.norm")
    assert found.first.cause == "argument"


def test_rounding_that_grows_is_traced_to_where_it_began(folder):
    def nudge(model):
        original = model.blocks[0].act.forward
        model.blocks[0].act.forward = lambda x: original(x) * (1 + 2e-7)

    runs = []
    for name, edit in (("plain", lambda model: None), ("nudged", nudge)):
        torch.manual_seed(0)
        model = TinyText()
        edit(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        inputs, targets = make_data(TinyText)
        with clew.watch(
            model, optimizer, out=str(folder), name=f"drift-{name}", budget="off", doctor=False
        ) as watch:
            for step in range(25):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[step % STEPS]), targets[step % STEPS]).backward()
                optimizer.step()
        runs.append(clew.open_run(watch.path))
    found = diff_runs(*runs)
    assert (found.first.step, found.first.site, found.first.cause) == (0, "blocks.0.act", "precision")
    assert "grows from step to step" in found.sentence


@pytest.mark.parametrize("kind", [TinyConv, TinyText], ids=lambda kind: kind.__name__)
def test_an_identical_pair_has_no_difference(folder, references, kind):
    found = diff_runs(references(kind, {}), train(folder, f"{kind.__name__}-again", kind))
    assert found.is_same
    assert found.is_identical
    assert found.tensors == found.only_a == found.only_b == ()
    assert "identical" in found.sentence
