"""The benchmark of the cost measures what it says: both sides train, one of them is recorded, the numbers add up."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import interleave, memory, modes, trainings  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "parameters"), [("mlp", 335_114), ("loader", 335_114), ("cnn", 11_181_642), ("gpt", 11_089_920)]
)
def test_trainings_are_the_promised_ones(name, parameters):
    training = trainings.make(name)
    assert sum(p.numel() for p in training.model.parameters()) == parameters
    assert training.step().isfinite()


@pytest.fixture
def short(monkeypatch):
    """Make a measurement short: its numbers say nothing then, but they add up all the same."""
    monkeypatch.setattr(interleave, "_WARM_UP", dict.fromkeys(interleave._WARM_UP, 20))
    monkeypatch.setattr(interleave, "_MOST_STEPS", 10)


_FAULTS = """
import resource, sys, torch
from benchmarks.interleave import keep_memory
if sys.argv[1] == "keep" and not keep_memory():
    print("cannot")
    raise SystemExit
def use():
    for _ in range(20):
        torch.ones(1 << 20)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_is_kept_so_that_chance_maps_none_of_it_again():
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}

    def count(word):
        command = [sys.executable, "-c", _FAULTS, word]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    kept, returned = count("keep"), count("return")
    if kept == "cannot":
        pytest.skip("this malloc has no such settings")
    assert 5 * int(kept) < int(returned)


def test_cost_is_measured_in_turns(short):
    mode = dataclasses.replace(modes.MODES[0], block_seconds=0.01)
    cost = interleave.measure("mlp", mode, seconds=0)
    assert cost.rounds == interleave._FEWEST_ROUNDS
    assert cost.wall_quartiles[0] <= cost.wall <= cost.wall_quartiles[1]
    assert cost.cpu_quartiles[0] <= cost.cpu <= cost.cpu_quartiles[1]
    assert cost.plain_ms > 0


def test_what_other_threads_spend_falls_on_the_recorded_steps():
    plain, recorded = interleave.Spent(1.0, 1.0, [0.1] * 10), interleave.Spent(1.1, 1.1, [0.11] * 10)
    plan = interleave.Plan(block=10, settling=4)
    charged = interleave._charge([(plain, recorded)] * 20, plan, others=20 * (10 + 4.5) * 0.005)
    ratio, error = interleave._compare(charged)
    assert ratio == pytest.approx(1.15)
    assert error == pytest.approx(0, abs=1e-12)


def test_the_error_of_the_ratio_is_what_many_measurements_scatter_by():
    generator = torch.Generator().manual_seed(0)

    def measure_once():
        speeds = 1 + 0.1 * torch.rand(60, 2, generator=generator)
        spent = [
            [interleave.Spent(0.0, value, []) for value in pair]
            for pair in (speeds * torch.tensor([1, 1.2])).tolist()
        ]
        return interleave._compare(spent)

    ratios, errors = zip(*(measure_once() for _ in range(300)), strict=True)
    assert sum(ratios) / 300 == pytest.approx(1.2, rel=1e-3)
    assert sum(errors) / 300 == pytest.approx(torch.tensor(ratios).std().item(), rel=0.15)


def test_every_mode_has_a_limit_for_every_training():
    for mode in modes.MODES:
        assert (
            mode.limits.keys()
            == trainings.MAKERS.keys()
            == memory._STEPS.keys()
            == interleave._WARM_UP.keys()
        )


def test_peak_memory_is_that_of_the_process_alone():
    ballast = bytearray(600_000_000)
    ballast[::4096] = bytes([1]) * len(ballast[::4096])
    found = memory.run_apart("mlp", "plain", threads=1)
    assert 50e6 < found["peak_bytes"] < 600e6
    assert found["parameter_bytes"] == 4 * 335_114


def test_result_file_and_exit_code(short, tmp_path, monkeypatch, capsys):
    result = tmp_path / "result.json"
    options = ["--quick", "--seconds=1", "--trainings=mlp", "--modes=basic", "--no-memory", "--write"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *options, str(result)])
    monkeypatch.setattr(interleave, "keep_memory", lambda: True)  # there is no way back from the real one
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks", run_name="__main__")
    written = json.loads(result.read_text())
    assert written["keeps_memory"] is True
    (row,) = written["speed"]
    assert (row["training"], row["mode"]) == ("mlp", "basic")
    assert row["rounds"] >= interleave._FEWEST_ROUNDS
    assert ended.value.code == (0 if row["holds"] else 1)
    said = capsys.readouterr()
    assert said.err == ""
    assert "mlp      basic" in said.out
