"""Watchpoints: the language, the seventeen conditions, previous steps, what is not judged, and what a hit does."""

import math

import numpy as np
import pytest
import torch
from loops import blobs, fit, mlp
from torch import nn

import clew
from clew.doctor.case import Case
from clew.doctor.watch_condition import CONDITIONS, RECOMMENDED
from clew.doctor.watch_language import parse_watch
from clew.doctor.watchpoint import Watcher
from clew.errors import UsageError
from clew.model.record import Site, StepRecord
from clew.model.schema import KIND_INDEX
from clew.stats.reference import histogram, summarise

SITES = {
    "fc1": Site(0, "fc1", "module", type="torch.nn.modules.linear.Linear"),
    "act": Site(1, "act", "module", type="torch.nn.modules.activation.ReLU"),
    "fc1.weight": Site(2, "fc1.weight", "parameter", parent=0, trainable=True),
    "fc2.weight": Site(3, "fc2.weight", "parameter", trainable=True),
}


def record(step, *rows):
    """Make the record of a step from (site, kind, array)."""
    return StepRecord(
        step=step,
        sites=np.array([SITES[site].id for site, _, _ in rows], np.int32),
        kinds=np.array([KIND_INDEX[kind] for _, kind, _ in rows], np.int8),
        ordinals=np.zeros(len(rows), np.int16),
        modes=np.zeros(len(rows), np.int8),
        values=np.stack([summarise(np.asarray(array, np.float64)) for _, _, array in rows]),
        hists=np.stack([histogram(np.asarray(array, np.float64)) for _, _, array in rows]),
    )


def watch(text, *steps):
    """Return the watcher after it has seen steps, each a list of (site, kind, array)."""
    watcher, case = Watcher([text]), Case()
    case.add_sites(SITES.values())
    for step, rows in enumerate(steps):
        watcher.see(case, record(step, *rows))
    return watcher


def hits(text, *steps):
    return [(hit.step, hit.site, hit.kind) for hit in watch(text, *steps).hits.values()]


ONE = [("fc1", "output", [1.0, -2.0, 0.0, 4.0])]


@pytest.mark.parametrize(
    ("text", "fires"),
    [
        ("*:output max > 3", True),
        ("*:output max>4", False),
        ("fc*:output l2 > 4 and zero == 1", True),
        ("fc*:output l2 > 4 and not zero == 1", False),
        ("*:output nan > 0 or abs_max >= 4", True),
        ("*:output 1 < max <= 4", True),
        ("*:output max - min > 5", True),
        ("*:output range > 5", True),
        ("*:output zero_percentage >= 25", True),
        ("*:output rms > 2.2", True),
        ("*:output -min > 1", True),
        ("*:grad max > 3", False),
        ("act:output max > 3", False),
        ("!fc*:output max > 3", False),
        ("@Linear:output max > 3", True),
        ("@ReLU:output max > 3", False),
        ("*:{grad,output} max > 3", True),
        ("abs_mean * 2 > 3", True),
        ("*:output 1 / zero > 0.5", True),
    ],
)  # fmt: skip
def test_the_language(text, fires):
    assert hits(text, ONE) == ([(0, "fc1", "output")] if fires else [])


def test_a_hit_has_preset_and_actual_values():
    (hit,) = watch("*:output abs_max > 1e4 or max > 3", ONE).hits.values()
    assert hit.values == {"max > 3": {"preset": 3.0, "actual": 4.0}}


def test_previous_step():
    steps = [[("fc1", "grad_output", [scale, scale])] for scale in (1.0, 1.5, 40.0, 41.0)]
    watcher = watch("*:grad_output l2 > 10 * prev.l2", *steps)
    (hit,) = watcher.hits.values()
    assert hit.step == 2
    assert "no recorded step before" in watcher.not_checked()[0].why


def test_a_site_is_told_once_and_counted():
    watcher = watch("*:output max > 3", ONE, ONE, ONE)
    (finding,) = watcher.findings()
    assert (finding.step, finding.evidence["hits"], finding.evidence["last_step"]) == (0, 3, 2)
    assert finding.id == "W1"


