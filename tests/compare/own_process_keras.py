"""Models of Keras recorded as runs, held against what every adapter must satisfy, and given weights."""

from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")

import clew  # noqa: E402
from clew.testing.adapter import INPUTS, check_adapter, make_weights  # noqa: E402


def as_numpy(value):
    return value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)


def make_model():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(6, name="fc1")(inputs)
    outputs = keras.layers.Dense(3, name="fc2")(keras.ops.relu(hidden))
    return keras.Model(inputs, outputs)


def record(folder, name):
    model, report = clew.adapters.keras.import_weights(make_model(), make_weights())
    assert report.is_complete, str(report)
    with clew.adapters.keras.watch(model, name=name, out=str(folder)) as run:
        output = model(INPUTS)
        run.step(model, loss=float((as_numpy(output) ** 2).mean()))
    return run.path


def test_keras_satisfies_what_every_adapter_must(tmp_path):
    check_adapter(record(tmp_path, "one"), record(tmp_path, "two"), gradients=False)


def fit(folder, name, *, plain=False):
    """Train two batches with fit, recorded unless told otherwise; return the run and the weights after it."""
    model, _ = clew.adapters.keras.import_weights(make_model(), make_weights())
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    inputs = np.concatenate([INPUTS, INPUTS[::-1]])
    targets = np.ones((len(inputs), 3), np.float32)
    options = {"epochs": 1, "batch_size": len(INPUTS), "shuffle": False, "verbose": 0}
    if plain:
        model.fit(inputs, targets, **options)
        return None, model
    with clew.adapters.keras.watch(model, name=name, out=str(folder)) as run:
        model.fit(inputs, targets, callbacks=[clew.adapters.keras.callback(run)], **options)
    return clew.open_run(run.path), model


def test_fit_is_recorded_step_by_step_and_not_changed(tmp_path):
    run, model = fit(tmp_path, "fit")
    _, plain = fit(tmp_path, "plain", plain=True)
    for mine, theirs in zip(model.weights, plain.weights, strict=True):
        assert np.array_equal(as_numpy(mine.value), as_numpy(theirs.value))
    assert run.steps.tolist() == [0, 1]
    table = run.stats(step=0)
    seen = set(zip(table["site"], table["kind"], strict=True))
    assert {
        ("fc1", "output"),
        ("fc1", "grad_output"),
        ("fc1.kernel", "grad"),
        ("fc1.kernel", "param"),
    } <= seen
    before = run.stats(step=0, site="fc1.kernel", kind="param")
    weights = make_weights()["fc1.weight"]
    assert np.isclose(before["l2"][0], np.linalg.norm(weights), rtol=1e-5)
    (losses,) = run.scalars("loss").values()
    assert np.isclose(losses.values[0], ((make_reference() - 1.0) ** 2).mean(), rtol=1e-5)
    # The gradient at an output, by hand: of the mean of squares over all outputs.
    wanted = 2 * (make_reference() - 1.0) / make_reference().size
    found = run.stats(step=0, site="fc2", kind="grad_output")
    assert np.isclose(found["l2"][0], np.linalg.norm(wanted), rtol=1e-5)
    assert "apply" not in vars(model.optimizer)
    assert "compute_loss" not in vars(model)


def make_reference():
    w = make_weights()
    return np.maximum(INPUTS @ w["fc1.weight"].T + w["fc1.bias"], 0) @ w["fc2.weight"].T + w["fc2.bias"]


def test_layers_are_called_as_before_afterwards(tmp_path):
    before = keras.layers.Layer.__call__
    record(tmp_path, "one")
    assert keras.layers.Layer.__call__ is before


def test_convolutions_are_turned():
    model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(5, 3, name="conv")])
    weight = np.arange(5 * 3 * 3 * 3, dtype=np.float32).reshape(5, 3, 3, 3)
    model, report = clew.adapters.keras.import_weights(
        model, {"conv.weight": weight, "conv.bias": np.ones(5, np.float32)}
    )
    assert report.is_complete
    found = as_numpy(model.get_layer("conv").kernel.value)
    assert np.array_equal(found, weight.transpose(2, 3, 1, 0))
