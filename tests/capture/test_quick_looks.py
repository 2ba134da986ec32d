"""What probes read of tensors and frames in one call, against their twins in Python."""

import sys

import numpy as np
import pytest
import torch

from clew.capture.torch import glance as looks
from clew.capture.torch.leaves import list_leaves, list_slowly
from clew.capture.torch.probe_signature import find_place
from clew.stats.rows import KERNEL

needs_kernel = pytest.mark.skipif(KERNEL is None, reason="no kernel was built, or it is switched off")

SIMPLE = [
    torch.randn(7, 30),
    torch.randn(100, dtype=torch.float64, requires_grad=True),
    torch.nn.Parameter(torch.randn(3, 4)),
    torch.arange(1 << 60, (1 << 60) + 40),
    torch.arange(9, dtype=torch.int32) - 4,
    torch.randn(4, 10) > 0,
    torch.randint(0, 255, (6, 50), dtype=torch.uint8),
    torch.zeros(0, 3),
]
OTHERS = [
    torch.randn(6, 8).t(),
    torch.randn(40).bfloat16(),
    torch.randn(5, 5).half(),
    torch.randn(4, 6, dtype=torch.complex64).imag,
]


def without_kernel(monkeypatch):
    monkeypatch.setattr(looks, "KERNEL", None)


