"""clew diff and clew determinism on the command line, clew.record and clew.assert_same from Python."""

from __future__ import annotations

import json
import textwrap

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import clew
from clew.cli import main
from clew.errors import UsageError
from clew.testing.runs import make_run


def make_model(seed=0, **names):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))


def train(folder, name, model=None, *, steps=4, lr=0.1, edit=None, **settings):
    model = model or make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    torch.manual_seed(3)
    chosen = {"budget": "off", "status": False, "doctor": False, **settings}
    with clew.watch(model, optimizer, out=str(folder), name=name, **chosen) as watch:
        for step in range(steps):
            if edit is not None:
                edit(step, model)
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
    return watch.path


def run_command(capsys, *words):
    code = main([*map(str, words)])
    return code, capsys.readouterr().out


@pytest.fixture
def reference(tmp_path):
    return train(tmp_path, "reference")


def test_json_has_the_promised_keys(tmp_path, reference, capsys):
    other = train(tmp_path, "other", lr=0.2)
    code, out = run_command(capsys, "diff", reference, other, "--json")
    found = json.loads(out)
    assert code == 1
    assert found["same"] is False
    assert found["cause"] == "learning-rate"
    assert {key: found["first"][key] for key in ("step", "phase", "site", "kind", "op")} == {
        "step": 0,
        "phase": "update",
        "site": "0.weight",
        "kind": "update",
        "op": "",
    }
    assert "lr is 0.1 in a and 0.2 in b" in found["sentence"]
    assert found["tensors"][0]["verdict"] == "origin"
    assert found["only_a"] == found["only_b"] == []


def test_the_verdict_comes_before_the_table(tmp_path, reference, capsys):
    model = make_model()
    with torch.no_grad():
        model[4].weight[0, 0] += 0.01
    code, out = run_command(capsys, "diff", reference, train(tmp_path, "other", model), "--limit", 3)
    assert code == 1
    assert out.index("the runs part at step 0 in the weights") < out.index("relative error")
    assert "4.weight" in out
    assert "more; --limit 0 shows all" in out


def test_the_same_run_is_identical(tmp_path, reference, capsys):
    code, out = run_command(capsys, "diff", reference, train(tmp_path, "again"))
    assert code == 0
    assert "the runs are identical" in out


def test_fewer_steps_are_said_and_not_a_difference(tmp_path, reference, capsys):
    code, out = run_command(capsys, "diff", reference, train(tmp_path, "shorter", steps=2))
    assert code == 0
    assert "2 steps of run a not compared" in out


def test_thinned_runs_are_compared_where_both_have_records(tmp_path, capsys):
    settings = {"every": 3, "warmup": 0}
    a = train(tmp_path, "thin", steps=9, **settings)
    b = train(tmp_path, "full", steps=9)
    code, out = run_command(capsys, "diff", a, b)
    assert code == 0
    assert "run a was thinned" in out

    def bend(step, model):
        if step == 4:
            with torch.no_grad():
                model[0].weight.mul_(1.01)

    code, out = run_command(capsys, "diff", a, train(tmp_path, "bent", steps=9, edit=bend), "--json")
    found = json.loads(out)
    assert code == 1
    assert found["first"]["step"] == 4
    assert "not recorded in full" in found["sentence"]


def test_weights_changed_outside_the_optimizer(tmp_path, reference):
    def bend(step, model):
        if step == 2:
            with torch.no_grad():
                model[0].weight.mul_(1.01)

    found = clew.diff(reference, train(tmp_path, "bent", edit=bend))
    assert (found.first.step, found.first.site, found.first.cause) == (2, "0.weight", "optimizer")
    assert "changed outside the optimizer" in found.sentence


