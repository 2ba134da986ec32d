"""clew.checks and clew.on: patterns on a model, without touching its code."""

import collections
import dataclasses
import io
import json

import pytest
import torch
from fake_session import recording

import clew

NAN = float("nan")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x):
        return {"out": self.fc(x), "extra": (x * 2, None, "text")}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = Block()
        self.layer2 = Block()
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer2(self.layer1(x)["out"])["out"])


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


X = torch.ones(2, 4)


def hooks_on(net):
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in net.modules()
    ) + sum(len(p._post_accumulate_grad_hooks or {}) + len(p._backward_hooks or {}) for p in net.parameters())


def run_checked(net, table=None, **options):
    with pytest.raises(clew.CheckError) as caught, clew.checks(net, table, **options):
        net(X).sum().backward()
    assert hooks_on(net) == 0
    return caught.value


def test_without_a_table_every_output_has_to_be_finite(net):
    with clew.checks(net) as on:
        net(X)
    assert on.calls == 6
    net.layer2.fc.weight.data[0, 0] = NAN
    error = run_checked(net)
    assert str(error).startswith(
        "layer2.fc must be finite: 2 of 8 elements are not\n  [0, 0] = nan, [1, 0] = nan"
    )
    assert error.details["site"] == "layer2.fc"
    assert "self.fc(x)" in error.where
    assert error.next_step == "clew.pprint(model, x) shows what goes into it"


def test_the_table_of_the_documentation(net):
    table = {"layer*": "finite", "head": ["finite", ("in_range", -10, 10)]}
    with clew.checks(net, table) as on:
        net(X).sum().backward()
    assert on.sites == ("layer1", "layer1.fc", "layer2", "layer2.fc", "head")
    net.head.weight.data.fill_(100.0)
    net.head.bias.data.fill_(1000.0)
    assert "head must be in [-10, 10]" in str(run_checked(net, table))


@pytest.mark.parametrize(
    ("pattern", "sites"),
    [
        ("layer?", ("layer1", "layer2")),
        ("{layer1,head}", ("layer1", "head")),
        ("layer*,!*.fc", ("layer1", "layer2")),
        ("(Net)", ("(Net)",)),
        ("*.fc.weight", ("layer1.fc.weight", "layer2.fc.weight")),
        ("head.{weight,bias}", ("head.weight", "head.bias")),
    ],
)
def test_patterns(net, pattern, sites):
    with clew.checks(net, {pattern: "finite"}) as on:
        assert on.sites == sites
        net(X)


def test_each_leaf_of_an_output_has_its_name(net):
    error = run_checked(net, {"layer1": ("in_range", -1.9, 1.9)})
    assert error.details["name"] == "layer1[extra][0]"


def test_gradients_at_outputs(net):
    error = run_checked(net, {"layer1.fc@grad": ("in_range", 0, 0)})
    assert error.details["name"] == "layer1.fc@grad"
    with clew.checks(net, {"*@grad": "finite"}) as on:
        net(X).sum().backward()
    assert on.calls > 0


def test_parameters_and_their_gradients(net):
    error = run_checked(net, {"head.bias@grad": ("less", 0)})
    assert error.details["name"] == "head.bias@grad"
    net.head.weight.data[1, 1] = NAN
    error = run_checked(net, {"head.weight": "finite"})
    assert str(error).startswith("head.weight must be finite: 1 of 8 elements is not\n  [1, 1] = nan")


def test_parameters_are_looked_at_once_more_at_the_end(net):
    with (
        pytest.raises(clew.CheckError, match=r"head\.weight must be finite"),
        clew.checks(net, {"head.weight": "finite"}),
    ):
        net(X)
        net.head.weight.data[0, 0] = NAN
    assert hooks_on(net) == 0


def test_a_function_of_the_users_is_a_check_too(net):
    seen = []
    with clew.checks(net, {"head": seen.append}):
        net(X)
    assert seen[0].shape == (2, 2)


def test_names_of_dimensions_bind_across_sites(net):
    table = {"layer1.fc": ("shape", "B D"), "head": ("shape", "B 2")}
    with clew.checks(net, table):
        net(X)
        net(torch.ones(5, 4))


