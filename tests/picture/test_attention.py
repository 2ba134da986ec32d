"""Attention weights of any model: right, complete, and the model none the wiser."""

import math

import numpy as np
import pytest
import torch
import torch._dynamo  # transformers imports it late, and it wraps torch.manual_seed
import torch.nn.functional as F
import transformers
from torch import nn

import clew
from clew.capture.torch.attention import weights_of_sdpa
from clew.errors import TraceFailed, UsageError


def rows_sum_to_one(maps):
    return all(np.allclose(weights.sum(-1), 1, atol=1e-5) for weights in maps.values())


class Handmade(nn.Module):
    """Attention as people write it: matmul, mask, softmax, dropout, matmul."""

    def __init__(self, heads=2, width=8, *, product="matmul"):
        super().__init__()
        self.qkv, self.heads, self.product = nn.Linear(width, 3 * width), heads, product
        self.drop = nn.Dropout(0.5)
        self.seen = None

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = F.softmax(scores.masked_fill(torch.ones(time, time).triu(1).bool(), -math.inf), dim=-1)
        self.seen = weights.detach().clone()
        weights = self.drop(weights).to(v.dtype)
        y = torch.einsum("bhts,bhsd->bhtd", weights, v) if self.product == "einsum" else weights @ v
        return y.transpose(1, 2).reshape(batch, time, width)


