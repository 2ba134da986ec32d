"""Numbers that a script gives with ``run.log``: kept apart from clew's own, and never guessed."""

from decimal import Decimal

import numpy as np
import pytest
import torch
from torch import nn

import clew
from clew.cli import main
from clew.errors import UsageError
from clew.model.scalar import is_own


def train(steps, after=lambda loss, step: None, *, model=None, optimizer=None):
    model = model or nn.Linear(4, 1)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        loss = model(torch.randn(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(loss, step)


@pytest.mark.parametrize("settings", [{"every": 1}, {"every": 50}])
def test_a_number_with_a_name_of_clew_s_is_kept_beside_it(tmp_path, capsys, monkeypatch, settings):
    monkeypatch.chdir(tmp_path)
    losses = []

    def log(loss, step):
        losses.append(loss.item())
        run.log(loss=100.0 + step, lr=7.0, accuracy=0.5, **{"time.forward": 3.0, "lr[1]": 8.0})

    with clew.watch(name="run", **settings) as run:
        train(60, log)
    told = [line for line in capsys.readouterr().err.splitlines() if "log.loss" in line]
    kept = "loss as log.loss, lr as log.lr, time.forward as log.time.forward, lr[1] as log.lr[1]"
    assert told == [f"clew: run.log keeps {kept}: clew records numbers of its own by that name"]
    record = clew.open_run(run.path)
    scalars = record.scalars()
    assert scalars["loss"].steps.tolist() == list(range(60))
    assert scalars["loss"].values == pytest.approx(losses)
    assert scalars["log.loss"].values.tolist() == [100.0 + step for step in range(60)]
    assert set(scalars["lr"].values) == {0.1}
    assert set(scalars["log.lr"].values) == {7.0}
    assert (scalars["time.forward"].values < 3).all()
    assert len(scalars["accuracy"]) == 60
    assert clew.list_runs("runs")[0].loss == pytest.approx(losses[-1])
    assert main(["plot", "run", "--scalar", "log.loss"]) == 0
    assert "log.loss" in capsys.readouterr().out


def test_every_number_of_clew_s_has_a_name_that_is_known_as_such(tmp_path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    with clew.watch(out=tmp_path, name="run", every=1, on_nonfinite="skip:3") as run:
        for step in range(4):
            loss = model(torch.randn(3, 4)).square().mean() * (float("nan") if step == 2 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        train(2, model=model, optimizer=optimizer)
        model(torch.randn(3, 4))
    names = list(clew.open_run(run.path).scalars())
    assert {"scaler.scale", "clip.limit", "clew.partial", "memory.process"} <= set(names)
    assert [name for name in names if not is_own(name)] == []


def test_numbers_of_any_kind_are_kept_as_they_were_when_they_were_logged(tmp_path):
    total = torch.zeros(1)
    numbers = {
        "a": 3,
        "b": True,
        "c": np.float16(0.5),
        "d": np.array([[2]]),
        "e": torch.tensor([[3]]),
        "f": Decimal(4),
        "g": torch.ones((), requires_grad=True),
        "h": float("nan"),
        "i": 10**400,
    }
    with clew.watch(out=tmp_path, name="run", every=1) as run:
        run.log(**numbers, total=total)
        total += 1
        train(1)
    kept = {name: series.last for name, series in clew.open_run(run.path).scalars().items()}
    assert [kept[name] for name in "abcdefgi"] == [3, 1, 0.5, 2, 3, 4, 1, float("inf")]
    assert np.isnan(kept["h"])
    assert kept["total"] == 0


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("x", "'mine' is a str, not a number: 'x'"),
        ("3", "'mine' is a str, not a number: '3'"),
        (None, "'mine' is a NoneType, not a number: None"),
        ([1.0], "'mine' is a list, not a number: [1.0]"),
        (1j, "'mine' is a complex, not a number: 1j"),
        (torch.arange(3.0), "'mine' has 3 elements (shape (3,)), not one"),
        (np.ones((2, 2)), "'mine' has 4 elements (shape (2, 2)), not one"),
        (torch.ones(0), "'mine' has 0 elements (shape (0,)), not one"),
        (torch.tensor(1j), "'mine' is a tensor of complex64 that holds no plain number"),
        (torch.ones(1).to_sparse(), "'mine' is a tensor of float32 that holds no plain number"),
    ],
)
def test_what_is_no_number_is_an_error_that_names_it(tmp_path, value, what):
    with clew.watch(out=tmp_path, name="run", every=1) as run:
        with pytest.raises(UsageError) as caught:
            run.log(other=1.0, mine=value)
        train(1)
    assert caught.value.what == what
    assert caught.value.where == "run.log(mine=…)"
    assert caught.value.next_step
    assert not {"other", "mine"} & set(clew.open_run(run.path).scalars())


def test_a_number_inside_vmap_is_an_error_that_says_so(tmp_path):
    def function(x):
        run.log(mine=x.sum())
        return x

    with (
        clew.watch(out=tmp_path, name="run") as run,
        pytest.raises(UsageError, match="'mine' is a tensor without a value of its own: vmap"),
    ):
        torch.func.vmap(function)(torch.ones(3, 2))
