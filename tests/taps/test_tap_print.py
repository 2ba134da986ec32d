"""clew.print and clew.tap: what comes out, when, and that the value goes on untouched."""

import io

import numpy as np
import pytest
import torch
from fake_session import recording

import clew


def printed(capsys):
    return capsys.readouterr().out.splitlines()


def test_the_very_same_tensor_comes_back_and_the_gradient_passes(capsys):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = x * 3
    z = clew.print(y, "y")
    assert z is y
    z.sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]
    assert y.grad_fn.__class__.__name__ == "MulBackward0"
    assert len(printed(capsys)) == 1


def test_a_line_has_label_form_statistics_entries_and_place(capsys):
    clew.print(torch.arange(6.0).view(2, 3), "after norm", summarize=5)
    (line,) = printed(capsys)
    assert line.startswith(
        "after norm:  float32[2, 3]  min 0  max 5  mean 2.5  std 1.708  zero 16.7%  [0, 1, 2, 3, 4, …]"
    )
    assert "test_tap_print.py:" in line


def test_without_a_label_a_line_begins_with_the_form(capsys):
    clew.print(torch.zeros(2, dtype=torch.int64))
    assert printed(capsys)[0].startswith("int64[2]  ")


@pytest.mark.parametrize(
    ("summarize", "entries"),
    [(0, None), (1, "[0, …]"), (4, "[0, 1, 2, 3]"), (9, "[0, 1, 2, 3]"), (-1, "[0, 1, 2, 3]")],
)
def test_as_many_entries_as_asked_for(capsys, summarize, entries):
    clew.print(torch.arange(4), summarize=summarize)
    line = printed(capsys)[0]
    assert (entries in line) if entries else ("[0" not in line)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 11, 24])
def test_entries_of_a_strided_tensor_are_in_reading_order(capsys, n):
    x = torch.arange(24).view(2, 3, 4).permute(2, 0, 1)
    clew.print(x, summarize=n)
    wanted = ", ".join(str(each) for each in x.flatten().tolist()[:n])
    assert f"[{wanted}{']' if n == 24 else ', …]'}" in printed(capsys)[0]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.tensor(3.0), "float32[]  min 3  max 3"),
        (torch.empty(0, 3), "float32[0, 3]  []"),
        (torch.tensor([1.0, float("nan"), float("inf")]), "nan 1  +inf 1"),
        (torch.tensor([float("nan")]), "float32[1]  nan 1  [nan]"),
        (torch.tensor([True, False]), "bool[2]"),
        (torch.ones(2, requires_grad=True), "float32[2] grad"),
        (torch.ones(3, device="meta"), "float32[3] meta  (it has a shape but no values)"),
        (torch.tensor([[0.0, 2.0]]).to_sparse(), "(the stored values)  min 2  max 2"),
        (torch.ones(2).bfloat16(), "bfloat16[2]"),
        (np.ones((2, 2)), "float64[2, 2] numpy"),
        (7, "int64[]"),
    ],
)
def test_every_kind_of_value_has_its_line(capsys, x, text):
    assert clew.print(x) is x
    assert text in printed(capsys)[0]


def test_first_n_ends_the_printing_after_so_many_lines(capsys):
    for i in range(5):
        clew.print(torch.tensor(i), "i", first_n=3, summarize=1)
    assert [line.split("[")[2][0] for line in printed(capsys)] == ["0", "1", "2"]


def test_every_looks_at_the_first_call_and_each_nth_after_it(capsys):
    for i in range(7):
        clew.print(torch.tensor(i), every=3, summarize=1)
    assert [line.split("[")[2][0] for line in printed(capsys)] == ["0", "3", "6"]


def test_counting_together_first_n_counts_lines_not_calls(capsys):
    for i in range(500):
        clew.print(torch.tensor(i), first_n=3, every=100, when=lambda t: t != 100, summarize=1)
    assert [int(line.split("[")[2].split("]")[0]) for line in printed(capsys)] == [0, 200, 300]