def train_from_loader(folder, name, *, seed=0, label=None, accumulate=1, size=4, sees_targets=True):
    model, criterion = make_model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(16, 4, generator=generator), torch.zeros(16, dtype=torch.int64)
    if label is not None:
        targets[label] = 1
    given = targets if sees_targets else torch.arange(16)
    loader = DataLoader(
        TensorDataset(inputs, given),
        batch_size=size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
    )
    torch.manual_seed(3)
    seen = None if sees_targets else model
    with clew.watch(seen, out=str(folder), name=name, budget="off", doctor=False) as watch:
        for index, (x, y) in enumerate(loader):
            criterion(model(x), y if sees_targets else targets[y]).backward()
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return watch.path


@pytest.mark.parametrize(
    ("change", "site", "said"),
    [
        ({"seed": 1}, "batch.0", "other samples were drawn (5, 1, 3, 7 in a"),
        ({"size": 8}, "batch.0", "4 samples in a and 8 in b"),
        ({"accumulate": 2}, "batch.0", "a step of run b takes more batches"),
        ({"label": 5}, "loader.1", "made of the same samples"),
    ],
    ids=["order", "size", "accumulation", "label"],
)
def test_differences_of_the_data_are_told(tmp_path, change, site, said):
    found = clew.diff(train_from_loader(tmp_path, "a"), train_from_loader(tmp_path, "b", **change))
    assert (found.first.step, found.first.site, found.first.cause) == (0, site, "data"), found.sentence
    assert said in found.sentence


def test_targets_that_nobody_saw_are_suspected_when_earlier_losses_were_equal(tmp_path):
    a = train_from_loader(tmp_path, "a", sees_targets=False)
    b = train_from_loader(tmp_path, "b", sees_targets=False, label=9)
    found = clew.diff(a, b)
    assert (found.first.step, found.first.phase, found.first.cause) == (2, "loss", "data"), found.sentence


def test_renamed_modules_are_found_and_a_map_wins(tmp_path, reference, capsys):
    plain = make_model()
    named = nn.Sequential()
    for name, module in zip(("enter", "norm", "bend", "drop", "leave"), plain, strict=True):
        named.add_module(name, module)
    other = train(tmp_path, "named", named)
    code, out = run_command(capsys, "diff", reference, other, "--save-map", tmp_path / "names.toml")
    assert code == 0, out
    assert "0.weight = enter.weight" in out
    assert '"4" = "leave"' in (tmp_path / "names.toml").read_text()
    assert main(["diff", str(reference), str(other), "--map", str(tmp_path / "names.toml")]) == 0
    (tmp_path / "wrong.toml").write_text('[names]\n"9" = "enter"\n')
    assert main(["diff", str(reference), str(other), "--map", str(tmp_path / "wrong.toml")]) == 2


def test_noise_of_a_baseline_is_no_difference(tmp_path, capsys):
    def shake(size):
        def edit(step, model):
            with torch.no_grad():
                model[0].weight.add_(torch.full_like(model[0].weight, size))

        return edit

    paths = [train(tmp_path, f"n{i}", edit=shake(size)) for i, size in enumerate((0.0, 1e-4, 1.5e-4, 0.05))]
    assert main(["diff", str(paths[0]), str(paths[2])]) == 1
    capsys.readouterr()
    baseline = ["--baseline", paths[0], paths[1]]
    code, out = run_command(capsys, "diff", paths[0], paths[2], *baseline)
    assert code == 0
    assert "equal within tolerance, not identical" in out
    code, out = run_command(capsys, "diff", paths[0], paths[3], *baseline, "--json")
    assert code == 1
    assert json.loads(out)["first"]["site"] == "0.weight"


def test_equal_nan_is_equal(tmp_path):
    def spoil(step, model):
        if step == 1:
            with torch.no_grad():
                model[0].bias[0] = float("nan")

    settings = {"on_nonfinite": "explain"}
    a = train(tmp_path, "nan", edit=spoil, **settings)
    b = train(tmp_path, "nan-again", edit=spoil, **settings)
    assert clew.diff(a, b).is_identical


def test_rounding_is_the_same_but_not_identical(tmp_path):
    arrays = {"x": np.linspace(-1, 1, 64, dtype=np.float32)}
    close = {"x": np.nextafter(arrays["x"], np.float32(2))}
    with clew.record("a", arrays, out=str(tmp_path)) as a, clew.record("b", close, out=str(tmp_path)) as b:
        found = clew.diff(a.path, b.path)
    assert found.is_same
    assert not found.is_identical
    assert "equal within tolerance" in found.sentence


