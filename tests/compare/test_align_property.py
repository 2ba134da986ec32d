"""Alignment under what happens to models: prefixes, insertions, removals, renamings, turned matrices, other orders."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from clew.compare.align import align
from clew.compare.weight_import import find_axes, plan_import
from clew.model.record import Site

KINDS = ("Linear", "LayerNorm", "GELU", "Conv2d")


def make_sites(blocks, *, prefix="", skip=(), extra=None):
    """Return the sites of a chain of blocks; ``extra`` puts a module of its own into each block."""
    sites = []

    def add(name, role, kind="", shape=()):
        sites.append(Site(len(sites), prefix + name, role, kind, shape=shape, order=len(sites)))

    for number, kinds in enumerate(blocks):
        if number in skip:
            continue
        add(f"blocks.{number}", "module", "my.Block")
        for index, kind in enumerate(kinds):
            name = f"blocks.{number}.part{index}"
            add(name, "module", f"torch.nn.{kind}")
            if kind in ("Linear", "Conv2d"):
                add(f"{name}.weight", "parameter", "float32", (8 + number, 4 + index))
                add(f"{name}.bias", "parameter", "float32", (8 + number,))
        if extra:
            add(f"blocks.{number}.{extra}", "module", "torch.nn.Identity")
    return sites


def hashes(sites):
    return {
        site.name: hash((site.shape, index)) | 1
        for index, site in enumerate(sites)
        if site.role == "parameter"
    }


chains = st.lists(st.lists(st.sampled_from(KINDS), min_size=2, max_size=4), min_size=2, max_size=4)


@settings(max_examples=40, deadline=None)
@given(chains)
def test_equal_models_pair_by_name(blocks):
    sites = make_sites(blocks)
    found = align(sites, sites)
    assert [(pair.a, pair.b) for pair in found.pairs] == [(site.name, site.name) for site in sites]
    assert found.only_a == found.only_b == ()


@settings(max_examples=40, deadline=None)
@given(chains, st.sampled_from(["model.", "module.", "_orig_mod.", "net.inner.", "base_model.model."]))
def test_a_prefix_changes_nothing(blocks, prefix):
    a, b = make_sites(blocks), make_sites(blocks, prefix=prefix)
    found = align(a, b)
    wrong = [pair for pair in found.pairs if pair.b != prefix + pair.a]
    assert wrong == []
    parameters = [site.name for site in a if site.role == "parameter"]
    assert not set(parameters) & set(found.only_a)


@settings(max_examples=40, deadline=None)
@given(chains)
def test_a_module_more_in_each_block_stays_alone(blocks):
    found = align(make_sites(blocks), make_sites(blocks, extra="noop"))
    assert found.only_a == ()
    assert set(found.only_b) == {f"blocks.{number}.noop" for number in range(len(blocks))}
    assert all(pair.a == pair.b for pair in found.pairs)


@settings(max_examples=40, deadline=None)
@given(chains, st.data())
def test_a_block_less_leaves_the_others_where_they_are(blocks, data):
    gone = data.draw(st.integers(0, len(blocks) - 1))
    found = align(make_sites(blocks), make_sites(blocks, skip=(gone,)))
    assert all(pair.a == pair.b for pair in found.pairs)
    assert all(name.startswith(f"blocks.{gone}") for name in found.only_a)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.data())
def test_blocks_that_moved_up_are_found_by_their_contents(count, data):
    at = data.draw(st.integers(0, count - 1))
    a = make_sites([["Linear", "GELU", "Linear"]] * count)
    b = []
    for site in a:
        parts = site.name.split(".")
        number = int(parts[1])
        parts[1] = str(number + (number >= at))
        b.append(Site(site.id, ".".join(parts), site.role, site.type, shape=site.shape, order=site.order))
    prints = hashes(a)
    moved = {site.name: other.name for site, other in zip(a, b, strict=True)}
    wanted = {name: value for name, value in prints.items() if moved[name] != name}
    found = align(a, b, fingerprints=(wanted, {moved[name]: value for name, value in wanted.items()}))
    assert found.names == moved


@given(st.integers(1, 6), st.integers(1, 6))
def test_kernels_of_other_frameworks_are_turned(rows, columns):
    assert find_axes("fc.kernel", (columns, rows), "fc.weight", (rows, columns)) == (1, 0)
    conv = find_axes("c.kernel", (3, 3, columns, rows), "c.weight", (rows, columns, 3, 3))
    assert conv == (2, 3, 1, 0)
    back = find_axes("c.weight", (rows, columns, 3, 5), "c.kernel", (3, 5, columns, rows))
    assert back == (3, 2, 0, 1)


def test_a_plan_says_what_has_no_partner():
    report = plan_import({"a.weight": (2, 3), "b.bias": (4,)}, {"a.weight": (2, 3), "z.bias": (7,)})
    assert [match.target for match in report.matched] == ["a.weight"]
    assert report.missing == ("b.bias",)
    assert report.unused == ("z.bias",)
    assert not report.is_complete