def test_failures_can_be_recorded_instead(net):
    net.layer1.fc.weight.data[0, 0] = NAN
    with recording() as session, clew.checks(net, warn=True):
        net(X)
    assert [note["site"] for _, note in session.notes] == [
        "layer1.fc", "layer1[out]", "layer2.fc", "layer2[out]", "layer2[extra][0]", "head", "(Net)"
    ]  # fmt: skip
    assert [note["count"] for _, note in session.notes][:2] == [2, 2]
    json.dumps(session.notes, allow_nan=False)


NAMES = "there are: (Net), layer1, layer1.fc, layer2, layer2.fc, …"


@pytest.mark.parametrize(
    ("table", "what", "next_step"),
    [
        ({"laye": "finite"}, "no module or parameter is called 'laye'", "did you mean 'layer2'?"),
        ({"layer3.*": "finite"}, "no module or parameter is called 'layer3.*'", "did you mean 'layer2'?"),
        (
            {"head.weigth@grad": "finite"},
            "no module or parameter is called 'head.weigth'",
            "did you mean 'head.weig",
        ),
        ({"zzz": "finite"}, "no module or parameter is called 'zzz'", NAMES),
        ({"layer1,zzz": "finite"}, "no module is called 'zzz'", NAMES),
        ({"head": "finit"}, "unknown check 'finit'", "did you mean 'finite'?"),
        ({"head": 3}, "unknown check 3", "known checks: finite, positive"),
        (
            {"head": "less"},
            "the check 'less' cannot take (): missing a required argument: 'other'",
            "write it as",
        ),
        (
            {"head": ("finite", 1)},
            "the check 'finite' cannot take (1,): too many positional arguments",
            "write it",
        ),
        (
            {"{head": "finite"},
            "the pattern '{head' has a brace without its partner",
            "write alternatives as {a,b}",
        ),
    ],
)
def test_bad_tables_are_refused_with_a_hint(net, table, what, next_step):
    with pytest.raises(clew.ClewError) as caught:
        clew.checks(net, table)
    assert caught.value.what == what
    assert caught.value.next_step.startswith(next_step)
    assert hooks_on(net) == 0


@pytest.mark.parametrize(
    ("model", "table", "what"),
    [
        (3, None, "expected a torch.nn.Module, got a int"),
        (torch.nn.ReLU(), "finite", "clew.checks takes a table from patterns to checks, not 'finite'"),
        (torch.nn.ReLU(), {}, "clew.checks takes a table from patterns to checks, not {}"),
    ],
)
def test_what_is_no_model_or_no_table_is_refused(model, table, what):
    with pytest.raises(clew.ClewError) as caught:
        clew.checks(model, table)
    assert caught.value.what == what


def test_an_exception_of_the_model_passes_and_hooks_go(net, capsys):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), clew.checks(net):
        net(torch.ones(2, 5))
    assert hooks_on(net) == 0
    assert capsys.readouterr().err == ""


def test_sites_that_never_ran_are_told(net, capsys):
    with clew.checks(net):
        pass
    assert capsys.readouterr().err.startswith("clew: clew.checks: none of the 6 sites ran")


def test_a_model_can_be_pickled_meanwhile(net):
    with clew.checks(net):
        data = io.BytesIO()
        torch.save(net, data)
        data.seek(0)
        twin = torch.load(data, weights_only=False)
        net(X)
    twin.head.weight.data.fill_(NAN)
    assert twin(X).isnan().all()


# ---------------------------------------------------------------- on


def test_on_sees_values_and_sites(net):
    seen = []
    with clew.on("layer*", lambda value, site: seen.append((site, tuple(value.shape))), model=net):
        net(X)
    assert [site for site, _ in seen] == [
        "layer1.fc", "layer1[out]", "layer1[extra][0]", "layer2.fc", "layer2[out]", "layer2[extra][0]"
    ]  # fmt: skip
    assert {shape for _, shape in seen} == {(2, 4)}
    assert hooks_on(net) == 0


def test_on_takes_functions_that_want_the_value_alone(net):
    seen = []
    with clew.on(["head", "layer1.fc"], seen.append, model=net):
        net(X)
    assert [tuple(each.shape) for each in seen] == [(2, 4), (2, 2)]


def test_on_replaces_inside_any_container(net):
    with clew.on(
        "layer2", lambda v, site: torch.zeros_like(v) if site.endswith("[out]") else None, model=net
    ):
        out = net(X)
    assert torch.equal(out, net.head.bias.expand(2, 2))


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    hidden: list


