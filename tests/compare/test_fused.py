"""q, k and v in one matrix on one side: found, compared by slices where there are tensors, by statistics where not."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import clew
from clew.cli import main
from clew.compare.align_fused import join_names
from clew.compare.fused import Layout, find_layout

WIDTH, HEADS = 8, 2


def attend(q, k, v):
    b, t, c = q.shape
    q, k, v = (x.view(b, t, HEADS, c // HEADS).transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)


class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class Turned(nn.Module):
    """A Linear whose weight is stored as in, out."""

    def __init__(self, given, out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(given, out)), nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return x @ self.weight + self.bias


class Together(nn.Module):
    def __init__(self, *, turned=False, interleaved=False):
        super().__init__()
        self.c_attn = Turned(WIDTH, 3 * WIDTH) if turned else nn.Linear(WIDTH, 3 * WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)
        self.interleaved = interleaved

    def forward(self, x):
        both = self.c_attn(x)
        if not self.interleaved:
            return self.out_proj(attend(*both.chunk(3, dim=-1)))
        shared = both.view(*both.shape[:-1], HEADS, 3, WIDTH // HEADS)
        return self.out_proj(attend(*(shared[..., i, :].flatten(-2) for i in range(3))))


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, 2)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def fuse(weights, *, turned, interleaved):
    """The state of a model with q, k and v apart, for one that has them together."""
    found = {name: value.clone() for name, value in weights.items() if "_proj." not in name}
    for block in (0, 1):
        for own in ("weight", "bias"):
            parts = [weights[f"blocks.{block}.{x}_proj.{own}"] for x in "qkv"]
            if interleaved:
                parts = [part.view(HEADS, WIDTH // HEADS, *part.shape[1:]) for part in parts]
                whole = torch.stack(parts, dim=1).flatten(0, 2)
            else:
                whole = torch.cat(parts)
            found[f"blocks.{block}.c_attn.{own}"] = whole.t().contiguous() if turned else whole
            found[f"blocks.{block}.out_proj.{own}"] = weights[f"blocks.{block}.out_proj.{own}"]
    return found


def make_pair(*, turned=False, interleaved=False):
    torch.manual_seed(0)
    apart = Model(Apart(), Apart())
    together = Model(*(Together(turned=turned, interleaved=interleaved) for _ in range(2)))
    together.load_state_dict(fuse(apart.state_dict(), turned=turned, interleaved=interleaved))
    return apart, together


WAYS = pytest.mark.parametrize(
    ("turned", "interleaved"), [(False, False), (True, False), (False, True)], ids=["rows", "turned", "heads"]
)


@pytest.fixture
def batch():
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))


@WAYS
def test_models_are_the_same_however_the_parts_lie(batch, turned, interleaved):
    apart, together = make_pair(turned=turned, interleaved=interleaved)
    clew.assert_same(apart, together, batch)
    clew.assert_same(together, apart, batch)


@WAYS
def test_a_slice_that_differs_is_named_even_where_statistics_are_equal(batch, turned, interleaved):
    apart, together = make_pair(turned=turned, interleaved=interleaved)
    weight = together.blocks[1].c_attn.weight.detach()
    rows = weight.T if turned else weight
    rows[5] = rows[5].flip(0)
    place = "[2 of 3 in each of 2 heads]" if interleaved else "[:, 0:8]" if turned else "[0:8]"
    with pytest.raises(AssertionError) as caught:
        clew.assert_same(apart, together, batch)
    assert f"blocks.1.c_attn.weight{place}: relative error" in str(caught.value)
    assert "1 of 12 slices of fused tensors" in str(caught.value)


@WAYS
def test_checkpoints_are_compared_by_slices(tmp_path, turned, interleaved, capsys):
    for name, model in zip("ab", make_pair(turned=turned, interleaved=interleaved), strict=True):
        torch.save(model.state_dict(), tmp_path / f"{name}.pt")
    files = [str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]
    assert main(["ckpt", "diff", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "blocks.1.v_proj.bias" in found["unchanged"]
    assert not found["only_a"]
    assert not found["only_b"]
    assert any(
        "blocks.0.{q_proj,k_proj,v_proj}.weight is blocks.0.c_attn.weight in b" in n for n in found["notes"]
    )
    state = torch.load(files[0])
    state["blocks.0.k_proj.weight"][3, 4] += 0.25
    torch.save(state, files[0])
    for first, second in (files, files[::-1]):
        assert main(["ckpt", "diff", first, second, "--json"]) == 1
        (change,) = json.loads(capsys.readouterr().out)["changed"]
        assert change["difference"]["different"] == 1
        assert change["shape"] == [8, 8]
        assert {change["name"].partition("[")[0], change["name_b"].partition("[")[0]} == {
            "blocks.0.k_proj.weight", "blocks.0.c_attn.weight",
        }  # fmt: skip


def train(model, folder, name, *, steps=2, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    chosen = {"budget": "off", "status": False, "doctor": False, **settings}
    with clew.watch(model, optimizer, out=str(folder), name=name, **chosen) as run:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(3, 5, WIDTH)).square().mean().backward()
            optimizer.step()
    return run.path


@WAYS
def test_runs_are_compared_by_the_statistics_of_the_whole(tmp_path, turned, interleaved):
    apart, together = make_pair(turned=turned, interleaved=interleaved)
    found = clew.diff(train(apart, tmp_path, "a"), train(together, tmp_path, "b"))
    assert found.is_same, found.sentence
    assert not found.is_identical
    assert not found.only_a
    assert not found.only_b
    assert len(found.alignment.fused) == 6
    assert any("compared as a whole, by statistics, and 5 more such" in note for note in found.notes)


def test_snapshots_of_runs_are_compared_by_slices(tmp_path):
    for name, model in zip("ab", make_pair(turned=True), strict=True):
        train(model, tmp_path, name, snapshots="every:1")
    found = clew.diff_checkpoints(*(tmp_path / name / "rank0" / "snapshots" / "step-000001" for name in "ab"))
    compared = {change.name for change in found.changed} | set(found.unchanged)
    assert {f"blocks.1.{part}_proj.weight" for part in "qkv"} <= compared
    assert {change.verdict for change in found.changed} <= {"rounding"}
    assert not found.only_a
    assert not found.only_b


def test_a_fused_weight_that_differs_is_named_with_what_cannot_be_known(tmp_path):
    apart, together = make_pair()
    with torch.no_grad():
        together.blocks[1].c_attn.weight[9] *= 1.5
    found = clew.diff(train(together, tmp_path, "a"), train(apart, tmp_path, "b"))
    assert (found.first.site, found.first.kind, found.first.cause) == (
        "blocks.1.c_attn.weight", "param", "initial-weight",
    )  # fmt: skip
    assert found.first.site_b == "blocks.1.{q_proj,k_proj,v_proj}.weight"
    assert "statistics do not tell which of the parts" in found.sentence


class Packed(nn.Module):
    """PyTorch's own attention, which keeps the matrices of q, k and v in one parameter without a module."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


