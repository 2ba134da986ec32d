"""Tensors that are not simply memory, and measuring that leaves no trace."""

import numpy as np
import pytest
import torch
import torch._dynamo  # fake and jagged tensors import it, and it changes functions of torch when it comes
from measuring import WAYS, assert_row, measure, measured_by
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from clew.errors import UnsupportedTensor
from clew.stats import reference, torch_path
from clew.stats.rows import Rows


@pytest.fixture(params=WAYS)
def way(request):
    with measured_by(request.param):
        yield request.param


def assert_measures_like(tensor, array, way):
    row, hashed, hist = measure(tensor, way)
    assert_row(row, reference.summarise(array), narrow=array.real.dtype.itemsize <= 4)
    assert hashed == reference.fingerprint(array)
    np.testing.assert_array_equal(hist, reference.histogram(array))


class Tagged(torch.Tensor):
    """A subclass with memory and no behaviour."""


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_wrapped_lazy_and_unusual_tensors_show_their_numbers(way):
    torch.manual_seed(0)
    x, z = torch.randn(300), torch.randn(40, dtype=torch.complex64)
    ragged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    jagged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    quantised = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    twins = [
        (torch.nn.Parameter(x), x),
        (torch.nn.Buffer(x), x),
        (x.as_subclass(Tagged), x),
        (z, z),
        (z[::2], z[::2]),
        (z.conj(), z.conj().resolve_conj()),
        (z.conj().imag, z.conj().imag.resolve_neg()),
        (z[:1].conj().imag, z[:1].conj().imag.resolve_neg()),
        (torch._neg_view(x)[::2], -x[::2]),
        (torch._efficientzerotensor(50), torch.zeros(50)),
        (quantised, quantised.dequantize()),
        (x.view(30, 10).to_mkldnn(), x),
        (ragged, torch.cat([part.reshape(-1) for part in ragged.unbind()])),
        (jagged, jagged.values()),
    ]
    for tensor, plain in twins:
        assert_measures_like(tensor, plain.numpy(), way)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_measured_as_the_dense_ones_they_stand_for(way):
    dense = torch.zeros(40, 30)
    dense[3, 4], dense[10, 2], dense[39, 29] = 2.0, -3.0, float("nan")
    doubled = torch.sparse_coo_tensor([[1, 1], [2, 2]], [1.0, 2.0], (40, 30), check_invariants=True)
    summed = torch.zeros(40, 30)
    summed[1, 2] = 3.0
    layouts = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((2, 2))]
    for tensor, twin in [*((tensor, dense) for tensor in layouts), (doubled, summed)]:
        row, _, hist = measure(tensor, way)
        np.testing.assert_allclose(row, reference.summarise(twin.numpy()), rtol=1e-6)
        np.testing.assert_array_equal(hist, reference.histogram(twin.numpy()))
    assert measure(layouts[0], way)[1] == measure(dense.to_sparse(), way)[1]
    assert measure(layouts[0], way)[1] != measure(dense.t().contiguous().to_sparse(), way)[1]
    assert measure(torch.zeros(4, 4).to_sparse(), way)[0][4] == 16


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.empty(3, device="meta"), "meta device has a shape but no values"),
        (torch.nn.UninitializedParameter, "lazy parameter has no values"),
        (lambda: FakeTensorMode().from_tensor(torch.ones(3)), "fake tensor exists while a program is traced"),
        (lambda: torch.ones(3).to(torch.float8_e8m0fnu), "elements of type torch.float8_e8m0fnu"),
    ],
)
def test_tensors_without_values_are_refused_with_the_reason(way, make, reason):
    with pytest.raises(UnsupportedTensor, match=reason) as caught:
        Rows().measure(make(), 0)
    assert caught.value.where and caught.value.next_step


