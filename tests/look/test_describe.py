"""One dense line for any tensor, and torch's repr replaced by it and given back."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch._dynamo  # replaces torch.manual_seed when it is first loaded
from torch import nn

import clew


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            torch.arange(100.0).view(10, 10),
            "float32[10, 10] 100 values 400 B · min 0 max 99 mean 49.5 std 28.87 · 1.0 % zero",
        ),
        (torch.tensor([1.0, 2.5, float("nan")]), "float32[3] = [1, 2.5, NaN] · 1 NaN!"),
        (torch.tensor(3, dtype=torch.int32), "int32[] = 3"),
        (torch.zeros(9), "float32[9] 9 values 36 B · all zero!"),
        (torch.full((9,), 2.0), "float32[9] 9 values 36 B · every one 2"),
        (torch.full((20,), float("nan")), "float32[20] 20 values 80 B · nothing finite! · 20 NaN!"),
        (torch.arange(20) < 5, "bool[20] 20 values 20 B · 5 true"),
        (torch.empty(0, 3), "float32[0, 3] empty"),
        (torch.empty(3, device="meta"), "float32[3] 3 values 12 B · it has a shape but no values · meta"),
        (torch.ones(2, requires_grad=True), "float32[2] = [1, 1] · grad"),
        (torch.ones(2, requires_grad=True) * 2, "float32[2] = [2, 2] · grad MulBackward0"),
        (nn.Parameter(torch.ones(1)), "float32[1] = [1] · parameter · grad"),
        (torch.tensor([1 - 2j]), "complex64[1] = [1-2j]"),
        (torch.ones(3, dtype=torch.bfloat16), "bfloat16[3] = [1, 1, 1]"),
        (np.arange(10), "int64[10] 10 values 80 B · min 0 max 9 mean 4.5 std 2.872 · 10.0 % zero · numpy"),
        (np.array(["a"]), "<U1[1] 1 value 4 B · not numbers · numpy"),
        (np.float64(0.5), "float64[] = 0.5 · numpy"),
        (3.5, "3.5"),
        ([], "list, empty"),
    ],
)
def test_lines(value, line):
    assert clew.describe(value) == line


def test_infinities_do_not_spoil_the_rest():
    x = torch.arange(12.0)
    x[3], x[4], x[5] = float("inf"), float("-inf"), float("nan")
    assert (
        clew.describe(x)
        == "float32[12] 12 values 48 B · min 0 max 11 mean 6 std 3.83 · 8.3 % zero · 1 NaN! 1 inf! 1 -inf!"
    )


ODD_TENSORS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "float8": lambda: torch.ones(20).to(torch.float8_e4m3fn),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "expanded": lambda: torch.ones(3).expand(4, 3),
    "conjugate": lambda: torch.ones(2, 3, dtype=torch.complex128).conj(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "nested strided": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_every_kind_of_tensor_has_a_line(kind):
    tensor = ODD_TENSORS[kind]()
    line = clew.describe(tensor)
    assert "\n" not in line
    with clew.patch_repr():
        assert repr(tensor) == line or kind == "nested", "a subclass with a repr of its own keeps it"


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    text: str


def test_containers_and_modules_get_a_line_per_leaf():
    Point = namedtuple("Point", "x y")
    value = {"a": [torch.ones(2), None], "b": Batch(torch.zeros(1), "hi"), "c": Point(np.ones(1), 2)}
    assert clew.describe(value).splitlines() == [
        "[a][0]: float32[2] = [1, 1]",
        "[a][1]: None",
        "[b].ids: float32[1] = [0]",
        "[b].text: 'hi'",
        "[c].x: float64[1] = [1] · numpy",
        "[c].y: 2",
    ]
    lines = clew.describe(nn.BatchNorm1d(2)).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked",
    ]  # fmt: skip
    assert clew.describe([0] * 1000).splitlines()[-1] == "…"


def test_looking_changes_nothing():
    x = torch.randn(100, requires_grad=True)
    version, state = x._version, torch.get_rng_state()
    clew.describe(x * 2)
    assert x._version == version
    assert x.grad is None
    assert torch.equal(state, torch.get_rng_state())


def test_repr_is_replaced_and_given_back():
    x = torch.ones(3)
    before = repr(x)
    with clew.patch_repr() as patch:
        assert repr(x) == str(x) == f"{x}" == "float32[3] = [1, 1, 1]"
        assert repr([x]) == "[float32[3] = [1, 1, 1]]"
        assert repr(nn.Parameter(x)) == "float32[3] = [1, 1, 1] · parameter · grad"
        assert f"{torch.tensor(2.5):.1f}" == "2.5"
    assert repr(x) == before
    patch.undo()
    assert repr(x) == before
    patch = clew.patch_repr()
    assert repr(x) != before
    patch.undo()
    assert repr(x) == before


def test_repr_never_raises():
    class Odd(torch.Tensor):
        @property
        def is_nested(self):
            raise RuntimeError("nobody may ask")

    odd = torch.ones(2).as_subclass(Odd)
    with clew.patch_repr():
        assert repr(odd) == "<Odd without a repr: RuntimeError: nobody may ask>"


def test_repr_inside_transforms():
    with clew.patch_repr():
        seen = []
        torch.func.vmap(lambda row: seen.append(repr(row)) or row)(torch.ones(2, 3))
    assert seen[0].startswith("float32[3]")


def test_arrays_need_no_torch():
    code = "import sys, numpy, clew; print(clew.describe(numpy.ones(2)), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "float64[2] = [1, 1] · numpy False"
