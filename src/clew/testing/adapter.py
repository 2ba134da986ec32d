"""What every adapter of a framework has to satisfy: the same sites, kinds and statistics as any other recording.

An adapter's test makes one small net of two layers in its own framework, with the given weights, records one step of
it and hands the run to ``check_adapter``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clew.compare.diff import diff_runs
from clew.compare.name import own_name
from clew.model.schema import STAT_NAMES
from clew.query import Run
from clew.stats import reference

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

INPUTS: NDArray[np.float32] = np.linspace(-1.0, 1.0, 20, dtype=np.float32).reshape(5, 4)


def make_weights() -> dict[str, NDArray[np.float32]]:
    """Return the weights of the net, ``fc1`` (4 to 6) and ``fc2`` (6 to 3), in PyTorch's order of axes."""
    rng = np.random.default_rng(7)
    shapes = {"fc1.weight": (6, 4), "fc1.bias": (6,), "fc2.weight": (3, 6), "fc2.bias": (3,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def expect_outputs() -> dict[str, NDArray[np.float32]]:
    """Return what the layers give for ``INPUTS``, with a ReLU between them."""
    weights = make_weights()
    first = INPUTS @ weights["fc1.weight"].T + weights["fc1.bias"]
    second = np.maximum(first, 0.0) @ weights["fc2.weight"].T + weights["fc2.bias"]
    return {"fc1": first, "fc2": second}


def check_adapter(path: Path, again: Path, *, gradients: bool = True) -> None:
    """Raise AssertionError unless a recorded step of the net is as it must be; ``again`` is a second recording."""
    run = Run(path)
    table = run.stats(step=0)
    rows = {
        (site, kind): row for row, (site, kind) in enumerate(zip(table["site"], table["kind"], strict=True))
    }
    for site, expected in expect_outputs().items():
        _check_statistics(table, rows, (site, "output"), expected)
    _check_statistics(table, rows, ("batch.0", "batch"), INPUTS)
    named = {(own_name(site), site.rpartition(".")[0]): site for site, kind in rows if kind == "param"}
    for name, expected in make_weights().items():
        layer, _, own = name.rpartition(".")
        assert (own, layer) in named, f"{name} was not recorded; there are {sorted(named)}"
        _check_statistics(table, rows, (named[own, layer], "param"), expected)
    order = [site for site, kind in rows if kind == "output"]
    assert order.index("fc1") < order.index("fc2"), "outputs are not in order of execution"
    if gradients:
        assert sum(kind == "grad" for _, kind in rows) == 4, "each parameter has one gradient"
    types = {site.name: site.type for site in run.sites}
    assert types["fc1"], "the class of a module was not recorded"
    assert len(run.scalars("loss")) == 1, "the loss was not recorded"
    found = diff_runs(run, Run(again))
    assert found.is_identical, found.sentence


def _check_statistics(table: Any, rows: dict[Any, int], key: tuple[str, str], expected: NDArray[Any]) -> None:
    assert key in rows, f"{key} was not recorded; there are {sorted(rows)}"
    wanted = dict(zip(STAT_NAMES, reference.summarise(expected), strict=True))
    for name in ("count", "nan", "zero", "min", "max", "mean", "std", "l2"):
        value = float(table[name][rows[key]])
        assert np.isclose(value, wanted[name], rtol=1e-5, atol=1e-6), (
            f"{name} of {key} is {value}, not {wanted[name]}"
        )