@pytest.mark.parametrize("most", [1, 8, 4096])
@pytest.mark.parametrize(
    "tensor", SIMPLE + OTHERS, ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}"
)
def test_a_few_numbers_and_their_sum(monkeypatch, tensor, most):
    quick = looks.glance(tensor, most), looks.add_up(tensor, most)
    without_kernel(monkeypatch)
    numbers, total = looks.glance(tensor, most), looks.add_up(tensor, most)
    assert quick[0] == numbers
    assert quick[1] == pytest.approx(total, rel=1e-12)
    flat = tensor.detach().reshape(-1)
    assert numbers == tuple(flat[:: max(1, len(flat) // most)][:most].tolist())


@pytest.mark.parametrize(
    "tensor", SIMPLE + OTHERS, ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}"
)
def test_one_row_and_the_zeros_among_the_first_numbers(monkeypatch, tensor):
    def read():
        rows = [0, len(tensor) // 2, -1] if len(tensor) else []
        return [looks.glance_row(tensor, row, 4) for row in rows], looks.count_zeros(tensor, 25)

    quick = read()
    without_kernel(monkeypatch)
    assert quick == read()
    assert quick[1] == int((tensor.detach().reshape(-1)[:25] == 0).sum())
    if len(tensor):
        assert quick[0][2] == looks.glance(tensor.detach()[-1], 4)


@pytest.mark.parametrize("numbers", [1, 16, 32])
@pytest.mark.parametrize(
    "tensor",
    [each for each in SIMPLE + OTHERS if each.dim() > 1 and each.numel()],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_a_few_numbers_of_each_row(monkeypatch, tensor, numbers):
    def read():
        memory, dtype = looks.sample_rows(tensor, numbers)
        return np.frombuffer(memory, dtype).reshape(len(tensor), -1).astype(np.float64)

    quick = read()
    without_kernel(monkeypatch)
    rows = tensor.detach().reshape(len(tensor), -1)
    expected = rows[:, :: max(1, rows.shape[1] // numbers)][:, :numbers].double().numpy()
    assert np.array_equal(quick, expected)
    assert np.array_equal(read(), expected)


@pytest.mark.parametrize(
    "tensor", SIMPLE + OTHERS, ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}"
)
def test_a_copy_of_all_numbers(monkeypatch, tensor):
    quick = looks.copy_numbers(tensor)
    without_kernel(monkeypatch)
    found = looks.copy_numbers(tensor)
    assert quick.tolist() == found.tolist() == tensor.tolist()
    if found.size and found.flags.writeable:
        found[...] = 0
    assert found.size == 0 or bool(tensor.detach().any()), "the tensor itself was written to"


@pytest.mark.parametrize("size", [6, 5000])
@pytest.mark.parametrize("last", [9, -100, 1151, 1152, -129])
def test_labels_are_counted(monkeypatch, size, last):
    labels = [torch.arange(size) % 4 - 1, torch.full((3, 2), last)]
    counted = looks.count_labels(labels)
    without_kernel(monkeypatch)
    assert looks.count_labels(labels) == counted
    every = torch.cat([each.reshape(-1) for each in labels])
    assert counted == {number: int((every == number).sum()) for number in every.unique().tolist()}
    assert not looks.count_labels([torch.zeros(0, dtype=torch.int64)])


def test_the_states_of_gradients():
    parameters = [torch.randn(3, requires_grad=True) for _ in range(3)]
    parameters[1].sum().backward()
    parameters[2].grad = torch.zeros(3).add_(1)
    found = looks.stamp(parameters)
    assert found == looks.stamp_slowly(parameters)
    gradients = [parameter.grad for parameter in parameters[1:]]
    assert found == [None, *((id(gradient), gradient._version) for gradient in gradients)]


@needs_kernel
def test_what_is_not_simply_memory_is_left_to_the_twin():
    for other in (*OTHERS, torch.zeros(2).to_sparse(), torch.empty(2, device="meta"), "word"):
        assert KERNEL.glance(other, 8) is None
        assert KERNEL.add_up(other, 8) is None
        assert KERNEL.sample_rows(other, 1, 8) is None
        assert KERNEL.glance_row(other, 0, 8) is None
        assert KERNEL.count_zeros(other, 8) is None
        assert KERNEL.count_labels([torch.zeros(2, dtype=torch.int64), other]) is None
    assert KERNEL.glance_row(torch.zeros(3, 2), 3, 8) is None
    assert KERNEL.glance_row(torch.tensor(1.0), 0, 8) is None
    assert KERNEL.sample_rows(torch.zeros(7), 2, 8) is None
    with pytest.raises(AttributeError):
        KERNEL.stamp(["word"])


@needs_kernel
@pytest.mark.parametrize("frames", [1, 3, 40])
def test_the_place_in_the_program(frames):
    asked = []

    def judge(code):
        asked.append(code)
        return code.co_name != "pytest_pyfunc_call"

    frame = sys._getframe()
    known, twin = {}, {}
    quick = KERNEL.find_place(frame, known, judge, frames, 16)
    assert KERNEL.find_place(frame, known, judge, frames, 16)[2:] == quick[2:]
    assert len(asked) == len(known)  # each code is judged once
    place = find_place(frame, twin, judge, frames, 16)
    assert place[2:] == quick[2:]  # this frame has moved on in between
    assert known == twin
    with pytest.raises(ZeroDivisionError):
        KERNEL.find_place(frame, {}, lambda _code: 1 / 0, frames, 16)


@needs_kernel
def test_the_rows_that_a_model_is_given():
    computed = torch.randn(4, 20, requires_grad=True) * 2
    data, narrow = torch.arange(80).reshape(4, 20), torch.randn(9, 2)
    expected = (4, *looks.sample_rows(data, 8))
    for value in ((data,), ((narrow, computed, [data]), {}), ((), {"n": 3, "x": {"ids": data}})):
        assert looks.sample_first(value, 8, 16) == expected
    assert looks.sample_first(((narrow, computed, None, "word"), {}), 8, 16) == ()
    for other in (object(), (data.bfloat16(),), ({1, 2}, data), (data.to_sparse(), data), [narrow] * 65):
        assert looks.sample_first((other,), 8, 16) is None


@needs_kernel
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_tensors_in_a_value():
    one, two, own = torch.randn(2), torch.arange(3), torch.nn.Parameter(torch.randn(2))
    deep = [[[[[one]]]]]
    for value in (one, ((one, None, "word"), {"x": [two, 3.0], "y": own}), deep, ()):
        quick, slow = KERNEL.list_leaves(value), list_slowly(value)
        assert [id(leaf) for leaf in quick] == [id(leaf) for leaf in slow]
    nested = torch.nested.nested_tensor([one, two.float()])
    for other in (object(), [deep, [[deep]]], [one] * 65, {"x": {1, 2}}, (one, nested)):
        assert KERNEL.list_leaves(other) is None
    assert [id(leaf) for leaf in list_leaves((one, nested, [two]))] == [id(one), id(two)]
