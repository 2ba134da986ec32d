"""A fault inside clew.watch is told and goes no further, and nothing of clew stays switched on."""

import faulthandler
import signal
import warnings

import pytest
import torch

import clew
from clew.api import recording
from clew.capture import current
from clew.capture.torch.batches import BatchLens
from clew.capture.torch.flight import Flight
from clew.capture.torch.session import TorchSession


def _fail(*_args, **_kwargs):
    raise ZeroDivisionError("injected")


def _train(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def _state():
    """What a recording changes in the process while it goes on."""
    return (
        current.active(),
        torch.nn.Module._call_impl,
        torch.autograd.backward,
        torch.optim.Optimizer.__init__,
        torch.utils.data._utils.worker._worker_loop,
        signal.getsignal(signal.SIGUSR1),
        faulthandler.is_enabled(),
        warnings.showwarning,
    )


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (TorchSession, "__init__"),
        (BatchLens, "install"),
        (Flight, "mark_start"),
        (recording.Recording, "_make_stopping"),
        (recording.provenance, "collect"),
    ],
)
def test_fault_at_the_start_of_a_watch(owner, name, tmp_path, monkeypatch, capsys):
    model, before = torch.nn.Linear(3, 1), _state()
    monkeypatch.setattr(owner, name, _fail)
    with clew.watch(model, out=str(tmp_path), name="run") as run:
        assert _state() == before
        assert run.step == 0
        run.log(accuracy=0.5)
        run.pause()
        run.resume()
        _train(model)
    assert capsys.readouterr().err == (
        "clew: not recording, fault inside clew: ZeroDivisionError('injected')\n"
    )
    assert _state() == before
    assert run.path == tmp_path / "run"


def test_fault_while_an_exception_is_told_leaves_the_exception(tmp_path, monkeypatch):
    monkeypatch.setattr("clew.api.failing.tell_exception", _fail)
    model = torch.nn.Linear(3, 1)
    with (
        pytest.raises(KeyError, match="the user's"),
        clew.watch(model, out=str(tmp_path), name="run", every=1),
    ):
        _train(model)
        raise KeyError("the user's")
    run = clew.open_run(tmp_path / "run")
    assert [fault.where for fault in run.faults()] == ["exception"]
    assert run.state == "died"
    assert len(run.ended_steps) == 2


@pytest.mark.parametrize(
    "name", ["_stopping.stop", "_crash.stop", "_doctor.close", "_explaining.explain_later"]
)
def test_fault_at_the_end_is_told_and_the_rest_is_closed(name, tmp_path, monkeypatch, capsys):
    model, before = torch.nn.Linear(3, 1), _state()
    owner, method = name.split(".")
    with clew.watch(model, out=str(tmp_path), name="run", every=1) as run:
        real = getattr(run._recording, owner)
        original = getattr(type(real), method)
        monkeypatch.setattr(type(real), method, lambda *args, act=original: (act(*args), _fail()))
        _train(model)
    assert capsys.readouterr().err == "clew: the run could not be closed properly: injected\n"
    assert _state() == before
    record = clew.open_run(tmp_path / "run")
    assert record.state == "complete"
    assert len(record.ended_steps) == 2
