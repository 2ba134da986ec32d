"""What a watchpoint that fires does, and what is done about NaN: stop, call, pause, leave steps out."""

import io
import math

import pytest
import torch
from loops import fit, mlp

import clew
from clew.errors import UsageError

ALWAYS = "*:param l2 > 0"


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def nan_at(steps):
    def change(step, x, y):
        if step in steps:
            x[0, 0] = math.nan
        return x, y

    return change


def test_stop_ends_the_script_before_its_next_step(tmp_path, capsys):
    done = []
    watched = clew.watch(out=str(tmp_path), budget="off", watch=ALWAYS, on_hit="stop")
    with pytest.raises(SystemExit) as stopped, watched:
        fit(mlp(), steps=50, after=done.append)
    assert stopped.value.code == 1
    assert len(done) == 1
    assert f"stopped at step 1: watch {ALWAYS} hit at step 0" in capsys.readouterr().err
    assert any("stopped at step 1" in note for note in clew.open_run(watched.path).info.notes)


def test_a_function_is_called_with_each_hit_before_the_next_step(tmp_path):
    model, seen, done = mlp(), [], []

    def look(finding):
        seen.append((finding.step, finding.site, len(done)))

    with clew.watch(out=str(tmp_path), budget="off", watch="loss:scalar value > 0", on_hit=look) as run:
        fit(model, steps=5, after=done.append)
    assert seen == [(0, "loss", 1)]
    assert clew.open_run(run.path).info.settings["on_hit"] == "call"


def test_a_hit_in_the_last_step_is_not_forgotten(tmp_path):
    seen = []
    with clew.watch(out=str(tmp_path), watch="loss:scalar nonfinite > 0", on_hit=seen.append):
        fit(mlp(), steps=5, change=nan_at({4}))
    assert [finding.step for finding in seen] == [4]


def test_a_function_that_fails_does_not_end_the_training(tmp_path, capsys):
    done = []

    def broken(_):
        raise ValueError("no such plot")

    with clew.watch(out=str(tmp_path), watch=ALWAYS, on_hit=broken):
        fit(mlp(), steps=5, after=done.append)
    assert len(done) == 5
    assert "failed and is not tried again: ValueError: no such plot" in capsys.readouterr().err


def test_call_alone_is_no_action(tmp_path):
    with pytest.raises(UsageError, match="needs a function"):
        clew.watch(out=str(tmp_path), watch=ALWAYS, on_hit="call")
    with pytest.raises(UsageError, match="did you mean 'pause'"):
        clew.watch(out=str(tmp_path), watch=ALWAYS, on_hit="pasue")


def test_pause_needs_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(UsageError, match="standard input is no terminal"):
        clew.watch(out=str(tmp_path), watch=ALWAYS, on_hit="pause")
    assert not list(tmp_path.iterdir())


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_pause_opens_a_shell_with_the_names_of_the_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal("('seen', finding.step, type(model).__name__)\n"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    model = mlp()
    weights = weights_of(model)
    with clew.watch(out=str(tmp_path), budget="off", watch="loss:scalar value > 0", on_hit="pause"):
        fit(model, steps=4)
    told = capsys.readouterr()
    assert "('seen', 0, 'Sequential')" in told.out + told.err
    assert "loss:scalar value > 0 hit at step 0" in told.out + told.err
    assert not torch.equal(weights, weights_of(model))


def test_actions_leave_the_training_as_it_is(tmp_path):
    models = []
    for settings in ({}, {"watch": ALWAYS, "on_hit": lambda _: None, "on_nonfinite": "skip:2"}):
        torch.manual_seed(0)
        models.append(mlp())
        with clew.watch(out=str(tmp_path), **settings):
            fit(models[-1], steps=8)
    assert torch.equal(*map(weights_of, models))


# ---------------------------------------------------------------- what to do about NaN


def test_stop_leaves_the_weights_as_they_were(tmp_path, capsys):
    model, before = mlp(), []
    with pytest.raises(SystemExit) as stopped, clew.watch(out=str(tmp_path), on_nonfinite="stop"):
        fit(model, change=nan_at({4}), after=lambda _: before.append(weights_of(model)))
    assert stopped.value.code == 1
    assert len(before) == 4
    assert torch.equal(weights_of(model), before[-1])
    assert "stopped at step 4: the loss is NaN or infinite" in capsys.readouterr().err
    (run,) = clew.list_runs(str(tmp_path))
    assert [finding.id for finding in clew.diagnose(run.path).findings] == ["D01"]


def test_skip_leaves_bad_steps_out(tmp_path):
    model = mlp()
    with clew.watch(out=str(tmp_path), on_nonfinite="skip:2") as run:
        fit(model, change=nan_at({4, 5, 9}))
    assert weights_of(model).isfinite().all()
    assert clew.open_run(run.path).scalar("nonfinite.skipped").steps.tolist() == [4, 5, 9]


def test_skip_gives_up_after_too_many_in_a_row(tmp_path):
    model = mlp()
    with pytest.raises(SystemExit) as stopped, clew.watch(out=str(tmp_path), on_nonfinite="skip:2"):
        fit(model, change=nan_at(range(4, 30)))
    assert stopped.value.code == 1
    assert weights_of(model).isfinite().all()


def test_without_a_policy_nothing_is_changed(tmp_path):
    model = mlp()
    with clew.watch(out=str(tmp_path)):
        fit(model, change=nan_at({4}), steps=6)
    assert not weights_of(model).isfinite().all()


@pytest.mark.parametrize("count", [1, 3])
def test_what_was_left_out_is_in_the_record(tmp_path, count):
    with clew.watch(out=str(tmp_path), on_nonfinite="skip:3") as run:
        fit(mlp(), change=nan_at(set(range(4, 4 + count))))
    (note,) = [note for note in clew.open_run(run.path).info.notes if "left out" in note]
    assert note.startswith("1 step was left out" if count == 1 else "3 steps were left out")


def test_skip_works_inside_a_closure(tmp_path):
    model, loss_of = mlp(), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with clew.watch(out=str(tmp_path), on_nonfinite="skip:1") as run:
        for step in range(6):
            x, y = torch.randn(8, 8), torch.randint(3, (8,))
            if step == 3:
                x[0] = math.nan

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert weights_of(model).isfinite().all()
    assert clew.open_run(run.path).scalar("nonfinite.skipped").steps.tolist() == [3]


def scaled_training(model, factor, *, steps, init_scale=2.0**16):
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.randn(8, 8)) * factor(step)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def test_a_scaler_that_finds_its_scale_is_left_alone(tmp_path):
    model = mlp()
    with clew.watch(out=str(tmp_path), on_nonfinite="skip:2") as run:
        scaled_training(model, lambda _: 1e17, steps=12)
    skipped = clew.open_run(run.path).scalar("scaler.skipped").values
    assert skipped.sum() > 2
    assert not any("left out" in note for note in clew.open_run(run.path).info.notes)


def test_gradients_that_are_bad_at_scale_one_are_counted(tmp_path, capsys):
    with (
        pytest.raises(SystemExit),
        clew.watch(out=str(tmp_path), on_nonfinite="skip:2"),
    ):
        scaled_training(mlp(), lambda _: math.nan, steps=12, init_scale=1.0)
    assert "3 steps in a row had NaN or infinite gradients, 2 are allowed" in capsys.readouterr().err
