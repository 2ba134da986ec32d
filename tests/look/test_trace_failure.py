"""A model that raises: the message names the site, the shapes that led there, the line and the fix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clew
from clew.errors import TraceFailed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(100, 2)

    def forward(self, x):
        h = F.relu(self.conv(x)).flatten(1)
        return self.fc(h)


def failure(model, *inputs, **kwargs):
    with pytest.raises(TraceFailed) as caught:
        clew.trace(model, *inputs, **kwargs)
    return caught.value


def test_site_shapes_line_and_fix():
    error = failure(Net(), torch.randn(2, 3, 8, 8))
    lines = str(error).splitlines()
    assert lines[0].startswith(
        "linear in 'fc' raised RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    )
    assert lines[1] == "  called: linear(float32(2, 288), float32(2, 100), float32(2))"
    assert lines[2] == "  before: conv conv2d -> (2, 8, 6, 6); relu -> (2, 8, 6, 6); flatten -> (2, 288)"
    assert "test_trace_failure.py:" in lines[3]
    assert lines[3].endswith("return self.fc(h)")
    assert lines[4] == (
        "  next:  the layer expects 100 features and got 288: set in_features=288, or flatten or transpose the input"
    )
    assert isinstance(error.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("model", "inputs", "hint"),
    [
        (Net(), [torch.randn(2, 1, 8, 8)], "expects 3 channels and got 1"),
        (Net(), [torch.randn(3, 2, 2)], "smaller than the kernel"),
        (Net(), [torch.randn(8, 8)], "must be 4D, or 3D without a batch"),
        (Net(), [torch.randn(2, 3, 8, 8).double()], "x.to(next(model.parameters()).dtype)"),
        (Net(), [], "the model needs more inputs: give 'x' too"),
        (Net(), [torch.randn(2, 3, 8, 8), 3], "takes fewer inputs"),
        (nn.Embedding(5, 2), [torch.tensor([7])], "not below num_embeddings"),
        (nn.Embedding(5, 2), [torch.tensor([1.0])], "x.long()"),
        (nn.Linear(2, 2), [np.zeros((2, 2))], "torch.from_numpy(x)"),
        (nn.Linear(2, 2), [[1.0, 2.0]], "the input is a list where the layer wants a tensor"),
        (lambda x: torch.cat([x, torch.ones(2, 5)]), [torch.ones(1, 3)], "and 3 meets 5"),
        (lambda x: F.cross_entropy(x, torch.tensor([3])), [torch.ones(1, 3)], "class 3 is not among"),
        (lambda x: F.cross_entropy(x, torch.tensor([1])), [torch.ones(2, 3)], "has 2 rows and the target 1"),
        (nn.BatchNorm1d(3), [torch.randn(1, 3)], "or call model.eval()"),
        (nn.LayerNorm(4), [torch.randn(2, 3)], "must end in (4)"),
        (lambda x: x.t().view(-1), [torch.randn(2, 3)], "use reshape instead of view"),
        (lambda x: x.view(4, 5), [torch.randn(2, 3)], "take it from x.shape"),
        (
            lambda x: x + torch.ones(4),
            [torch.randn(2, 3)],
            "dimension 1 is 3 in one tensor and 4 in the other",
        ),
        (lambda x: x.sum().item(), [torch.randn(2, device="meta")], "trace it on a real device"),
    ],
)
def test_common_mistakes_and_their_fix(model, inputs, hint):
    assert hint in failure(model, *inputs).next_step


def test_unexpected_keyword():
    assert "no argument 'mask'" in failure(Net(), torch.randn(2, 3, 8, 8), mask=None).next_step


def test_an_error_of_the_users_own_names_the_module_and_the_line():
    class Inner(nn.Module):
        def forward(self, x):
            raise ValueError("nothing to see")

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x + 1)

    error = failure(Outer(), torch.randn(2))
    assert error.what.startswith("the forward pass of 'inner' raised ValueError: nothing to see")
    assert "add -> (2)" in error.what
    assert 'raise ValueError("nothing to see")' in error.where


def test_an_error_the_model_handles_is_not_told():
    class Tries(nn.Module):
        def forward(self, x):
            try:
                return x.view(7)
            except RuntimeError:
                return x * 2

    assert [operation.op for operation in clew.trace(Tries(), torch.randn(2))] == ["mul"]


@pytest.mark.parametrize(
    "look",
    [
        lambda model, x: clew.trace(model, x, backward=True),
        lambda model, x: clew.fetch(model, x, "fc.weight@grad", loss=torch.sum),
    ],
)
def test_a_value_overwritten_before_the_backward_pass(look):
    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            y = self.fc(x).sigmoid()
            z = y * y
            y.add_(1)
            return z

    with pytest.raises(TraceFailed) as caught:
        look(Overwrites(), torch.ones(1, 2))
    assert "the backward pass of 'Overwrites' raised RuntimeError: one of the variables" in caught.value.what
    assert "add_ in 'Overwrites' " in caught.value.where
    assert "test_trace_failure.py:" in caught.value.where
    assert "do it out of place" in caught.value.next_step