def test_first_n_zero_prints_nothing(capsys):
    clew.print(torch.ones(2), first_n=0)
    assert printed(capsys) == []


def test_two_call_sites_count_apart_also_on_one_line(capsys):
    for _ in range(2):
        clew.print(torch.ones(1), "a", first_n=1), clew.print(torch.ones(1), "b", first_n=1)
    assert [line[0] for line in printed(capsys)] == ["a", "b"]


def test_code_that_is_compiled_anew_counts_anew(capsys):
    cell = "for _ in range(3): clew.print(torch.ones(1), first_n=1)"
    for _ in range(2):
        exec(compile(cell, "<cell>", "exec"), {"clew": clew, "torch": torch})
    assert len(printed(capsys)) == 2


def test_a_new_run_counts_anew(capsys):
    def look():
        clew.print(torch.ones(1), first_n=1)

    look()
    with recording():
        look()
        look()
    assert len(printed(capsys)) == 2


def test_when_has_to_say_one_yes_or_no(capsys):
    x = torch.tensor([1.0, 20.0])
    clew.print(x, "quiet", when=lambda t: t.max() > 30)
    clew.print(x, "loud", when=lambda t: t.max() > 10)
    assert [line.split(":")[0] for line in printed(capsys)] == ["loud"]
    with pytest.raises(clew.ClewError, match=r"when= of clew.print 'x' gave bool\[2\]") as caught:
        clew.print(x, "x", when=lambda t: t > 10)
    assert caught.value.next_step == "reduce it: when=lambda t: (t > 10).any()"


@pytest.mark.parametrize("counts", [{"every": 0}, {"first_n": -1}])
def test_counts_that_make_no_sense_are_refused(counts):
    with pytest.raises(clew.ClewError, match="cannot count with"):
        clew.print(torch.ones(1), **counts)


def test_lines_go_to_a_stream_or_are_added_to_a_file(tmp_path, capsys):
    stream = io.StringIO()
    clew.print(torch.ones(1), "a", file=stream)
    for label in "bc":
        clew.print(torch.ones(1), label, file=tmp_path / "taps.txt")
    assert stream.getvalue().startswith("a:")
    assert [line[0] for line in (tmp_path / "taps.txt").read_text().splitlines()] == ["b", "c"]
    assert printed(capsys) == []


def test_the_module_is_named(capsys):
    class Inner(torch.nn.Module):
        def forward(self, x):
            return clew.print(x, "x")

    torch.nn.Sequential(torch.nn.Identity(), Inner())(torch.ones(1))
    assert "(1, " in printed(capsys)[0]


def test_what_is_no_tensor_is_refused():
    with pytest.raises(clew.ClewError, match="expected a tensor, an array or a number, got a list"):
        clew.print([1, 2])


# ---------------------------------------------------------------- tap


def test_a_tap_looks_and_the_value_goes_on():
    seen = []
    x = torch.ones(2, requires_grad=True)
    assert clew.tap(x, seen.append) is x
    assert seen == [x]
    assert clew.tap(x, lambda t: t.shape) is x


def test_a_tap_replaces_on_purpose_and_gradients_follow():
    x = torch.ones(2, requires_grad=True)
    y = clew.tap(x, lambda t: t * 5)
    y.sum().backward()
    assert y.tolist() == [5.0, 5.0]
    assert x.grad.tolist() == [5.0, 5.0]
    array = np.ones(2)
    assert clew.tap(array, lambda t: t * 2).tolist() == [2.0, 2.0]


def test_a_tap_does_not_replace_by_accident():
    x = torch.ones(2)
    with pytest.raises(
        clew.ClewError, match=r"a tap returned float32\[\] in the place of float32\[2\]"
    ) as caught:
        clew.tap(x, lambda t: t.max())
    assert "return None" in caught.value.next_step
    assert clew.tap(x, lambda t: t.max(), replace=False) is x


def test_an_exception_of_the_users_function_is_the_users():
    with pytest.raises(ZeroDivisionError):
        clew.tap(torch.ones(1), lambda _: 1 / 0)