def test_nan_is_left_to_overflow_conditions():
    bad = [("fc1", "output", [math.nan, 9.0])]
    watcher = watch("*:output max > 3", bad)
    assert not watcher.hits
    assert "only overflow conditions" in watcher.not_checked()[0].why
    assert hits("*:output nan > 0", bad)
    assert hits("TO", bad)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("*:outputs max>3", "did you mean 'output'?"),
        ("*:output maxx>3", "did you mean 'max'?"),
        ("*:output max", "compare it: max > 0"),
        ("*:output max >", "cannot be read"),
        ("*:output __import__('os').system('true') > 0", "not part of the language"),
        ("*:output max.real > 0", "not part of the language"),
        ("*:output [l2 for x in y] > 0", "not part of the language"),
        ("*:output max > 'a'", "not part of the language"),
        ("GV", "set one of abs_mean_lt"),
        ("GV(abs_mean_gt=1)", "did you mean 'abs_mean_lt'?"),
        ("GW(abs_mean_lt=1)", "unknown condition 'GW'"),
        ("AR(range_percentage_lt=1)", "both ends of its range"),
        ("TZ(zero_percentage_ge=101)", "0 to 100"),
        ("WCL(abs_mean_update_ratio_gt=-1)", "0 or more"),
        ("TR(max_min_lt=0)", "above 0"),
        ("TZ(100)", "by name"),
        ("{a:output max>3", "brace without its partner"),
        ("x" * 600, "longer than"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(text, words):
    with pytest.raises(UsageError) as caught:
        parse_watch(text)
    assert words in str(caught.value)


# ---------------------------------------------------------------- the seventeen conditions


def weight(before, after):
    change = np.asarray(after, float) - np.asarray(before, float)
    return [("fc1.weight", "param", before), ("fc1.weight", "update", change)]


def output(*values):
    return [("act", "output", values)]


def gradient(*values):
    return [("fc2.weight", "grad", values)]


NAN, INF = math.nan, math.inf
CASES = [
    ("WI", weight([0, 0], [1, 1]), weight([0, 1], [1, 1])),
    ("WI(max_gt=2)", weight([3, 1], [1, 1]), weight([1, 1], [1, 1])),
    ("WI(min_lt=-2)", weight([-3, 1], [1, 1]), weight([-1, 1], [1, 1])),
    ("WO", weight([NAN, 1], [1, 1]), weight([1, 1], [1, 1])),
    ("WL(abs_mean_gt=2)", weight([-3, 3], [1, 1]), weight([-1, 1], [1, 1])),
    ("WL(min_gt=2)", weight([3, 4], [1, 1]), weight([1, 9], [1, 1])),
    ("WS(abs_mean_lt=0.5)", weight([0.1, -0.1], [1, 1]), weight([1, 1], [1, 1])),
    ("WS(mean_lt=0)", weight([-2, 1], [1, 1]), weight([2, 1], [1, 1])),
    ("WNC", weight([1, 2], [1, 2]), weight([1, 2], [1, 2.1])),
    ("WNC(rtol=0.2)", weight([1, 2], [1, 2.1]), weight([1, 2], [1, 2.9])),
    ("WNC(rtol=0, atol=0.2)", weight([1, 2], [1, 2.1]), weight([1, 2], [1, 2.9])),
    ("WCL", weight([1, 1], [1.2, 1.2]), weight([1, 1], [1.05, 1.05])),
    ("WCL(abs_mean_update_ratio_gt=1, epsilon=1)", weight([1, 1], [4, 4]), weight([1, 1], [2.5, 2.5])),
    ("WCS", weight([1, 1], [1 + 1e-5, 1]), weight([1, 1], [1.1, 1])),
    ("GV(abs_mean_lt=1e-9)", gradient(1e-10, -1e-10), gradient(1e-3, 0)),
    ("GL(max_gt=100)", gradient(101.0, 0), gradient(99.0, 0)),
    ("GE", gradient(INF, 0), gradient(1e30, 0)),
    ("AR(range_start_inclusive=-1, range_end_inclusive=0, range_percentage_gt=99.9)", output(0, 0, 0), output(0, 0, 3)),
    ("AR(range_start_inclusive=0, range_end_inclusive=8, range_percentage_lt=50)", output(-3, -5, 2), output(1, 2, -9)),
    ("AR(max_min_gt=5)", output(-3, 3), output(-2, 2)),
    ("TR(max_min_lt=0.5)", output(1, 1.1), output(1, 2)),
    ("TO", output(-INF, 0), output(1, 0)),
    ("OO", output(NAN, 0), output(1, 0)),
    ("TL(mean_gt=2)", output(3, 3), output(3, 0)),
    ("TS(max_lt=0)", output(-1, -2), output(-1, 2)),
    ("TZ", output(0, 0), output(0, 1e-30)),
    ("TZ(zero_percentage_ge=50)", output(0, 1), output(1, 1, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "bad", "good"), CASES)
def test_conditions(text, bad, good):
    assert len(hits(text, bad)) == 1
    assert hits(text, good) == []


def test_every_condition_has_a_case():
    tried = {CONDITIONS[text.partition("(")[0]].id for text, _, _ in CASES}
    assert tried == {each.id for each in CONDITIONS.values()}
    assert len(tried) == 17


def test_conditions_go_by_both_names():
    assert (
        parse_watch("gradient_vanishing(abs_mean_lt=1e-9)").condition
        is parse_watch("GV(abs_mean_lt=1)").condition
    )


def test_initial_weights_are_judged_once():
    zero = weight([0, 0], [0, 0])
    assert hits("WI", weight([1, 1], [0, 0]), zero) == []


def test_any_parameter_that_is_set_fires():
    (hit,) = watch("WL(max_gt=2, mean_gt=100)", weight([3, 1], [3, 1])).hits.values()
    assert hit.values == {"max_gt": {"preset": 2.0, "actual": 3.0}}


def test_only_the_operation_that_made_the_overflow():
    rows = [("fc1", "output", [1.0, 2.0]), ("act", "output", [INF, 1.0]), ("fc1", "grad_output", [NAN, 1.0])]
    assert hits("OO", rows) == [(0, "act", "output")]
    assert len(hits("TO", rows)) == 2


def test_a_share_without_a_histogram_is_not_judged():
    watcher, case = (
        Watcher(["AR(range_start_inclusive=0, range_end_inclusive=1, range_percentage_lt=50)"]),
        Case(),
    )
    case.add_sites(SITES.values())
    watcher.see(case, StepRecord(**{**vars_of(record(0, *output(1.0, 2.0))), "hists": None}))
    assert "no histogram" in watcher.not_checked()[0].why


def vars_of(thing):
    return {name: getattr(thing, name) for name in type(thing).__dataclass_fields__}


# ---------------------------------------------------------------- on runs


def nan_at(steps, x_of=blobs):
    def change(step, x, y):
        if step in steps:
            x[0, 0] = NAN
        return x, y

    return change


def test_recommended_is_silent_on_a_healthy_run(judge):
    judged = judge(lambda: fit(mlp(activation=nn.Tanh)))
    found = clew.diagnose(str(judged.path), watch="recommended")
    assert [finding.id for finding in found.findings] == []
    assert len([id for id in found.checked if id.startswith("W")]) == 7
    missing = [each.why for each in found.not_checked if each.id.startswith("W")]
    assert [why.partition(":output")[0] for why in missing] == [
        "nothing that was recorded fits '@Sigmoid",
        "nothing that was recorded fits '@ReLU*",
    ]
    assert len(RECOMMENDED) == 9


def test_recommended_names_dead_relus_and_zero_weights(judge):
    def train():
        model = mlp()
        with torch.no_grad():
            model[0].bias.fill_(-50)
            model[2].bias.fill_(0)
        fit(model, steps=12)

    judged = judge(train)
    found = clew.diagnose(str(judged.path), watch=["recommended"]).findings
    rules = {finding.rule.partition(" AR")[0] for finding in found}
    assert "watch @ReLU*:output" in rules
    assert "watch *:{output,grad_output,grad} TZ" in rules
    assert "watch WI" in rules


def test_live_and_stored_hits_are_the_same(judge, capsys):
    text = [
        "0*:grad l2 > 0.05",
        "*:output AR(range_start_inclusive=0, range_end_inclusive=100, range_percentage_gt=60)",
    ]
    judged = judge(lambda: fit(mlp(), steps=12), watch=text, doctor=False)
    stored = clew.diagnose(str(judged.path), watch=text)
    hits = {(f.id, f.site, f.step, f.evidence["hits"]) for f in stored.findings if f.id.startswith("W")}
    live = {(f["id"], f["site"], f["step"], f["evidence"]["hits"]) for f in judged.live}
    assert live == hits
    assert {id for id, *_ in hits} == {"W1", "W2"}


def test_a_wrong_watchpoint_is_told_before_anything_runs(tmp_path):
    with pytest.raises(UsageError, match="unknown statistic"):
        clew.watch(out=str(tmp_path), watch="*:output mox>3")
    assert not list(tmp_path.iterdir())


def test_a_place_that_fits_nothing_is_said_so(judge):
    judged = judge(lambda: fit(mlp()), watch=["fcc*:grad l2 > 0", "acuracy:scalar value > 0"], doctor=False)
    found = clew.diagnose(str(judged.path), watch=["fcc*:grad l2 > 0", "acuracy:scalar value > 0"])
    whys = [each.why for each in found.not_checked if each.id.startswith("W")]
    assert whys == [
        "nothing that was recorded fits 'fcc*:grad l2 > 0'",
        "nothing that was recorded fits 'acuracy:scalar value > 0'",
    ]
    assert not {"W1", "W2"} & set(found.checked)


def test_numbers_of_a_step_are_judged_at_every_step(judge):
    texts = ["loss:scalar value > 0", "loss:scalar value < prev.value", "loss:scalar nonfinite > 0"]
    judged = judge(
        lambda: fit(mlp(), steps=12, change=nan_at({10})), watch=texts, doctor=False, every=4, warmup=0
    )
    stored = [f for f in clew.diagnose(str(judged.path), watch=texts).findings if f.id.startswith("W")]
    assert [(f["id"], f["site"], f["evidence"]) for f in judged.live] == [
        (f.id, f.site, f.evidence) for f in stored
    ]
    by_id = {finding.id: finding for finding in stored}
    assert by_id["W1"].evidence["hits"] == 10
    assert by_id["W3"].step == 10
