"""Taps in the places where people have them: autocast, workers, hooks, subclasses, transforms, modes, other tracers."""

import copy
import gc
import warnings

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import clew

NAN = float("nan")


def tap_all(x, tmp_path):
    y = clew.print(x, "x", file=tmp_path / "lines.txt")
    y = clew.check.finite(y, "x")
    y = clew.check.in_range(y, -1e6, 1e6)
    y = clew.check.shape(y, "B ...")
    return clew.tap(y, lambda t: None)


def train(tapped, tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
    )
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    for size in (4, 4, 3):
        out = torch.rand(size, 6)
        for layer in net:
            out = layer(tap_all(out, tmp_path) if tapped else out)
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
        clew.check.new_step()
    return [p.detach().numpy().tobytes() for p in net.parameters()], torch.get_rng_state().numpy().tobytes()


def test_training_is_the_same_to_the_last_bit(tmp_path):
    assert train(True, tmp_path) == train(False, tmp_path)


def test_hooks_change_nothing_either():
    def run(checked):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        table = {"*": "finite", "*@grad": "finite", "*.weight": "finite", "*.weight@grad": "finite"}
        attached = clew.checks(net, table) if checked else None
        for _ in range(3):
            net(torch.rand(4, 6)).square().mean().backward()
        if attached:
            attached.remove()
        return [p.grad.numpy().tobytes() for p in net.parameters()]

    assert run(True) == run(False)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, tmp_path):
    with mode():
        x = torch.ones(2, 2)
        assert tap_all(x, tmp_path) is x


def test_under_autocast(tmp_path):
    net = torch.nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(torch.ones(2, 4))
        assert tap_all(y, tmp_path) is y
    assert "bfloat16[2, 4]" in (tmp_path / "lines.txt").read_text()


def test_no_version_is_bumped_and_no_graph_grows(tmp_path):
    x = torch.ones(2, 2, requires_grad=True) * 2
    version, node = x._version, x.grad_fn
    tap_all(x, tmp_path)
    assert (x._version, x.grad_fn) == (version, node)


class Loud(torch.Tensor):
    """A subclass that counts what is done with it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Loud.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_hears_of_nothing_but_its_form(tmp_path):
    x = torch.tensor([[1.0, NAN]]).as_subclass(Loud)
    with pytest.raises(clew.CheckError, match=r"\[0, 1\] = nan"):
        clew.check.finite(x)
    assert clew.print(x, file=tmp_path / "lines.txt") is x
    assert isinstance(clew.check.shape(x, "1 2"), Loud)


def test_modes_see_no_operation_of_ours(tmp_path):
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 2)
    with Operations():
        tap_all(x, tmp_path)
    assert seen == []
    with Functions():
        tap_all(x, tmp_path)
    assert not [func for func in seen if getattr(func, "__name__", "") not in ("__get__", "detach")]


def test_a_traced_model_has_no_operation_of_ours(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self, tapped):
            super().__init__()
            self.fc = torch.nn.Linear(2, 2)
            self.tapped = tapped

        def forward(self, x):
            x = self.fc(x)
            return (tap_all(x, tmp_path) if self.tapped else x).relu()

    plain, tapped = (clew.trace(Net(each), torch.ones(1, 2)) for each in (False, True))
    assert (
        [each.op for each in tapped.operations]
        == [each.op for each in plain.operations]
        == ["linear", "relu"]
    )


def test_inside_vmap_and_grad(tmp_path):
    x = torch.rand(3, 2)

    def f(row):
        clew.print(row, "row", file=tmp_path / "lines.txt")
        clew.check.shape(row, "2")
        return clew.check.finite(row * 2, "doubled").sum()

    assert torch.allclose(torch.vmap(f)(x), (x * 2).sum(1))
    assert torch.func.grad(f)(x[0]).tolist() == [2.0, 2.0]
    x[1, 1] = NAN
    with pytest.raises(clew.CheckError, match="the whole batch of vmap") as caught:
        torch.vmap(f)(x)
    assert caught.value.details["offenders"] == [{"index": [1, 1], "value": "nan"}]


def test_in_a_backward_hook():
    x = torch.ones(2, requires_grad=True)
    y = x.sqrt()
    y.register_hook(lambda g: clew.check.finite(g, "grad of y"))
    with pytest.raises(clew.CheckError, match="grad of y must be finite"):
        (y * NAN).sum().backward()


class Samples(torch.utils.data.Dataset):
    def __init__(self, path):
        self.path = str(path)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = np.array([index, 1.0])
        clew.print(x, f"sample {index}", file=self.path)
        return clew.check.less(x, 3, "sample")


def test_in_the_workers_of_a_loader(tmp_path):
    loader = torch.utils.data.DataLoader(Samples(tmp_path / "lines.txt"), batch_size=1, num_workers=1)
    message = ""
    try:
        list(loader)
    except clew.CheckError as error:
        message = str(error)
    del loader
    gc.collect()  # the exception held the iterator, and with it a thread
    assert "sample must be less than 3: 1 of 2 elements is not" in message
    assert "worker 0" in (tmp_path / "lines.txt").read_text()


def test_tracers_of_torch_pass_by(tmp_path, capsys):
    class Net(torch.nn.Module):
        def forward(self, x):
            return clew.check.finite(clew.print(x * 2, file=tmp_path / "lines.txt"), "x")

    graph = torch.fx.symbolic_trace(Net())
    assert graph(torch.ones(1)).item() == 2.0
    assert "left out of torch.jit and torch.fx graphs" in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        traced = torch.jit.trace(Net(), torch.ones(1))
    assert traced(torch.tensor([3.0])).item() == 6.0


def test_fake_tensors_have_a_form_and_no_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, 3)
        assert clew.check.finite(x) is x
        with pytest.raises(clew.CheckError):
            clew.check.shape(x, "2 4")


def test_nested_and_quantised_tensors():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.tensor([NAN])], layout=torch.jagged)
    with pytest.raises(clew.CheckError, match="the parts joined"):
        clew.check.finite(nested)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.quantize_per_tensor(torch.tensor([0.0, 2.0]), 0.1, 0, torch.qint8)
    with pytest.raises(clew.CheckError, match=r"\[0\] = 0"):
        clew.check.positive(x)


def test_an_array_that_cannot_be_written_is_no_problem(capsys):
    x = np.arange(3.0)
    x.flags.writeable = False
    assert clew.print(x) is x
    assert clew.check.finite(x) is x
    assert "float64[3] numpy" in capsys.readouterr().out


def test_a_model_with_checks_inside_can_be_copied():
    net = torch.nn.Linear(2, 2)
    with clew.checks(net):
        net(torch.ones(1, 2))
        twin = copy.deepcopy(net)
    twin.weight.data.fill_(NAN)
    twin(torch.ones(1, 2))
