"""Checks on rank, dtype and shape; names that hold for a step; failures that are recorded instead of raised."""

import json
import warnings

import numpy as np
import pytest
import torch
from fake_session import recording

import clew


def failure(check, *args, **kwargs):
    with pytest.raises(clew.CheckError) as caught:
        check(*args, **kwargs)
    return caught.value


def test_rank():
    x = torch.zeros(2, 3)
    assert clew.check.rank(x, 2) is x
    assert clew.check.rank(x, (2, 3)) is x
    assert clew.check.rank_at_least(x, 1) is x
    assert "must have rank 3 or 4: it has rank 2, shape [2, 3]" in str(failure(clew.check.rank, x, (3, 4)))
    assert "must have rank 3 or more: it has rank 2" in str(failure(clew.check.rank_at_least, x, 3))
    assert clew.check.rank(1.5, 0) == 1.5


@pytest.mark.parametrize(
    "wanted",
    [torch.float32, "float32", "torch.float32", "float", "floating", np.float32, ("bool", "float32")],
)
def test_dtype_is_named_in_any_usual_way(wanted):
    x = torch.zeros(2)
    assert clew.check.dtype(x, wanted) is x
    assert clew.check.dtype(x.numpy(), wanted) is not None


@pytest.mark.parametrize(
    ("x", "kind"),
    [(torch.ones(1).bfloat16(), "floating"), (torch.ones(1).long(), "integer"), (torch.ones(1).bool(), "bool"),
     (torch.ones(1) + 1j, "complex")],
)  # fmt: skip
def test_dtypes_come_in_kinds(x, kind):
    clew.check.dtype(x, kind)
    for other in {"floating", "integer", "bool", "complex"} - {kind}:
        assert f"must have dtype {other}: it has" in str(failure(clew.check.dtype, x, other))


def test_a_dtype_that_is_none_gets_a_suggestion():
    with pytest.raises(clew.ClewError, match="unknown dtype 'flaot32'") as caught:
        clew.check.dtype(torch.zeros(1), "flaot32")
    assert caught.value.next_step == "did you mean 'float32'?"
    with pytest.raises(clew.ClewError, match="3 is not a dtype"):
        clew.check.dtype(torch.zeros(1), 3)


@pytest.mark.parametrize(
    "spec",
    ["2 3 4", "B T 4", "B _ C", "... 4", "2 ...", "...", "a ... c", "2, 3, 4", (2, None, "C"), ("B", ..., 4)],
)
def test_shapes_that_fit(spec):
    x = torch.zeros(2, 3, 4)
    assert clew.check.shape(x, spec) is x


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("2 3", "it has 3 dimensions, not 2"),
        ("a b c d ...", "it has 3 dimensions, not 4 or more"),
        ("2 4 4", "dimension 1 is 3, not 4"),
        ("B B 4", "dimension 1 is 3, but B = 2 at dimension 0"),
        ((2, 3, 5), "dimension 2 is 4, not 5"),
    ],
)
def test_shapes_that_do_not_fit(spec, problem):
    error = failure(clew.check.shape, torch.zeros(2, 3, 4), spec, "h")
    assert str(error).startswith("h must have shape [")
    assert problem in str(error)


@pytest.mark.parametrize("spec", ["B -1", "B 2.5", "... ...", "B T!"])
def test_a_shape_that_cannot_be_read_is_refused(spec):
    with pytest.raises(clew.ClewError, match="cannot be read") as caught:
        clew.check.shape(torch.zeros(2, 3), spec)
    assert "'B T 64'" in caught.value.next_step
    assert not isinstance(caught.value, clew.CheckError)


def test_a_name_holds_for_the_next_checks():
    clew.check.shape(torch.zeros(4, 7), "B T", "tokens")
    clew.check.shape(torch.zeros(4), "B")
    error = failure(clew.check.shape, torch.zeros(5, 7), "B T", "mask")
    assert "dimension 0 is 5, but B = 4 since tokens at " in str(error)
    assert "test_check_form.py:" in str(error)
    assert error.next_step == "names hold for one step: clew.check.new_step() begins another"


def test_a_failed_check_binds_nothing():
    failure(clew.check.shape, torch.zeros(4, 7), "N 8")
    clew.check.shape(torch.zeros(5), "N")


def test_new_step_forgets_the_names():
    clew.check.shape(torch.zeros(4), "B")
    clew.check.new_step()
    clew.check.shape(torch.zeros(5), "B")


