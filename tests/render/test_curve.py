import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew.render.plot import draw
from clew.views.curve import thin

FLOATS = st.floats(width=64)


@given(st.lists(st.tuples(st.integers(0, 10**6), FLOATS), max_size=300, unique_by=lambda pair: pair[0]))
def test_thinning_keeps_extremes_and_every_trouble(points):
    points.sort()
    steps, values = [p[0] for p in points], [p[1] for p in points]
    curve = thin("loss", steps, values, buckets=20)
    finite = [value for value in values if math.isfinite(value)]
    assert len(curve.steps) <= 20 if len(points) > 20 else len(curve.steps) <= len(points)
    assert min((v for v in curve.low if v is not None), default=None) == min(finite, default=None)
    assert max((v for v in curve.high if v is not None), default=None) == max(finite, default=None)
    assert bool(curve.nonfinite) == (len(finite) < len(values))
    for low, mean, high in zip(curve.low, curve.mean, curve.high, strict=True):
        assert (
            mean is None or low <= mean <= high or mean == pytest.approx(low) or mean == pytest.approx(high)
        )


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), FLOATS), min_size=1, max_size=50, unique_by=lambda pair: pair[0]
    ),
    st.integers(10, 120),
    st.booleans(),
)
def test_a_plot_has_its_size_and_draws_something(points, width, unicode):
    points.sort()
    curve = thin("loss", [p[0] for p in points], [p[1] for p in points])
    plot = draw(curve, width=width, height=5, unicode=unicode)
    assert len(plot.lines) == 5
    drawn = "".join(plot.lines).translate({ord(c): None for c in " ┤|0123456789.e-"})
    assert bool(drawn) == any(math.isfinite(value) for _, value in points)
    assert bool(plot.marks) == bool(curve.nonfinite)


def test_steps_stand_where_they_belong_in_time():
    # The first 20 steps of a run are recorded densely, the rest thinly: equal distances would lie.
    steps = [*range(20), *range(100, 1001, 100)]
    curve = thin("loss", steps, [1.0] * 19 + [5.0] + [1.0] * 10)
    top = draw(curve, width=60, height=6).lines[0]
    peak = max(i for i, character in enumerate(top) if ord(character) >= 0x2800)
    assert peak < 10


def test_a_wide_range_is_drawn_on_a_log_scale():
    assert thin("loss", [0, 1], [1.0, 1000.0]).scale == "log"
    assert thin("loss", [0, 1], [1.0, 50.0]).scale == "linear"
    assert thin("loss", [0, 1], [-1.0, 1000.0]).scale == "linear"
    assert thin("loss", [], []).scale == "linear"
