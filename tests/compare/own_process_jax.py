"""Models of Flax and Equinox recorded as runs, held against what every adapter must satisfy, and given weights."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")

import clew  # noqa: E402
from clew.testing.adapter import INPUTS, check_adapter, make_weights  # noqa: E402


class FlaxNet(nnx.Module):
    def __init__(self):
        self.fc1 = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
        self.fc2 = nnx.Linear(6, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.fc2(jax.nn.relu(self.fc1(x)))


class EquinoxNet(eqx.Module):
    fc1: eqx.nn.Linear
    fc2: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.PRNGKey(0))
        self.fc1 = eqx.nn.Linear(4, 6, key=keys[0])
        self.fc2 = eqx.nn.Linear(6, 3, key=keys[1])

    def __call__(self, x):
        return self.fc2(jax.nn.relu(self.fc1(x)))


def record_flax(folder, name, *, jit=False):
    model, report = clew.adapters.jax.import_weights(FlaxNet(), make_weights())
    assert report.is_complete

    def loss_of(model):
        return (model(jax.numpy.asarray(INPUTS)) ** 2).mean()

    grad = nnx.value_and_grad(loss_of)
    with clew.adapters.jax.watch(model, name=name, out=str(folder)) as run:
        loss, grads = (nnx.jit(grad) if jit else grad)(model)
        run.step(model, loss=loss, grads=grads)
    return run.path


def test_flax_satisfies_what_every_adapter_must(tmp_path):
    check_adapter(record_flax(tmp_path, "one"), record_flax(tmp_path, "two"))


def test_flax_under_jit_shows_the_same_sites(tmp_path):
    plain, compiled = (clew.open_run(record_flax(tmp_path, n, jit=j)) for n, j in (("p", False), ("c", True)))
    kinds = [
        {(s, k) for s, k in zip(t["site"], t["kind"], strict=True)} for t in (plain.stats(), compiled.stats())
    ]
    assert kinds[0] == kinds[1]
    assert ("fc1", "grad_output") in kinds[0]
    assert clew.diff(plain, compiled).is_same


def test_equinox_is_recorded(tmp_path):
    model, report = clew.adapters.jax.import_weights(EquinoxNet(), make_weights())
    assert report.is_complete
    assert not any(match.is_turned for match in report.matched)

    def loss_of(model):
        return (jax.vmap(model)(jax.numpy.asarray(INPUTS)) ** 2).mean()

    single = jax.numpy.asarray(INPUTS[0])
    with clew.adapters.jax.watch(model, name="eqx", out=str(tmp_path)) as run:
        value = model(single)
        run.step(model, loss=loss_of(model), grads=eqx.filter_grad(lambda m: (m(single) ** 2).sum())(model))
    table = clew.open_run(run.path).stats(kind="output")
    assert {"fc1", "fc2"} <= set(table["site"])
    assert np.allclose(value, make_reference()[0], atol=1e-5)


def make_reference():
    w = make_weights()
    return np.maximum(INPUTS @ w["fc1.weight"].T + w["fc1.bias"], 0) @ w["fc2.weight"].T + w["fc2.bias"]


def test_nothing_is_left_behind():
    model = FlaxNet()
    before = nnx.Linear.__call__, FlaxNet.__call__
    capture = clew.adapters.jax._adapter().JaxCapture(model)
    capture.start()
    assert nnx.Linear.__call__ is not before[0]
    capture.stop()
    assert (nnx.Linear.__call__, FlaxNet.__call__) == before


def test_the_report_says_what_was_turned_and_what_is_missing():
    weights = make_weights()
    del weights["fc2.bias"]
    weights["extra.weight"] = np.zeros((9, 9), np.float32)
    model, report = clew.adapters.jax.import_weights(FlaxNet(), weights)
    assert np.allclose(model.fc1.kernel[...], weights["fc1.weight"].T)
    assert report.missing == ("fc2.bias",)
    assert report.unused == ("extra.weight",)
    assert "fc1.kernel <- fc1.weight" in str(report)
    assert "no weight for fc2.bias" in str(report)


@pytest.mark.parametrize(
    ("options", "code", "said"), [([], 1, "blocks.0.down"), (["--fixed"], 0, "within tolerance")]
)
def test_the_example_finds_the_mistake_of_a_port(options, code, said, monkeypatch, capsys):
    import runpy
    from pathlib import Path

    script = Path(__file__).parents[2] / "examples" / "port_to_jax.py"
    monkeypatch.setattr("sys.argv", [str(script), *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    assert ended.value.code == code, out
    assert said in out
    assert "parameters matched" in out