class Fused(nn.Module):
    """Attention through the fused function, with the arguments as given."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **self.options)


def check_against_values(maps, q, k, v, output):
    """The weights must give the output that the fused kernel gave: the only oracle that is not ourselves."""
    (weights,) = maps.values()
    if v.shape[-3] != weights.shape[1] and v.ndim == 4:
        v = v.repeat_interleave(weights.shape[1] // v.shape[1], 1)
    again = torch.from_numpy(weights) @ (v if v.ndim == 4 else v[:, None])
    torch.testing.assert_close(again.reshape(output.shape), output, rtol=1e-4, atol=1e-5)


MASK = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) > 0.3
MASK[:, 0] = True


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": MASK},
        {"attn_mask": torch.randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(2))},
        {"attn_mask": torch.zeros(5, 7).masked_fill(~MASK, -math.inf), "scale": 0.5},
    ],
    ids=["plain", "causal", "scale", "mask", "bias", "mask-bias-scale"],
)
def test_the_weights_of_the_fused_function_give_its_output(options):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
    model = Fused(**options)
    maps = clew.attention(model, q, k, v)
    assert list(maps) == ["scaled_dot_product_attention"]
    assert maps["scaled_dot_product_attention"].shape == (2, 4, 5, 7)
    assert rows_sum_to_one(maps)
    check_against_values(maps, q, k, v, model(q, k, v))


def test_grouped_queries_share_their_keys():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    model = Fused(enable_gqa=True)
    maps = clew.attention(model, q, k, v)
    check_against_values(maps, q, k, v, model(q, k, v))


def test_without_heads_there_is_one():
    q = torch.randn(3, 5, 8)
    model = Fused()
    maps = clew.attention(model, q, q, q)
    assert maps["scaled_dot_product_attention"].shape == (3, 1, 5, 5)
    check_against_values(maps, q, q, q, model(q, q, q))


def test_a_query_that_may_look_at_nothing_gets_zeros_as_from_torch():
    q = torch.randn(1, 1, 3, 4)
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    weights = weights_of_sdpa(q, q, q, attn_mask=mask)
    assert weights[0, 0].sum(-1).tolist() == pytest.approx([1, 0, 1])
    assert F.scaled_dot_product_attention(q, q, q, attn_mask=mask)[0, 0, 1].abs().sum() == 0


def test_half_precision_is_worked_out_in_full():
    q = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16)
    maps = clew.attention(Fused(), q, q, q)
    assert maps["scaled_dot_product_attention"].dtype == np.float32
    assert rows_sum_to_one(maps)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_by_head_whatever_it_was_asked_for(is_training, need_weights):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True).train(is_training)
    x = torch.randn(2, 6, 16)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = layer

        def forward(self, x):
            return self.attn(x, x, x, need_weights=need_weights)[0]

    maps = clew.attention(Net().train(is_training), x)
    expected = layer.eval()(x, x, x, average_attn_weights=False)[1].detach().numpy()
    np.testing.assert_allclose(maps["attn"], expected, atol=1e-6)


def test_the_fast_path_of_an_encoder_is_seen_too():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        before = encoder(x)
        maps = clew.attention(encoder, x)
        after = encoder(x)
    assert list(maps) == [f"layers.{i}.self_attn" for i in range(3)]
    assert rows_sum_to_one(maps)
    assert torch.equal(before, after)
    first = encoder.layers[0].self_attn(x, x, x, average_attn_weights=False)[1]
    np.testing.assert_allclose(maps["layers.0.self_attn"], first.detach().numpy(), atol=1e-6)


def test_padding_gets_no_attention():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    padding = torch.tensor([[False, False, True], [False, True, True]])
    maps = clew.attention(layer, torch.randn(2, 3, 16), src_key_padding_mask=padding)
    weights = maps["self_attn"]
    assert weights[0, :, :, 2].max() == 0
    assert weights[1, :, :, 1:].max() == 0
    assert rows_sum_to_one(maps)


def test_self_and_cross_attention_of_a_decoder():
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True).eval()
    maps = clew.attention(model, torch.randn(2, 5, 16), torch.randn(2, 4, 16))
    assert {name: weights.shape[-2:] for name, weights in maps.items()} == {
        "encoder.layers.0.self_attn": (5, 5),
        "decoder.layers.0.self_attn": (4, 4),
        "decoder.layers.0.multihead_attn": (4, 5),
    }


@pytest.mark.parametrize("product", ["matmul", "einsum"])
def test_attention_written_by_hand_without_its_dropout(product):
    torch.manual_seed(0)
    model = Handmade(product=product).train()
    maps = clew.attention(nn.Sequential(model), torch.randn(2, 5, 8))
    assert list(maps) == ["0"]
    assert maps["0"].shape == (2, 2, 5, 5)
    assert rows_sum_to_one(maps)
    np.testing.assert_array_equal(maps["0"], np.tril(maps["0"]))


def test_a_classifier_s_softmax_is_no_attention():
    model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=-1))
    with pytest.raises(UsageError, match="no attention found in Sequential"):
        clew.attention(model, torch.randn(2, 5, 4))


def test_a_module_that_runs_twice_has_two_maps():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = model

        def forward(self, x):
            return self.layer(self.layer(x))

    assert list(clew.attention(Twice(), torch.randn(1, 3, 8))) == ["layer.self_attn", "layer.self_attn#1"]


def tiny(name, implementation):
    torch.manual_seed(0)
    configs = {
        "gpt2": ("GPT2Model", transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16)),
        "bert": (
            "BertModel",
            transformers.BertConfig(
                num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=50
            ),
        ),
        "llama": (
            "LlamaModel",
            transformers.LlamaConfig(
                num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=32, vocab_size=50,
            ),
        ),
    }  # fmt: skip
    kind, config = configs[name]
    config._attn_implementation = implementation
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, 0)
    return getattr(transformers, kind)(config).eval()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_hugging_face_models_by_either_implementation(name):
    tokens = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(3))
    found = {}
    for implementation in ("sdpa", "eager"):
        model = tiny(name, implementation)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        with torch.no_grad():
            before = model(tokens)[0]
            found[implementation] = clew.attention(model, tokens)
            after = model(tokens)[0]
        assert torch.equal(before, after)
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert len(found[implementation]) == 2
        assert rows_sum_to_one(found[implementation])
    assert list(found["sdpa"]) == list(found["eager"])
    for layer, weights in found["sdpa"].items():
        np.testing.assert_allclose(weights, found["eager"][layer], atol=1e-5)
    expected = tiny(name, "eager")(tokens, output_attentions=True).attentions
    for weights, reference in zip(found["eager"].values(), expected, strict=True):
        np.testing.assert_allclose(weights, reference.detach().numpy(), atol=1e-6)


def test_the_model_and_the_random_numbers_are_as_before():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), Handmade(), nn.Dropout(0.5)).train()
    x = torch.randn(2, 5, 8)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    clew.attention(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.training
    assert model[1].seen is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_and_heads_are_chosen():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    x = torch.randn(1, 3, 16)
    everything = clew.attention(encoder, x)
    some = clew.attention(encoder, x, layers="layers.{0,2}.*", heads=[3, 1])
    assert list(some) == ["layers.0.self_attn", "layers.2.self_attn"]
    name = "layers.2.self_attn"
    np.testing.assert_array_equal(some[name], everything[name][:, [3, 1]])
    with pytest.raises(UsageError, match="there is no head 4") as caught:
        clew.attention(encoder, x, heads=[4])
    assert caught.value.next_step == "heads go from 0 to 3"
    with pytest.raises(UsageError, match=r"no attention at 'layer\.0' in TransformerEncoder"):
        clew.attention(encoder, x, layers="layer.0")


def test_maps_are_a_mapping_that_knows_what_was_meant():
    maps = clew.attention(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(1, 3, 8))
    assert "self_attn" in maps
    assert len(maps) == 1
    assert repr(maps) == "<AttentionMaps of 1 layers: self_attn (1, 2, 3, 3)>"
    with pytest.raises(UsageError, match="no attention 'self_atn'") as caught:
        maps["self_atn"]
    assert caught.value.next_step == "did you mean 'self_attn'?"


def test_a_model_that_raises_says_so_and_leaves_nothing_behind():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(TraceFailed, match="in 'self_attn' raised AssertionError") as caught:
        clew.attention(model, torch.randn(1, 3, 9))
    assert isinstance(caught.value.__cause__, AssertionError)
    assert "float32(3, 1, 9)" in str(caught.value)


def test_maps_are_drawn_layer_by_layer(tmp_path):
    from test_picture_formats import decode_png

    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    maps = clew.attention(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 6, 16))
    path = maps.save(tmp_path / "maps.png", sample=1)
    pixels = decode_png(path.read_bytes())
    assert pixels.shape[1] > pixels.shape[0] > 300
    assert maps._repr_png_().startswith(b"\x89PNG")
    assert set(maps.picture(layers="*.0.*").arrays) == {"layers.0.self_attn"}
    with pytest.raises(UsageError, match="there is no sample 2"):
        maps.picture(sample=2)