def test_transformed_tensors_are_refused_and_plain_ones_inside_are_not(way):
    reasons = []
    plain = torch.arange(6.0).view(2, 3).t()
    rows = Rows(hashes=True)

    def look(x):
        with pytest.raises(UnsupportedTensor) as caught:
            rows.measure(x, 0)
        reasons.append(caught.value.what)
        rows.measure(plain, 1, hash=True)
        return x.sum()

    torch.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    torch.func.functionalize(look)(torch.ones(3))
    assert all("torch.func transforms" in reason for reason in reasons[:2])
    assert "functional tensor" in reasons[2]
    values, hashes, _ = rows.take(2)
    assert values[1, 9] == 2.5 and hashes[1] == reference.fingerprint(plain.numpy())


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_measuring_leaves_no_trace(way):
    torch.manual_seed(0)
    leaf = torch.nn.Parameter(torch.randn(100, 60))
    leaf.grad = torch.randn(100, 60)
    inner = (leaf * 2).relu()
    tensors = [
        leaf,
        leaf.grad,
        inner,
        inner.t(),
        leaf.t(),
        inner.bfloat16(),
        torch.view_as_complex(leaf.view(-1, 2)),
    ]
    copies = [tensor.detach().clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    state, grad_mode = torch.get_rng_state(), torch.is_grad_enabled()
    rows = Rows(hashes=True, hists=True)
    with Seen() as seen, Dispatched() as dispatched:
        for tensor in tensors:
            rows.measure(tensor, 0, hash=True, hist=True)
        rows.measure_many(tensors, 0, hash=True, hist=True)
        rows.settle()
        observed = [*seen.calls, *dispatched.calls]
    assert observed == []
    assert [tensor._version for tensor in tensors] == versions
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled() is grad_mode
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor.detach(), copy)
    inner.sum().backward()
    assert leaf.grad is not None


def test_inference_tensors_are_measured(way):
    with torch.inference_mode():
        x = torch.arange(8.0).view(2, 4).t()
        assert measure(x, way)[0][9] == 3.5
    assert measure(x, way)[0][9] == 3.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_another_device_is_never_waited_for(dtype):
    """A fake device has no values: any operation that asks for one before the host copy would raise."""
    torch_path._keys.cache_clear()
    with FakeTensorMode():
        for size, pieces in [(0, 0), (100, 1), (5000, 1), (5 << 20, 2)]:
            packed = torch_path.measure(torch.empty(size, device="cuda", dtype=dtype), hash=True, hist=True)
            assert packed.device.type == "cuda" and packed.shape == (pieces * torch_path.SUMS + 1 + 128,)
    torch_path._keys.cache_clear()


def test_torch_operations_are_the_ones_that_need_no_atomics():
    with Dispatched() as dispatched:
        torch_path.measure(torch.randn(9000), hash=True, hist=True)
    names = {str(call) for call in dispatched.calls}
    assert not {name for name in names if "local_scalar" in name or "bincount" in name or "scatter" in name}


def test_a_distributed_tensor_is_measured_where_it_is(way):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        local = torch.arange(24.0).view(6, 4)
        tensor = torch.nn.Parameter(DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)]))
        assert_measures_like(tensor, local.numpy(), way)
        rows = Rows()
        old = [tensor.detach() - 2.0]
        assert rows.measure_updates([tensor], old, first_row=0) == []
        assert rows.take(1)[0][0, 9] == 2.0 and torch.equal(old[0].to_local(), local)
    finally:
        distributed.destroy_process_group()


def test_tensors_that_torch_does_not_tell_of_are_refused_and_others_measured_after_them():
    refused = []

    def measure_often(x):
        table = Rows()
        refused.extend(table.try_measure(x, 0, hash=False, hist=False) is not None for _ in range(3))
        return x.sum()

    torch.func.grad(measure_often)(torch.ones(3))
    torch.func.vmap(measure_often)(torch.ones(2, 3))
    measure_often(torch.empty(3, device="meta"))
    assert refused == [True] * 9
    rows = Rows(capacity=2)
    rows.measure(torch.ones(4).to_sparse(), 0)
    rows.measure(torch.arange(5.0), 1)
    assert rows.take(2)[0][:, 0].tolist() == [4.0, 5.0]
