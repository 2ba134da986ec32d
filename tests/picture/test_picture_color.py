"""Colours that mean something: kinds of operations, health, a statistic; readable in both themes."""

import math

import pytest
from synthetic_graph import Maker

from clew.errors import UsageError
from clew.views.graph_color import _RAMP, CATEGORIES, HEALTHS, categorize, choose_coloring
from clew.views.graph_tree import build_tree
from clew.views.scene import DARK, LIGHT


@pytest.mark.parametrize(
    ("op", "category"),
    [
        ("conv2d", "conv"), ("conv_transpose1d", "conv"), ("Conv3d", "conv"),
        ("linear", "linear"), ("matmul", "linear"), ("addmm", "linear"), ("embedding", "linear"), ("LSTM", "linear"),
        ("batch_norm", "norm"), ("LayerNorm", "norm"), ("rms_norm", "norm"),
        ("relu", "activation"), ("gelu", "activation"), ("log_softmax", "activation"), ("ReLU", "activation"),
        ("sigmoid", "activation"), ("tanh", "activation"), ("leaky_relu_", "activation"),
        ("max_pool2d", "pool"), ("adaptive_avg_pool2d", "pool"), ("interpolate", "pool"),
        ("add", "arithmetic"), ("add_", "arithmetic"), ("mul", "arithmetic"), ("pow", "arithmetic"),
        ("mean", "arithmetic"), ("div", "arithmetic"), ("sqrt", "arithmetic"), ("log", "arithmetic"),
        ("scaled_dot_product_attention", "attention"), ("multi_head_attention_forward", "attention"),
        ("view", "other"), ("cat", "other"), ("dropout", "other"), ("getitem", "other"), ("transpose", "other"),
        ("mylib::thing", "other"), ("mylib::conv_fused", "conv"),
    ],
)  # fmt: skip
def test_operations_are_coloured_by_kind(op, category):
    assert categorize(op) == category


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    bright, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


FILLS = [*CATEGORIES, *HEALTHS, "box", "param", "buffer", "end", "paper", "frame-fill", "frame-fill-2"]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("fill", FILLS)
def test_text_is_readable_on_every_box(theme, fill):
    assert contrast(theme["ink"], theme[fill]) >= 7
    assert contrast(theme["quiet"], theme[fill]) >= 4.5


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("name", [*CATEGORIES, *HEALTHS, "param", "box", "end"])
def test_outlines_stand_out_from_the_page(theme, name):
    least = 2.2 if name == "unknown" else 3
    assert contrast(theme[f"{name}-line"], theme["paper"]) >= least


def test_both_themes_have_the_same_roles():
    assert set(LIGHT) == set(DARK)


def graph_with(*all_stats):
    m = Maker()
    x = m.input("x", (2,))
    for stats in all_stats:
        x = m.op("sin", [x], (2,), stats=stats)
    return m.finish(x)


def paints(graph, color):
    rule = choose_coloring(graph, color)
    return [rule.paint(box) for box in build_tree(graph).children if box.kind == "op"], rule


FINE = {"nan": 0, "pos_inf": 0, "neg_inf": 0, "min": -1.0, "max": 1.0, "abs_max": 1.0, "std": 0.5}


def test_health_names_the_worst_first():
    found, rule = paints(
        graph_with(
            FINE,
            {**FINE, "nan": 3},
            {**FINE, "pos_inf": 1},
            {**FINE, "min": 0.0, "max": 0.0, "abs_max": 0.0},
            {**FINE, "max": 2e4, "abs_max": 2e4},
            {**FINE, "nan": 2, "min": math.nan, "max": math.nan, "abs_max": math.nan},
            None,
        ),
        "health",
    )
    assert [paint.fill for paint in found] == ["good", "bad", "bad", "dead", "warn", "bad", "unknown"]
    assert [entry.text for entry in rule.legend()] == list(HEALTHS.values())


def test_a_closed_group_answers_for_its_worst_operation():
    m = Maker()
    x = m.input("x", (2,))
    m.module("a", "Net")
    for stats in (FINE, {**FINE, "nan": 1}, FINE):
        x = m.op("sin", [x], (2,), site="a", stats=stats)
    graph = m.finish(x)
    (group,) = (box for box in build_tree(graph).children if box.kind == "module")
    assert choose_coloring(graph, "health").paint(group).fill == "bad"
    assert choose_coloring(graph, "std").paint(group).reason == "std 0.5"


def test_a_statistic_goes_from_light_to_dark():
    found, rule = paints(graph_with(*({**FINE, "std": value} for value in (0.1, 0.2, 0.4, 0.8))), "std")
    steps = [_RAMP.index(paint.fill) for paint in found]
    assert steps == sorted(steps)
    assert steps[0] == 0
    assert steps[-1] == len(_RAMP) - 1
    assert found[1].note == "std 0.2"
    assert rule.legend()[0].text == "from 0.1"


def test_a_statistic_over_many_magnitudes_is_shown_by_magnitude():
    found, _ = paints(graph_with(*({**FINE, "std": 10.0**power} for power in range(-6, 1))), "std")
    assert len({paint.fill for paint in found}) == 7


def test_text_is_readable_on_the_whole_ramp():
    values = [{**FINE, "std": 1 + step / 10} for step in range(8)]
    for paint in paints(graph_with(*values), "std")[0]:
        assert contrast(paint.ink, paint.fill) >= 4.5, paint


def test_equal_values_and_nonfinite_values_have_a_colour():
    found, rule = paints(graph_with({**FINE, "std": 0.5}, {**FINE, "std": 0.5}), "std")
    assert {paint.fill for paint in found} == {_RAMP[0]}
    assert len(rule.legend()) == 1
    found, rule = paints(graph_with({**FINE, "std": math.nan}, None, {**FINE, "std": 1.0}), "std")
    assert [paint.fill for paint in found] == ["bad", "unknown", _RAMP[0]]
    assert [entry.text for entry in rule.legend()] == ["from 1", "not finite", "not measured"]


def test_an_unknown_statistic_is_an_error_with_the_nearest():
    with pytest.raises(UsageError) as caught:
        choose_coloring(graph_with(FINE), "stdd")
    assert (
        str(caught.value) == "no statistic 'stdd' to colour by\n  where: model\n  next:  did you mean 'std'?"
    )
