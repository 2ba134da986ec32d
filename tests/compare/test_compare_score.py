"""A sample of the pairs on which comparisons are scored: scripts with one text changed, and what must be said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.compare import Bench
    finally:
        sys.path.remove(str(ROOT))
    return Bench(tmp_path_factory.mktemp("score"))


SAMPLE = [
    "weight x2, through a state dict",
    "eps in the code",
    "eps changed on the way",
    "dropout in the code, written there",
    "dropout as a new module",
    "one pixel of the loader's set",
    "schedule",
    "momentum with Nesterov",
    "a no-op that shifts a sequence",
    "last norm moved behind the mean",
    "bf16 matmul, an instance",
    "label smoothing inside the model",
    "bias missing",
    "bias taken away",
    "tanh GELU in the code of a stage",
    "seed before a layer",
    "the same, another class name",
    "the same, gradients kept as zeros",
]


@pytest.mark.parametrize("name", SAMPLE)
def test_the_verdict_on_a_changed_script_is_right(bench, name):
    from benchmarks.compare import find_problem
    from benchmarks.compare_pairs import read_pairs

    (pair,) = (pair for pair in read_pairs() if pair.name == name)
    found = bench.compare(pair)
    assert find_problem(pair, found) == "", found.sentence


def test_there_are_a_hundred_pairs_with_names_of_their_own():
    from benchmarks.compare_pairs import read_pairs

    names = [pair.name for pair in read_pairs()]
    assert len(set(names)) == len(names) >= 100
