"""Checks on values: what passes, what fails, and everything the error says."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clew

NAN, INF = float("nan"), float("inf")


def failure(check, *args, **kwargs):
    with pytest.raises(clew.CheckError) as caught:
        check(*args, **kwargs)
    return caught.value


def offenders(error):
    return [(tuple(each["index"]), each["value"]) for each in error.details["offenders"]]


PASSING = [
    ("finite", ([0.0, -1e38, 3.0],)),
    ("positive", ([1e-30, INF],)),
    ("non_negative", ([0.0, 2.0],)),
    ("negative", ([-1e-30, -INF],)),
    ("non_positive", ([0.0, -2.0],)),
    ("equal", ([1.0, INF], [1.0, INF])),
    ("less", ([1.0, 2.0], 2.5)),
    ("less_equal", ([1.0, 2.5], 2.5)),
    ("in_range", ([-1.0, 1.0], -1, 1)),
    ("integer", ([1.0, -3.0, 2e20],)),
    ("non_decreasing", ([1.0, 1.0, 2.0],)),
    ("strictly_increasing", ([1.0, 1.5, 2.0],)),
    ("probabilities", ([0.25, 0.75],)),
    ("rows_differ", ([1.0, 1.0, 2.0],)),
]

FAILING = [
    ("finite", ([1.0, INF, NAN, -INF],), [1, 2, 3]),
    ("positive", ([1.0, 0.0, -1.0],), [1, 2]),
    ("non_negative", ([0.0, -1.0],), [1]),
    ("negative", ([-1.0, 0.0],), [1]),
    ("non_positive", ([0.0, 1.0],), [1]),
    ("equal", ([1.0, 2.0], [1.0, 3.0]), [1]),
    ("less", ([1.0, 2.0], 2.0), [1]),
    ("less_equal", ([1.0, 3.0], 2.0), [1]),
    ("in_range", ([-1.5, 0.0, 1.5], -1, 1), [0, 2]),
    ("integer", ([1.0, 1.5, INF],), [1, 2]),
    ("non_decreasing", ([1.0, 0.0, 2.0],), [1]),
    ("strictly_increasing", ([1.0, 1.0, 2.0],), [1]),
    ("probabilities", ([-0.5, 1.5],), [0, 1]),
]


def as_torch(args):
    return [torch.tensor(each) if isinstance(each, list) else each for each in args]


def as_numpy(args):
    return [np.array(each) if isinstance(each, list) else each for each in args]


@pytest.mark.parametrize("library", [as_torch, as_numpy])
@pytest.mark.parametrize(("name", "args"), PASSING)
def test_what_passes_comes_back_as_the_very_same_object(name, args, library):
    args = library(args)
    assert getattr(clew.check, name)(*args) is args[0]


@pytest.mark.parametrize("library", [as_torch, as_numpy])
@pytest.mark.parametrize(("name", "args", "wrong"), FAILING)
def test_what_fails_names_the_offending_elements(name, args, wrong, library):
    error = failure(getattr(clew.check, name), *library(args), name="logits")
    assert [index for index, _ in offenders(error)] == [(each,) for each in wrong]
    assert error.details["count"] == len(wrong)
    assert error.details["name"] == "logits"
    assert error.details["check"] == name
    assert str(error).startswith("logits must ")


NAN_FAILS = [
    ("finite", ()), ("positive", ()), ("non_negative", ()), ("negative", ()), ("non_positive", ()), ("integer", ()),
    ("equal", (torch.tensor([NAN, NAN]),)), ("less", (1e30,)), ("less_equal", (1e30,)), ("in_range", (-1e30, 1e30)),
    ("non_decreasing", ()), ("strictly_increasing", ()), ("probabilities", ()), ("rows_differ", ()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args"), NAN_FAILS)
def test_nan_satisfies_no_demand(name, args):
    failure(getattr(clew.check, name), torch.tensor([NAN, NAN]), *args)


def test_nan_equals_nan_only_when_asked():
    x = torch.tensor([NAN, 1.0])
    assert clew.check.equal(x, x.clone(), equal_nan=True) is x
    failure(clew.check.equal, x, x.clone())


EVERY = ["finite", "positive", "non_negative", "negative", "non_positive", "integer", "non_decreasing",
         "strictly_increasing", "probabilities", "rows_differ"]  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("empty", [torch.empty(0), torch.empty(0, 3), torch.empty(3, 0), np.empty((0, 2))])
def test_an_empty_tensor_passes(name, empty):
    assert getattr(clew.check, name)(empty) is empty


def test_an_empty_tensor_passes_comparisons_too():
    empty = torch.empty(0, 3)
    assert clew.check.less(empty, torch.zeros(3)) is empty
    assert clew.check.in_range(empty, 0, 1) is empty
    assert clew.check.equal(empty, torch.empty(0, 3)) is empty


def test_a_single_number_is_a_tensor_too():
    assert clew.check.finite(torch.tensor(1.0)).item() == 1.0
    assert clew.check.finite(2.5) == 2.5
    error = failure(clew.check.positive, torch.tensor(-3))
    assert "must be positive: it is -3" in str(error)


def test_the_message_says_all_there_is_to_know():
    x = torch.zeros(3, 4)
    x[1, 2], x[2, 0] = NAN, INF

    error = failure(clew.check.finite, x, "logits")
    lines = str(error).splitlines()
    assert lines[0] == "logits must be finite: 2 of 12 elements are not"
    assert lines[1] == "  [1, 2] = nan, [2, 0] = inf"
    assert lines[2] == "  float32[3, 4]  min 0  max 0  mean 0  std 0  nan 1  +inf 1  zero 83.3%"
    assert lines[3].startswith("  where: ")
    assert "test_check_values.py" in lines[3]
    assert lines[3].endswith("check(*args, **kwargs)")
    assert lines[4].startswith("  next:  with clew.checks(model)")


def test_only_the_first_five_are_listed():
    error = failure(clew.check.positive, torch.zeros(2, 50))
    assert offenders(error) == [((0, i), 0.0) for i in range(5)]
    assert error.details["count"] == 100
    assert str(error).splitlines()[1].endswith(", …")


def test_an_element_is_shown_beside_what_it_was_held_against():
    error = failure(clew.check.less, torch.tensor([[1, 5], [2, 3]]), torch.tensor([4, 4]), "ids")
    assert "[0, 1] = 5 against 4" in str(error)
    error = failure(clew.check.non_decreasing, torch.tensor([[1.0, 2.0], [4.0, 3.0]]))
    assert "[1, 1] = 3 after 4" in str(error)
    assert "1 of 2 steps is not" in str(error)


def test_order_is_looked_at_along_the_dimension_asked_for():
    x = torch.tensor([[1.0, 5.0], [2.0, 4.0]])
    assert clew.check.non_decreasing(x[:, :1], dim=0) is not None
    error = failure(clew.check.strictly_increasing, x, dim=0)
    assert offenders(error) == [((1, 1), 4.0)]


def test_probabilities_have_to_sum_to_one():
    error = failure(clew.check.probabilities, torch.tensor([[0.5, 0.5], [0.5, 0.4]]), "attention")
    assert "attention must sum to 1 along dim -1: 1 of 2 sums is not" in str(error)
    assert offenders(error) == [((1,), pytest.approx(0.9))]
    assert "float32[2, 2]" in str(error)
    clew.check.probabilities(torch.tensor([[0.5, 1.0], [0.5, 0.0]]), dim=0)
    clew.check.probabilities(torch.tensor([0.5, 0.4]), atol=0.2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_softmax_of_any_type_is_a_distribution(dtype):
    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * 5
    clew.check.probabilities(x.to(dtype).softmax(-1))


def test_rows_that_are_all_the_same_are_a_collapse():
    same = torch.ones(4, 3)
    error = failure(clew.check.rows_differ, same, "out")
    assert "out must have rows that differ: all 4 rows are the same" in str(error)
    clew.check.rows_differ(same[:1])
    same[2, 1] = 2
    clew.check.rows_differ(same)


def test_a_condition_shows_the_tensors_it_is_about():
    loss = torch.tensor(7.0)
    assert clew.check.that(loss < 10) is not None
    error = failure(clew.check.that, loss < 5, "small loss", show=[torch.arange(9)])
    assert "small loss must be true: it is False" in str(error)
    assert "int64[9]  [0, 1, 2, 3, 4, …]" in str(error)
    assert clew.check.that(True) is True


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bool])
def test_integers_and_truth_values_are_finite(dtype):
    clew.check.finite(torch.ones(3, dtype=dtype))


def test_a_sum_that_overflows_is_not_taken_for_an_infinity():
    clew.check.finite(torch.full((1000,), 3e38))
    clew.check.finite(torch.full((1000,), 6e4, dtype=torch.float16))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2]
)
def test_a_nan_is_found_in_every_type(dtype):
    x = torch.tensor([1.0, NAN]).to(dtype)
    assert failure(clew.check.finite, x).details["count"] == 1


def test_views_of_every_kind_are_read_where_they_stand():
    base = torch.arange(12.0).view(3, 4)
    base[1, 3] = NAN
    assert offenders(failure(clew.check.finite, base.t()))[0][0] == (3, 1)
    assert offenders(failure(clew.check.finite, base[:, 1::2]))[0][0] == (1, 1)
    assert failure(clew.check.finite, base[1, 3].expand(5, 2)).details["count"] == 10


def test_of_a_sparse_tensor_the_stored_values_are_checked():
    x = torch.tensor([[0.0, NAN], [0.0, 2.0]]).to_sparse()
    assert "(the stored values)" in str(failure(clew.check.finite, x))
    with pytest.raises(clew.ClewError, match="only the stored values can be read"):
        clew.check.rows_differ(x)


def test_complex_numbers_have_no_order():
    with pytest.raises(clew.ClewError, match="no order") as caught:
        clew.check.positive(torch.ones(2, dtype=torch.complex64))
    assert caught.value.next_step == "check x.abs(), x.real or x.imag"
    assert "test_check_values.py" in caught.value.where


@pytest.mark.parametrize(
    ("wrong", "kind"), [([1.0], "a list"), (None, "None"), ("x", "a str"), ({}, "a dict")]
)
def test_what_is_no_tensor_is_refused_by_its_type(wrong, kind):
    with pytest.raises(clew.ClewError, match=f"expected a tensor, an array or a number, got {kind}"):
        clew.check.finite(wrong)


def test_an_array_of_text_is_refused():
    with pytest.raises(clew.ClewError, match="got an array of <U1"):
        clew.check.finite(np.array(["a"]))


def test_shapes_that_do_not_fit_are_refused_with_both_of_them():
    with pytest.raises(clew.ClewError, match=r"float32\[4\] cannot be compared with float32\[3\]"):
        clew.check.less(torch.ones(4), torch.ones(3))
    assert "the shapes [4] and [3] differ" in str(failure(clew.check.equal, torch.ones(4), torch.ones(3)))


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(clew.ClewError, match=r"no number lies in \[1, -1\]"):
        clew.check.in_range(torch.zeros(2), 1, -1)


def test_a_dimension_that_is_not_there_is_refused():
    with pytest.raises(clew.ClewError, match=r"no dim 3 in shape \[2, 2\]") as caught:
        clew.check.non_decreasing(torch.zeros(2, 2), dim=3)
    assert caught.value.next_step == "give a dim from -2 to 1"


def test_bounds_may_be_tensors():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    clew.check.in_range(x, torch.tensor([0.0, 2.0]), torch.tensor(4.0))
    error = failure(clew.check.in_range, x, torch.tensor([0.0, 3.0]), 4)
    assert offenders(error) == [((0, 1), 2.0)]


def test_tolerances_are_those_of_the_caller():
    x = torch.tensor([1.0, 100.0])
    clew.check.equal(x, x + 0.01, atol=0.02)
    clew.check.equal(x, x * 1.001, rtol=0.01)
    failure(clew.check.equal, x, x * 1.1, rtol=0.01)


def test_arrays_and_tensors_can_be_compared():
    clew.check.equal(torch.ones(2), np.ones(2, np.float32))
    clew.check.equal(np.ones(2), torch.ones(2))


elements = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0, NAN, INF, -INF])
TWINS = {
    "finite": (math.isfinite, ()),
    "positive": (lambda v: v > 0, ()),
    "non_negative": (lambda v: v >= 0, ()),
    "negative": (lambda v: v < 0, ()),
    "non_positive": (lambda v: v <= 0, ()),
    "in_range": (lambda v: -2 <= v <= 3, (-2, 3)),
    "less": (lambda v: v < 1, (1,)),
    "integer": (lambda v: math.isfinite(v) and v == math.floor(v), ()),
}


@pytest.mark.parametrize("name", TWINS)
@given(values=st.lists(elements, max_size=12))
def test_checks_agree_with_a_plain_loop(name, values):
    holds, args = TWINS[name]
    wrong = [i for i, value in enumerate(values) if not holds(value)]
    for x in (torch.tensor(values), np.array(values, np.float32)):
        if not wrong:
            assert getattr(clew.check, name)(x, *args) is x
            continue
        error = failure(getattr(clew.check, name), x, *args)
        assert error.details["count"] == len(wrong)
        assert [index[0] for index, _ in offenders(error)] == wrong[:5]