def test_the_line_that_bound_a_name_binds_it_anew():
    for size in (4, 4, 3):
        x = clew.check.shape(torch.zeros(size, 2), "B D")
        clew.check.shape(x.sum(1), "B")


def test_evaluation_has_names_of_its_own():
    clew.check.shape(torch.zeros(4), "B")
    with torch.no_grad():
        clew.check.shape(torch.zeros(9), "B")
        failure(clew.check.shape, torch.zeros(8), "B")
    failure(clew.check.shape, torch.zeros(5), "B")


def test_a_name_holds_across_functions():
    def measure_loss(out):
        clew.check.shape(out, "B", "out")

    clew.check.shape(torch.zeros(4), "B")
    failure(measure_loss, torch.zeros(9))


class Net(torch.nn.Module):
    def __init__(self, inner="B D"):
        super().__init__()
        self.fc = torch.nn.Linear(3, 3)
        self.inner = inner

    def forward(self, x):
        clew.check.shape(x, "B D", "input")
        for _ in range(2):
            x = self.fc(x)
            clew.check.shape(x, self.inner, "hidden")
        return x


def test_each_call_of_the_outermost_module_is_a_step():
    net = Net()
    for size in (4, 2, 4):
        clew.check.shape(net(torch.zeros(size, 3)), "B D")


def test_names_of_the_loop_reach_into_the_model_and_back():
    net = Net()
    for size in (4, 2):
        x = clew.check.shape(torch.zeros(size, 3), "B D", "batch")
        clew.check.shape(net(x)[:, 0], "B")
    error = failure(lambda: net(torch.zeros(5, 3)))
    assert "B = 2 since batch at " in str(error)


def test_within_one_call_a_loop_is_held_to_its_first_turn():
    class Shrink(torch.nn.Module):
        def forward(self, x):
            for _ in range(2):
                clew.check.shape(x, "B", "x")
                x = x[1:]
            return x

    error = failure(Shrink(), torch.zeros(4))
    assert "dimension 0 is 3, but B = 4 since x at " in str(error)


def test_a_recorded_step_is_a_step():
    with recording() as session:
        clew.check.shape(torch.zeros(4), "B")
        session.step += 1
        clew.check.shape(torch.zeros(5), "B")
    clew.check.shape(torch.zeros(6), "B")


def test_the_module_path_is_part_of_the_error():
    class Head(torch.nn.Module):
        def forward(self, x):
            return clew.check.finite(x / 0, "logits")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Identity(), Head()])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    error = failure(Model(), torch.ones(2))
    assert error.details["site"] == "blocks.1"
    assert error.where.startswith("blocks.1, ")
    assert error.where.endswith('return clew.check.finite(x / 0, "logits")')
    assert failure(Head(), torch.ones(2)).details["site"] == "(Head)"
    assert failure(clew.check.finite, torch.tensor(float("nan"))).details["site"] == ""


def test_a_warning_comes_once_for_each_place():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in (-1.0, -2.0):
            x = torch.tensor([value])
            assert clew.check.positive(x, "scale", warn=True) is x
        clew.check.positive(x, "scale", warn=True)
    assert [each.category for each in caught] == [clew.CheckWarning, clew.CheckWarning]
    assert "scale must be positive" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert caught[0].lineno != caught[1].lineno


def test_in_a_run_a_warning_is_a_record_and_nothing_else():
    with recording() as session:
        session.step = 12
        for _ in range(3):
            clew.check.finite(torch.tensor([1.0, float("inf")]), "loss", warn=True)
    assert [kind for kind, _ in session.notes] == ["check"] * 3
    note = session.notes[0][1]
    assert note["step"] == 12
    assert note["check"] == "finite"
    assert note["offenders"] == [{"index": [1], "value": "inf"}]
    assert note["raised"] is False
    assert "loss must be finite" in note["message"]
    json.dumps(note, allow_nan=False)


def test_in_a_run_an_error_is_recorded_too():
    with recording() as session:
        failure(clew.check.rank, torch.zeros(2), 3, "x")
    assert session.notes[0][1]["raised"] is True


def test_form_is_checked_where_there_are_no_values():
    x = torch.zeros(2, 3, device="meta")
    clew.check.finite(x)
    clew.check.rows_differ(x)
    clew.check.less(x, 0)
    clew.check.shape(x, "2 3")
    failure(clew.check.shape, x, "2 4")
    failure(clew.check.dtype, x, "integer")


def test_an_error_survives_a_trip_to_another_process():
    import pickle

    error = failure(clew.check.positive, torch.zeros(2), "x")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.details == error.details
