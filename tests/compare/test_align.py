"""Which site is which, when modules are renamed, inserted, removed, wrapped, fused, moved or transposed."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clew.compare.align import align
from clew.compare.align_map import expand_map, format_map, read_map
from clew.compare.name import unwrap
from clew.errors import UsageError
from clew.model.record import Site


def sites_of(model: nn.Module) -> list[Site]:
    """The modules of a model in order, then its parameters and buffers."""
    rows = [(name, "module", type(module).__qualname__, ()) for name, module in model.named_modules()]
    rows += [(name, "parameter", "float32", tuple(p.shape)) for name, p in model.named_parameters()]
    rows += [(name, "buffer", "float32", tuple(p.shape)) for name, p in model.named_buffers()]
    return [
        Site(id=index, name=name, role=role, type=kind, shape=shape)
        for index, (name, role, kind, shape) in enumerate(rows)
    ]


def prints_of(model: nn.Module) -> dict[str, int]:
    return {name: hash(tuple(p.flatten().tolist())) for name, p in model.named_parameters()}


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.out_proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)


class Net(nn.Module):
    def __init__(self, depth=3, width=8):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 20)


def check_sound(a, b, found, *, ordered=True):
    """What holds for every alignment: each site once, roles equal, order kept but for what is said to be moved."""
    names_a, names_b = [site.name for site in a], [site.name for site in b]
    roles_a, roles_b = ({site.name: site.role for site in side} for side in (a, b))
    assert sorted([pair.a for pair in found.pairs] + list(found.only_a)) == sorted(names_a)
    assert sorted([pair.b for pair in found.pairs] + list(found.only_b)) == sorted(names_b)
    for pair in found.pairs:
        assert roles_a[pair.a] == roles_b[pair.b]
    place = {name: index for index, name in enumerate(names_b)}
    for role in ("module",):
        rising = [
            place[pair.b]
            for pair in found.pairs
            if roles_a[pair.a] == role and pair.how not in ("moved", "map")
        ]
        if ordered:
            assert rising == sorted(rising)


def run(a, b, **options):
    first = a if isinstance(a, list) else sites_of(a)
    second = b if isinstance(b, list) else sites_of(b)
    found = align(first, second, **options)
    check_sound(first, second, found)
    return found


def test_a_model_and_itself():
    found = run(Net(), Net())
    assert {pair.how for pair in found.pairs} == {"name"}
    assert found.names == {site.name: site.name for site in sites_of(Net())}
    assert not (found.only_a or found.only_b or found.fused)


@pytest.mark.parametrize(
    "wrap",
    ["module.{}", "_orig_mod.{}", "_orig_mod.module.{}", "base_model.model.{}", "_fsdp_wrapped_module.{}"],
)
def test_wrappers(wrap):
    inner = sites_of(Net())
    outer = [
        Site(id=site.id, name=wrap.format(site.name), role=site.role, type=site.type, shape=site.shape)
        for site in inner
        if site.name
    ]
    found = run(inner, outer)
    assert found.names == {site.name: wrap.format(site.name) for site in inner if site.name}
    assert {pair.how for pair in found.pairs} == {"unwrapped"}


def test_a_model_inside_another():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = Net()
            self.loss = nn.CrossEntropyLoss()

    found = run(Net(), Outer())
    names = found.names
    for site in sites_of(Net()):
        if site.name:
            assert names[site.name] == f"network.{site.name}"
    assert "loss" in found.only_b


def test_renamed_modules():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(20, 8)
            self.h = nn.ModuleList(Block() for _ in range(3))
            self.ln_f = nn.LayerNorm(8)
            self.lm_head = nn.Linear(8, 20)

    found = run(Net(), Other())
    names = found.names
    assert names["embed"] == "tokens"
    assert names["norm"] == "ln_f"
    assert names["head.weight"] == "lm_head.weight"
    for index in range(3):
        assert names[f"layers.{index}"] == f"h.{index}"
        assert names[f"layers.{index}.v_proj.bias"] == f"h.{index}.v_proj.bias"
    assert not found.only_a


def test_an_inserted_operation_in_each_block():
    class Extra(Block):
        def __init__(self, width=8):
            super().__init__(width)
            self._modules = {"noop": nn.Identity(), **self._modules}

    other = Net()
    other.layers = nn.ModuleList(Extra() for _ in range(3))
    found = run(Net(), other)
    assert set(found.only_b) == {f"layers.{index}.noop" for index in range(3)}
    assert not found.only_a


def test_an_insertion_that_shifts_every_index():
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    shifted = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)
    )
    found = run(plain, shifted)
    assert found.only_b == ("2",)
    assert found.names["4.weight"] == "5.weight"
    assert found.names["2"] == "3"
    back = run(shifted, plain)
    assert back.only_a == ("2",)


def test_equal_layers_are_told_apart_by_what_they_held():
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    shifted = nn.Sequential(nn.Linear(4, 4), *copy.deepcopy(plain))
    prints = tuple(
        values | {name.rpartition(".")[0]: value for name, value in values.items() if name.endswith("weight")}
        for values in (prints_of(plain), prints_of(shifted))
    )
    found = run(plain, shifted, fingerprints=prints)
    for index in range(4):
        assert found.names[f"{index}.weight"] == f"{index + 1}.weight"
    assert set(found.only_b) == {"0", "0.weight", "0.bias"}


def test_removed_modules_and_parameters():
    other = Net()
    other.layers = nn.ModuleList(Block() for _ in range(2))
    other.head = nn.Linear(8, 20, bias=False)
    found = run(Net(), other)
    assert "head.bias" in found.only_a
    assert all(name.startswith("layers.2") or name == "head.bias" for name in found.only_a)
    assert not found.only_b


def test_lora_adapters():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base
            self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    model = Net()
    for block in model.layers:
        block.q_proj = Adapted(block.q_proj)
    inner = sites_of(model)
    wrapped = [
        Site(id=s.id, name=f"base_model.model.{s.name}", role=s.role, type=s.type, shape=s.shape)
        for s in inner
        if s.name
    ]
    found = run(Net(), wrapped)
    names = found.names
    assert names["layers.1.q_proj.weight"] == "base_model.model.layers.1.q_proj.base_layer.weight"
    assert names["layers.1.q_proj"] == "base_model.model.layers.1.q_proj"
    assert all("lora" in name or "base_layer" in name for name in found.only_b)
    assert found.only_a == ("",)


def test_fused_qkv_is_noted():
    class Fused(Block):
        def __init__(self, width=8):
            super().__init__(width)
            del self.q_proj, self.k_proj, self.v_proj
            self._modules = {"norm1": self.norm1, "qkv": nn.Linear(width, 3 * width), **self._modules}

    other = Net()
    other.layers = nn.ModuleList(Fused() for _ in range(3))
    found = run(Net(), other)
    fused = {each.whole: each.parts for each in found.fused}
    for index in range(3):
        for own in ("weight", "bias"):
            parts = tuple(f"layers.{index}.{name}.{own}" for name in ("q_proj", "k_proj", "v_proj"))
            assert fused[f"layers.{index}.qkv.{own}"] == parts
    back = run(other, Net())
    assert {each.whole_is_in for each in back.fused} == {"a"}
    assert len(back.fused) == 9
    assert {each.whole for each in back.fused} >= {f"layers.{index}.qkv" for index in range(3)}


def test_another_order():
    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 20)
            self.norm = nn.LayerNorm(8)
            self.layers = nn.ModuleList(Block() for _ in range(3))
            self.embed = nn.Embedding(20, 8)

    found = run(Net(), Swapped())
    assert not (found.only_a or found.only_b)
    assert all(unwrap(pair.a) == unwrap(pair.b) for pair in found.pairs if pair.a)
    moved = {pair.a for pair in found.pairs if pair.how == "moved"}
    assert {"embed", "norm"} <= moved


def test_transposed_weights_of_another_framework():
    theirs = [
        Site(0, "params", "module", "Transformer"),
        Site(1, "params.Embed_0", "module", "flax.linen.Embed"),
        Site(2, "params.Dense_0", "module", "flax.linen.Dense"),
        Site(3, "params.LayerNorm_0", "module", "flax.linen.LayerNorm"),
        Site(4, "params.Dense_1", "module", "flax.linen.Dense"),
        Site(5, "params.Embed_0.embedding", "parameter", "float32", shape=(20, 8)),
        Site(6, "params.Dense_0.kernel", "parameter", "float32", shape=(8, 16)),
        Site(7, "params.Dense_0.bias", "parameter", "float32", shape=(16,)),
        Site(8, "params.LayerNorm_0.scale", "parameter", "float32", shape=(16,)),
        Site(9, "params.LayerNorm_0.bias", "parameter", "float32", shape=(16,)),
        Site(10, "params.Dense_1.kernel", "parameter", "float32", shape=(16, 4)),
        Site(11, "params.Dense_1.bias", "parameter", "float32", shape=(4,)),
    ]
    ours = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    found = run(ours, theirs)
    assert found.names["1.weight"] == "params.Dense_0.kernel"
    assert found.names["2.weight"] == "params.LayerNorm_0.scale"
    assert found.names["3.bias"] == "params.Dense_1.bias"
    turned = {pair.a for pair in found.pairs if pair.is_transposed}
    assert turned == {"1.weight", "3.weight"}


def test_names_alone_are_enough():
    """Arrays of anything have names and nothing else."""
    first = [Site(i, name, "leaf") for i, name in enumerate(["x", "encoder.0", "encoder.1", "logits"])]
    second = [
        Site(i, name, "leaf") for i, name in enumerate(["x", "encoder.0", "encoder.extra", "encoder.1"])
    ]
    found = run(first, second)
    assert found.names == {"x": "x", "encoder.0": "encoder.0", "encoder.1": "encoder.1"}
    assert (found.only_a, found.only_b) == (("logits",), ("encoder.extra",))


def test_unlike_things_stay_alone():
    found = run([Site(0, "conv", "module", "Conv2d")], [Site(0, "attention", "module", "MultiheadAttention")])
    assert not found.pairs
    assert (found.only_a, found.only_b) == (("conv",), ("attention",))


def test_the_users_map_wins():
    a, b = sites_of(Net()), sites_of(Net())
    names = {"layers.0": "layers.2", "layers.2": "layers.0"}
    found = align(a, b, names=names)
    check_sound(a, b, found, ordered=False)
    assert found.names["layers.0"] == "layers.2"
    assert {pair.a for pair in found.pairs if pair.how == "map"} == {"layers.0", "layers.2"}


def test_the_map_is_written_and_read_back(tmp_path):
    strange = 'a "quoted" \\ name'
    a = [*sites_of(Net()), Site(99, strange, "module", "X"), Site(100, "alone", "module", "Conv2d")]
    b = [*sites_of(Net()), Site(99, f"module.{strange}", "module", "X"), Site(100, "other", "module", "RNN")]
    found = align(a, b)
    path = tmp_path / "names.toml"
    path.write_text(format_map(found), encoding="utf-8")
    assert read_map(path) == found.names
    text = path.read_text(encoding="utf-8")
    assert '# only in the first: "alone"' in text
    assert '# only in the second: "other"' in text
    again = align(a, b, names=expand_map(read_map(path), {s.name for s in a}, {s.name for s in b}))
    assert again.names == found.names


def test_stars_in_a_map():
    a, b = ["enc.0.w", "enc.1.w", "head"], ["encoder.0.w", "encoder.1.w", "top"]
    assert expand_map({"enc.*": "encoder.*", "head": "top"}, a, b) == {
        "enc.0.w": "encoder.0.w",
        "enc.1.w": "encoder.1.w",
        "head": "top",
    }


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            {"haed": "top"},
            "the first side has no site 'haed'\n  where: map.toml\n  next:  did you mean 'head'?",
        ),
        ({"head": "topp"}, "the second side has no site 'topp'"),
        ({"x.*": "y.*"}, "the first side has no site 'x.*'"),
        ({"*.*": "y"}, "'*.*' has more than one star"),
        ({"head": "top", "enc.0": "top"}, "'head' and 'enc.0' are both mapped to 'top'"),
    ],
)
def test_mistakes_in_a_map(names, text):
    with pytest.raises(UsageError) as caught:
        expand_map(names, ["enc.0", "head"], ["encoder.0", "top"], where="map.toml")
    assert text in str(caught.value)


@pytest.mark.parametrize("content", ["", "[names", "[names]\na = 1\n", 'names = "x"\n'])
def test_files_that_are_no_maps(tmp_path, content):
    (tmp_path / "m.toml").write_text(content)
    with pytest.raises(UsageError, match=r"\[names\]"):
        read_map(tmp_path / "m.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        read_map(tmp_path / "absent.toml")


KINDS = ("Linear", "ReLU", "LayerNorm", "Conv2d", "Dropout", "Embedding")
rows = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 4)), min_size=0, max_size=25)


def make_sites(kinds, *, wrap="") -> list[Site]:
    sites = []
    for index, (kind, size) in enumerate(kinds):
        name = f"{wrap}layers.{index}"
        sites.append(Site(len(sites), name, "module", kind))
        if kind in ("Linear", "Conv2d", "Embedding"):
            sites.append(Site(len(sites), f"{name}.weight", "parameter", "float32", shape=(8 * size, 8)))
            sites.append(Site(len(sites), f"{name}.bias", "parameter", "float32", shape=(8 * size,)))
    return sites


@settings(max_examples=60, deadline=None)
@given(rows, rows)
def test_any_two_lists_give_a_sound_alignment(first, second):
    run(make_sites(first), make_sites(second))


@settings(max_examples=40, deadline=None)
@given(rows, st.sampled_from(["", "module.", "_orig_mod.module."]))
def test_a_list_and_itself_under_any_wrapper(kinds, wrap):
    found = run(make_sites(kinds), make_sites(kinds, wrap=wrap))
    assert found.names == {site.name: wrap + site.name for site in make_sites(kinds)}


@settings(max_examples=60, deadline=None)
@given(rows, st.data())
def test_what_is_added_under_new_names_is_what_stays_alone(kinds, data):
    base = make_sites(kinds)
    places = data.draw(st.lists(st.integers(0, len(base)), max_size=6))
    longer = list(base)
    for number, place in enumerate(sorted(places, reverse=True)):
        longer.insert(place, Site(1000 + number, f"new.probe{number}", "module", "Identity"))
    expected = {site.name for site in longer} - {site.name for site in base}
    assert set(run(base, longer).only_b) == expected
    assert set(run(longer, base).only_a) == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.data())
def test_a_removed_layer_of_a_sequence_shifts_nothing(count, data):
    """In a row of different neighbours a removed one is found, though every later index changed."""
    first = [("Linear", size) for size in range(1, count + 1)]
    gone = data.draw(st.integers(0, len(first) - 1))
    second = first[:gone] + first[gone + 1 :]
    found = run(make_sites(first), make_sites(second))
    assert {name for name in found.only_a if name.endswith("weight")} == {f"layers.{gone}.weight"}


def test_most_of_a_thousand_renamed_sites_find_their_partner():
    first = make_sites([("Linear", 1 + index % 4) for index in range(500)])
    second = [
        Site(s.id, s.name.replace("layers", "blocks"), s.role, s.type, shape=s.shape)
        for s in first
        if s.id % 50
    ]
    found = run(first, second)
    assert len(found.pairs) > 0.9 * len(second)
