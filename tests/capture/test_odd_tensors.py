"""Tensors that most of torch cannot read: a recording passes over them without a fault and without a warning."""

import pytest
import torch
import torch.utils.checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

import clew
from clew.api.doctor import diagnose


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


def test_sharded_parameters_are_measured_by_the_part_that_is_here(tmp_path, one_rank):
    model = fully_shard(torch.nn.Linear(4, 3), mesh=one_rank)
    with clew.watch(out=str(tmp_path), name="run", budget="off") as run:
        train(model, [torch.randn(5, 4) for _ in range(3)], lambda out: out.square().mean())
    record = clew.open_run(run.path)
    assert record.faults() == []
    assert len(record.series("weight", "update", "l2").steps) == 3


def test_distributed_batches_are_looked_at_by_the_part_that_is_here(tmp_path, one_rank):
    model = distribute_module(torch.nn.Linear(4, 3), one_rank)
    labels = distribute_tensor(torch.arange(6) % 3, one_rank, [Shard(0)])
    batches = [distribute_tensor(torch.randn(6, 4), one_rank, [Shard(0)]) for _ in range(6)]
    with clew.watch(out=str(tmp_path), name="run") as run:
        train(model, batches, lambda out: torch.nn.functional.cross_entropy(out, labels))
    assert clew.open_run(run.path).faults() == []


@pytest.fixture
def one_rank():
    """Return a mesh of this process alone, for as long as the test."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_what_checkpointing_calls_without_gradients_is_no_validation(tmp_path):
    blocks = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2)) for _ in "ab"
    )
    optimizer = torch.optim.SGD(blocks.parameters(), 0.01)
    with clew.watch(out=str(tmp_path), name="run") as run:
        for _ in range(12):
            x = torch.randn(5, 4, requires_grad=True)
            for block in blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
            optimizer.zero_grad()
            x.square().mean().backward()
            optimizer.step()
    assert "M07" not in [finding.id for finding in clew.diagnose(run.path).findings]


class Guarded(torch.nn.Module):
    """Has an opinion on names it does not have, as wrappers around other libraries do."""

    def __init__(self):
        super().__init__()
        self.inner = torch.jit.script(torch.nn.Linear(3, 3))

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise KeyError(name) from None

    def forward(self, x):
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_parts_and_modules_with_names_of_their_own_are_no_fault(tmp_path):
    with clew.watch(out=str(tmp_path), name="run") as run:
        train(Guarded(), [torch.randn(4, 3) for _ in range(3)], lambda out: out.square().mean())
    assert clew.open_run(run.path).faults() == []


def test_weights_without_values_are_passed_over(tmp_path):
    """An ensemble is called through a skeleton on the meta device, with the weights of all its members."""
    members = [torch.nn.Linear(3, 1) for _ in range(2)]
    weights, buffers = torch.func.stack_module_state(members)
    skeleton = torch.nn.Linear(3, 1, device="meta")
    optimizer = torch.optim.SGD(weights.values(), 0.1)

    def call(given, state, x):
        return torch.func.functional_call(skeleton, (given, state), (x,))

    with clew.watch(out=str(tmp_path), name="run") as run:
        for _ in range(3):
            optimizer.zero_grad()
            torch.vmap(call, (0, 0, None))(weights, buffers, torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    record = clew.open_run(run.path)
    assert record.faults() == []
    assert len(record.scalars()["loss"]) == 3


def test_a_model_on_the_meta_device_beside_the_training_is_no_fault(tmp_path):
    """Its shapes may be what somebody counts operations or memory with, in steps of its own."""
    with torch.device("meta"):
        skeleton = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    imagined = torch.optim.Adam(skeleton.parameters(), lr=0.1)
    targets = torch.zeros(8, dtype=torch.long, device="meta")
    with clew.watch(out=str(tmp_path), name="run") as run:
        for _ in range(4):
            imagined.zero_grad()
            loss = torch.nn.functional.cross_entropy(skeleton(torch.randn(8, 4, device="meta")), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(skeleton.parameters(), 1.0)
            imagined.step()
            train(model, [torch.randn(8, 4)], lambda out: out.square().mean())
    record = clew.open_run(run.path)
    assert record.faults() == []
    assert [each.rule for each in diagnose(record).findings] == ["optimizer-recreated"], "as train() does"
    assert len(record.scalars()["loss"]) == 4