def test_the_attention_of_torch_is_compared_with_three_matrices(batch):
    apart, packed = Model(Apart()), Model(Packed())
    weights = apart.state_dict()
    state = packed.state_dict()
    for own in ("weight", "bias"):
        whole = torch.cat([weights[f"blocks.0.{x}_proj.{own}"] for x in "qkv"])
        state[f"blocks.0.attn.in_proj_{own}"] = whole
        state[f"blocks.0.attn.out_proj.{own}"] = weights[f"blocks.0.out_proj.{own}"]
        state[f"head.{own}"] = weights[f"head.{own}"]
    packed.load_state_dict(state)
    clew.assert_same(apart, packed, batch)
    with torch.no_grad():
        packed.blocks[0].attn.in_proj_weight[17, 3] += 0.5
    with pytest.raises(
        AssertionError, match=r"blocks.0.v_proj.weight and blocks.0.attn.in_proj_weight\[16:24\]"
    ):
        clew.assert_same(apart, packed, batch)


def test_layouts_are_told_from_the_contents():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((12, 5)) for _ in range(3))
    assert find_layout([q, k, v], np.concatenate([q, k, v])) == Layout((0, 1, 2))
    assert find_layout([q, k, v], np.concatenate([k, v, q]).T) == Layout((1, 2, 0), is_turned=True)
    shared = np.stack([x.reshape(4, 3, 5) for x in (q, k, v)], axis=1).reshape(36, 5)
    assert find_layout([q, k, v], shared + 0.01) == Layout((0, 1, 2), heads=4)
    grouped = np.concatenate([q, k[:4], v[:4]])
    assert find_layout([q, k[:4], v[:4]], grouped) == Layout((0, 1, 2))
    assert not find_layout([q, k, v], rng.standard_normal((36, 5))).is_known


def test_names_are_joined():
    assert join_names(["h.0.q.weight", "h.0.k.weight"]) == "h.0.{q,k}.weight"
    assert join_names(["gate", "up"]) == "{gate,up}"
