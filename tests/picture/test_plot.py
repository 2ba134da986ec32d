"""Numbers of runs as lines: ``clew.plot`` and ``clew plot``."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clew
from clew.cli import main
from clew.errors import ClewError
from clew.views.line_chart import Axes, Drawn, draw_lines, mean_over
from clew.views.scene import Line, Words


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plot") / "runs"
    for name, rate in (("slow", 0.01), ("fast", 0.2)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with clew.watch(model, optimizer, out=str(folder), name=name, every=1) as run:
            for step in range(12):
                x = torch.randn(8, 4)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                run.log(accuracy=step / 10)
    return folder


def test_runs_share_one_picture(root, tmp_path):
    chart = clew.plot("slow", "fast", root=root)
    assert [line.name for line in chart.lines] == ["slow", "fast"]
    loss = clew.open_run("fast", root=root).scalar("loss")
    np.testing.assert_array_equal(chart.lines[1].y, loss.values)
    tree = ET.fromstring(chart.save(tmp_path / "a.svg").read_text())
    assert len(tree.findall("{http://www.w3.org/2000/svg}polyline")) == 2
    assert chart.save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_names_tell_run_and_number_apart(root):
    chart = clew.plot("slow", "fast", scalar=["loss", "accuracy"], root=root)
    assert [line.name for line in chart.lines] == ["slow loss", "slow accuracy", "fast loss", "fast accuracy"]


def test_statistics_of_sites(root):
    chart = clew.plot("fast", site="0.*", kind="param", stat="l2", root=root)
    assert [line.name for line in chart.lines] == ["0.weight", "0.bias"]
    assert chart.axes.y_label == "param l2"


def test_the_time_of_a_step_is_the_sum_of_its_phases(root):
    run = clew.open_run("fast", root=root)
    phases = [series for name, series in run.scalars().items() if name.startswith("time.")]
    total = clew.plot(run, scalar="time").lines[0].y
    assert total.sum() == pytest.approx(sum(series.values.sum() for series in phases))


def test_over_time_the_axis_never_runs_back(root):
    line = clew.plot("fast", x="s", root=root).lines[0]
    assert (np.diff(line.x) > 0).all()
    assert clew.plot("fast", x="min", root=root).lines[0].x[-1] == pytest.approx(line.x[-1] / 60)


def test_the_terminal_at_80_columns(root, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plot", "fast", "--root", str(root), "--scalar", "accuracy"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[0] == "accuracy over step"
    assert out.splitlines()[-1].split() == ["accuracy", "12", "0", "1.1", "0", "0", "1.1"]


def test_the_numbers_as_json(root, capsys):
    assert main(["plot", "fast", "--root", str(root), "--scalar", "accuracy", "--mean", "5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["lines"] == [
        {
            "name": "accuracy",
            "x": [4, 9, 11],
            "y": [pytest.approx(0.2), pytest.approx(0.7), pytest.approx(1.05)],
        }
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scalar", "los"], "unknown scalar 'los'"),
        (["--site", "nothing*"], "no site"),
        (["-x", "day"], "x='day' is no axis"),
        (["--mean", "0"], "mean=0 is no number of values"),
        (["--x-range", "5:1"], "'5:1' is no range"),
        (["--y-range", "a:b"], "'a:b' is no range"),
        (["-o", "net.pdf"], "has no ending that can be drawn"),
        (["--log", "--linear"], "both --log and --linear"),
        (["--scalar", "loss", "--site", "0"], "a scalar has no site"),
    ],
)
def test_what_cannot_be_drawn_is_said(root, capsys, words, message):
    assert main(["plot", "fast", "--root", str(root), *words]) == 2
    assert message in capsys.readouterr().err


def test_too_many_lines_are_refused(root):
    with pytest.raises(ClewError, match="cannot be told apart"):
        clew.plot(*["fast"] * 25, root=root)


def _drawn(*values):
    return Drawn("line", np.arange(len(values), dtype=np.float64), np.array(values, np.float64))


def test_a_line_breaks_at_values_that_are_not_finite_and_marks_them():
    scene = draw_lines([_drawn(1, 2, math.nan, 2, 1, math.inf)], Axes())
    assert [len(shape.points) for shape in scene.shapes if isinstance(shape, Line)] == [2, 2]
    assert sum(isinstance(shape, Words) and shape.text == "×" for shape in scene.shapes) == 2


def test_a_long_line_keeps_its_extremes():
    values = np.ones(100_000)
    values[54_321] = 9
    scene = draw_lines([Drawn("spike", np.arange(100_000.0), values)], Axes())
    (line,) = [shape for shape in scene.shapes if isinstance(shape, Line)]
    assert len(line.points) < 2000
    tops = [y for _, y in line.points]
    assert min(tops) < max(tops) - 200


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30), st.booleans())
def test_any_values_can_be_drawn_inside_the_page(values, log):
    scene = draw_lines([_drawn(*values)], Axes(log=log))
    for shape in scene.shapes:
        if isinstance(shape, Line):
            assert all(0 <= x <= scene.width and 0 <= y <= scene.height for x, y in shape.points)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(1, 9))
def test_means_over_groups_weigh_every_value(values, every):
    y = np.array(values)
    x, means = mean_over(np.arange(len(y), dtype=np.float64), y, every)
    groups = [y[start : start + every] for start in range(0, len(y), every)]
    np.testing.assert_allclose(means, [group.mean() for group in groups], rtol=1e-9, atol=1e-6)
    assert x[-1] == len(y) - 1