def test_containers_keep_their_type():
    class Many(torch.nn.Module):
        def forward(self, x):
            return Output(x, [Pair(x, {"k": x}), (x, 3)])

    with clew.on(
        "*", lambda v, site: v + 1 if "[b]" in site or "logits" in site else None, model=Many()
    ) as on:
        pass
    net = Many()
    on = clew.on("*", lambda v, site: v + 1 if "[b]" in site or "logits" in site else None, model=net)
    out = net(torch.zeros(1))
    on.remove()
    assert isinstance(out, Output)
    assert out.logits.item() == 1
    pair, plain = out.hidden
    assert isinstance(pair, Pair)
    assert (pair.a.item(), pair.b["k"].item()) == (0, 1)
    assert plain[0].item() == 0
    assert plain[1] == 3


def test_a_replacement_has_to_fit(net):
    with pytest.raises(clew.ClewError) as caught, clew.on("head", lambda v: v.mean(), model=net):
        net(X)
    assert caught.value.what == "a tap returned float32[] grad in the place of float32[2, 2] grad"
    assert caught.value.where == "head"


def test_gradients_can_be_seen_and_replaced(net):
    seen = []
    with clew.on("*", lambda g, site: seen.append(site), phase="backward", model=net):
        net(X).sum().backward()
    assert seen == ["head", "(Net)", "layer2.fc", "layer2[out]", "layer1.fc", "layer1[out]"]
    net.zero_grad()
    with clew.on("layer2.fc", torch.zeros_like, phase="backward", model=net):
        net(X).sum().backward()
    assert net.layer2.fc.weight.grad.abs().sum() == 0
    assert net.head.weight.grad.abs().sum() > 0


def test_a_gradient_after_the_end_is_nobodys_business(net):
    seen = []
    with clew.on("head", seen.append, phase="backward", model=net):
        out = net(X)
    out.sum().backward()
    assert seen == []


def test_a_parameter_that_is_put_out_keeps_no_hook():
    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self):
            return self.weight

    table, seen = Table(), []
    with clew.on("*", seen.append, phase="backward", model=table):
        table().sum().backward()
    assert len(seen) == 1
    assert hooks_on(table) == 0


def test_without_a_model_every_module_counts_by_its_path(net):
    seen = []
    handle = clew.on("{layer1*,(Net)}", lambda v, site: seen.append(site))
    net(X)
    handle.remove()
    handle.remove()
    net(X)
    assert seen == ["layer1.fc", "layer1[out]", "layer1[extra][0]", "(Net)"]
    other = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with clew.on("0", lambda v, site: seen.append(site)):
        other(X)
    assert seen[-1] == "0"


def test_without_a_model_gradients_and_exceptions_work_too(net):
    seen = []
    with clew.on("head", lambda g, site: seen.append(site), phase="backward"):
        with pytest.raises(RuntimeError):
            net(torch.ones(2, 5))
        net(X).sum().backward()
    assert seen == ["head"]


def look(value):
    """Do nothing with a value."""


ON = 'clew.on("layer3.*", print, model=model)'


@pytest.mark.parametrize(
    ("args", "options", "what", "next_step"),
    [
        (("haed", print), {"model": True}, "no module is called 'haed'", "did you mean 'head'?"),
        (
            ("head", print),
            {"phase": "foward", "model": True},
            "unknown phase 'foward'",
            "did you mean 'forward'?",
        ),
        (("head", 3), {}, "clew.on takes patterns and a function, not a str and a int", ON),
        ((torch.nn.ReLU(), look), {}, "clew.on takes patterns and a function, not a ReLU and a function", ON),
    ],
)
def test_on_refuses_what_it_cannot_do(net, args, options, what, next_step):
    if "model" in options:
        options = {**options, "model": net}
    with pytest.raises(clew.ClewError) as caught:
        clew.on(*args, **options)
    assert (caught.value.what, caught.value.next_step) == (what, next_step)


def test_a_print_on_a_site(net, capsys):
    with clew.on("head", lambda t: clew.print(t, "head"), model=net):
        net(X)
    assert capsys.readouterr().out.startswith("head:  float32[2, 2]")
