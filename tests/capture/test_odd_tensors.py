"""Tensors that most of torch cannot read: a recording passes over them without a fault and without a warning."""

import pytest
import torch

import clew


def train(model, batches, loss):
    """Train a few steps under a watch; a warning would be an error here."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_go_by(tmp_path):
    pieces = [torch.randn(2, 3), torch.randn(4, 3)]
    batches = [torch.nested.nested_tensor(pieces) for _ in range(3)]
    with clew.watch(out=str(tmp_path), name="run") as run:
        train(
            torch.nn.Sequential(torch.nn.Linear(3, 3)),
            batches,
            lambda out: sum(part.square().mean() for part in out.unbind()),
        )
    record = clew.open_run(run.path)
    assert record.faults() == []
    assert len(record.scalars()["loss"]) == 3


class Complex(torch.nn.Module):
    """A linear map of complex numbers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x):
        return x @ self.weight


def test_complex_batches_are_compared_without_a_warning(tmp_path):
    batches = [torch.randn(5, 4, dtype=torch.complex64) for _ in range(3)]
    with clew.watch(out=str(tmp_path), name="run") as run:
        train(Complex(), batches, lambda out: out.abs().mean())
    assert clew.open_run(run.path).faults() == []


def test_an_attribute_that_becomes_a_tensor_is_no_fault(tmp_path):
    model = torch.nn.Linear(4, 3)
    model.temperature = 1.0

    def loss(out):
        model.temperature = torch.tensor([1.0, 2.0, 3.0])
        return (out / model.temperature).mean()

    with clew.watch(out=str(tmp_path), name="run") as run:
        train(model, [torch.randn(5, 4) for _ in range(4)], loss)
    assert clew.open_run(run.path).faults() == []