def test_a_mean_near_zero_makes_no_large_error(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(1000).astype(np.float32)
    x -= x.mean()
    with clew.record("a", {"x": x}, out=str(tmp_path)) as a:
        pass
    with clew.record("b", {"x": x * np.float32(1 + 1e-7) + np.float32(1e-8)}, out=str(tmp_path)) as b:
        pass
    assert clew.diff(a.path, b.path).is_same


def test_arrays_of_another_library_are_compared_with_a_torch_run(tmp_path):
    model = make_model().eval()
    x = torch.randn(6, 4)
    with (
        clew.watch(model, out=str(tmp_path), name="torch", budget="off", doctor=False) as watch,
        torch.no_grad(),
    ):
        model(x)
    weight, bias = model[0].weight.detach().numpy(), model[0].bias.detach().numpy()
    linear = x.numpy() @ weight.T + bias
    normal = (linear - linear.mean(1, keepdims=True)) / np.sqrt(linear.var(1, keepdims=True) + 1e-5)
    with clew.record("good", {"0": linear, "1": normal}, out=str(tmp_path)) as good:
        pass
    found = clew.diff(watch.path, good.path)
    assert found.is_same, found.sentence
    assert "4" in found.only_a
    with clew.record("bad", {"0": linear, "1": normal * 1.01}, out=str(tmp_path)) as bad:
        pass
    found = clew.diff(watch.path, bad.path)
    assert (found.first.site, found.first.cause) == ("1", "operation")


def test_the_rank_that_differs_is_named(tmp_path):
    for name in ("a", "b"):
        for rank in (0, 1):
            broken = [("fc2", "output")] if (name, rank) == ("b", 1) else []
            make_run(tmp_path / name, rank=rank, steps=3, extras=True, broken=broken)
    found = clew.diff(tmp_path / "a", tmp_path / "b")
    assert (found.first.site, found.first.rank, found.first.step) == ("fc2", 1, 0)
    assert "step 0 on rank 1" in found.sentence
    assert clew.diff(tmp_path / "a", tmp_path / "a").is_identical


def test_without_hashes_runs_are_the_same_by_their_statistics(tmp_path):
    paths = [make_run(tmp_path / name, steps=2) for name in ("a", "b")]
    found = clew.diff(*paths)
    assert found.is_same
    assert not found.is_identical
    assert "the same by their statistics" in found.sentence
    other = make_run(tmp_path / "c", steps=2, broken=[("fc1", "output")])
    assert clew.diff(paths[0], other).first.site == "fc1"


def test_runs_without_a_common_step_cannot_be_compared(tmp_path):
    with clew.record("a", {"x": np.ones(2)}, step=0, out=str(tmp_path)) as a:
        pass
    with clew.record("b", {"x": np.ones(2)}, step=7, out=str(tmp_path)) as b:
        pass
    found = clew.diff(a.path, b.path)
    assert not found.is_same
    assert "no step recorded in both" in found.sentence
    assert found.to_json()["first"] is None


def test_record_takes_kinds_scalars_and_steps_in_order(tmp_path):
    with clew.record("run", out=str(tmp_path)) as run:
        run.put({"fc": [1.0, 2.0], ("fc.weight", "param"): torch.ones(2, 2)}, scalars={"loss": 0.5})
        run.put({"fc": np.zeros(2)})
        with pytest.raises(UsageError, match="step 1 is written already"):
            run.put({"fc": np.zeros(2)}, step=1)
        with pytest.raises(UsageError, match="unknown kind 'grads'"):
            run.put({("fc", "grads"): np.zeros(2)})
        with pytest.raises(UsageError, match="no array of numbers"):
            run.put({"fc": "text"})
    opened = clew.open_run(run.path)
    assert opened.state == "complete"
    assert opened.steps.tolist() == [0, 1]
    assert opened.series("fc", "output", "l2").values.tolist() == pytest.approx([5**0.5, 0.0])
    assert opened.kinds("fc.weight") == ["param"]
    assert opened.scalar("loss").last == 0.5
    with pytest.raises(UsageError, match="closed"):
        run.put({"fc": np.zeros(2)})


def test_the_function_form_adds_steps_to_one_run(tmp_path):
    first = clew.record("run", {"x": np.ones(3)}, step=0, out=str(tmp_path))
    again = clew.record("run", {"x": np.ones(3)}, step=5, out=str(tmp_path))
    assert again is first
    assert clew.open_run(first.path).steps.tolist() == [0, 5]
    first.close()
    other = clew.record("run", {"x": np.ones(3)}, step=0, out=str(tmp_path))
    other.close()
    assert other.path != first.path


def test_assert_same_passes_for_equal_models_and_leaves_no_trace():
    a, b = make_model(), make_model()
    a.append(nn.BatchNorm1d(2))
    b.append(nn.BatchNorm1d(2))
    before = torch.random.get_rng_state()
    clew.assert_same(a, b, torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert a[-1].num_batches_tracked == 0


def test_assert_same_says_what_differs():
    a, b, batch = make_model(), make_model(), (torch.randn(6, 4),)
    b[1].eps = 0.1
    with pytest.raises(AssertionError, match=r"output of 1 \(LayerNorm\): eps is 1e-05 in a and 0.1 in b"):
        clew.assert_same(a, b, batch)
    with torch.no_grad():
        b[4].bias.add_(1)
    with pytest.raises(AssertionError, match=r"weight of 4.bias: this initial weight differs, and no other"):
        clew.assert_same(a, b, batch)
    with pytest.raises(UsageError, match="is a function"):
        clew.assert_same(a, lambda x: x, batch)


SCRIPT = """
    import os, torch
    torch.manual_seed(os.getpid())
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
"""


def test_a_file_that_cannot_be_written_is_an_error(reference, tmp_path, capsys):
    for option in ("--html", "--save-map"):
        words = ["diff", str(reference), str(reference), option, str(tmp_path / "no" / "file")]
        assert main(words) == 2
        assert "cannot write the file" in capsys.readouterr().err


def test_determinism_of_a_script_with_a_seed_of_its_own(tmp_path, capsys):
    """That a seeded script is identical is shown by the example of the reference."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    code = main(["determinism", "--json", "--keep", str(tmp_path / "kept"), str(script)])
    printed = capsys.readouterr()
    assert code == 1, printed.err
    found = json.loads(printed.out)
    assert (found["cause"], found["first"]["step"]) == ("randomness", 0)
    assert "the seeds do" in found["sentence"]
    assert main(["diff", str(tmp_path / "kept" / "first"), str(tmp_path / "kept" / "second")]) == 1


def test_determinism_of_a_script_that_fails(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)\n")
    assert main(["determinism", str(script)]) == 2
    assert "exit code 3" in capsys.readouterr().err
    assert main(["determinism"]) == 2
    assert main(["determinism", str(tmp_path / "nosuch.py")]) == 2
    assert "no script" in capsys.readouterr().err


class Touchy(str):
    def __str__(self):
        raise AssertionError("the user's code was run")


class Odd(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.scale, self.act, self.sizes, self.touchy = 0.5, torch.tanh, (1, 2), Touchy("x")
        self.table = {"never": "told"}

    def extra_repr(self):
        raise AssertionError("the user's code was run")

    def forward(self, x):
        return self.act(super().forward(x)) * self.scale


def test_attributes_of_modules_are_recorded_without_running_their_code(tmp_path):
    site = clew.open_run(train(tmp_path, "odd", nn.Sequential(Odd()), steps=1)).find("0")[0]
    plain, _, code = site.args.partition("; forward()=")
    assert plain == "training=True; in_features=4; out_features=2; scale=0.5; act=tanh; sizes=(1, 2)"
    assert {"act", "forward", "scale", "*"} <= set(code.split())
