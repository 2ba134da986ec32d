"""Models of Keras recorded as runs, held against what every adapter must satisfy, and given weights."""

from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")

import clew  # noqa: E402
from clew.testing.adapter import INPUTS, check_adapter, make_weights  # noqa: E402


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
        run.step(model, loss=float(keras.ops.mean(output**2)))
    return run.path


def test_keras_satisfies_what_every_adapter_must(tmp_path):
    check_adapter(record(tmp_path, "one"), record(tmp_path, "two"), gradients=False)


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
    found = np.asarray(model.get_layer("conv").kernel.value)
    assert np.array_equal(found, weight.transpose(2, 3, 1, 0))
