"""What clew asks of tensors is heard by nobody: modes and tensor classes of the user's are called as without it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import clew


class HearingFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.heard.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


class HearingOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.heard.append(str(function))
        return function(*args, **(kwargs or {}))


class HearingTensor(torch.Tensor):
    heard: list[str] = []  # noqa: RUF012 - shared by all on purpose

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.heard.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


def train(mode, *, watched, folder, make_batch=torch.Tensor.clone):
    """Ten steps with dropout, batch norm, a loader, clipping, a scaler in the last ones, and an evaluation."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    criterion, scaler = torch.nn.CrossEntropyLoss(), torch.amp.GradScaler("cpu")
    data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    recording = clew.watch(model, optimizer, out=folder, budget="off", snapshots="every:3")
    with recording if watched else contextlib.nullcontext(), mode or contextlib.nullcontext():
        for epoch in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(model(make_batch(x)), y)
                if epoch:
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    loss.backward()
                    optimizer.step()
        model.eval()
        with torch.no_grad():
            model(data.tensors[0]).argmax(1)


@pytest.mark.parametrize("kind", [HearingFunctions, HearingOperations])
def test_a_mode_hears_what_it_hears_without_clew(kind, tmp_path):
    plain, under_clew = kind(), kind()
    train(plain, watched=False, folder=tmp_path)
    train(under_clew, watched=True, folder=tmp_path)
    assert len(plain.heard) > 100
    assert under_clew.heard == plain.heard


def test_a_tensor_class_hears_what_it_hears_without_clew(tmp_path):
    def make(x):
        return x.as_subclass(HearingTensor)

    HearingTensor.heard = plain = []
    train(None, watched=False, folder=tmp_path, make_batch=make)
    HearingTensor.heard = under_clew = []
    train(None, watched=True, folder=tmp_path, make_batch=make)
    assert len(plain) > 30
    assert under_clew == plain


def fit_with_own_class(*, watched, folder, updates, **settings):
    """Train a model whose parameter and buffers are of a class that hears; return what it heard."""
    torch.manual_seed(0)
    HearingTensor.heard = heard = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    model.register_buffer("weighting", torch.ones(3).as_subclass(HearingTensor))
    model[1].running_mean = model[1].running_mean.as_subclass(HearingTensor)
    model[2].weight = torch.nn.Parameter(model[2].weight.detach().as_subclass(HearingTensor))
    optimizer = None if updates == "by hand" else torch.optim.AdamW(model.parameters(), lr=0.01)
    given = (model,) if optimizer is None else (model, optimizer)
    with clew.watch(*given, out=folder, budget="off", **settings) if watched else contextlib.nullcontext():
        for _ in range(30):
            loss = (model(torch.randn(8, 4)) * model.weighting).square().mean()
            loss.backward()
            if optimizer is None:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(0.1 * parameter.grad)
            else:
                optimizer.step()
            model.zero_grad()
    return heard


@pytest.mark.parametrize(
    ("updates", "settings"),
    [
        ("by an optimizer", {"snapshots": "auto"}),
        ("by an optimizer", {"snapshots": "every:3", "kinds": "all"}),
        ("by hand", {"snapshots": "auto"}),
    ],
)
def test_parameters_and_buffers_of_a_class_of_the_users_hear_what_they_hear_without_clew(
    updates, settings, tmp_path
):
    plain = fit_with_own_class(watched=False, folder=tmp_path, updates=updates)
    under_clew = fit_with_own_class(watched=True, folder=tmp_path, updates=updates, **settings)
    assert len(plain) > 30
    assert under_clew == plain
