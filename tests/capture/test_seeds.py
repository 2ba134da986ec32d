"""The seeds in the provenance are those that the script has set, and seeing them changes nothing."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import clew
from clew.model.record import SEED_AT_START
from zygote import Job

LOOP = """
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    torch.manual_seed(1000 + step), random.seed(1000), np.random.seed(1000)
print(model.weight.tolist(), torch.rand(1).item(), random.random(), np.random.rand())
"""
SCRIPTS = {
    "all": "import random; random.seed(43)\nimport numpy as np; np.random.seed(seed=44)\n"
    "import torch; torch.manual_seed(41); torch.manual_seed(42)\n",
    "some": "import random, torch\nimport numpy as np\nrandom.seed(1); random.seed(); np.random.seed([1, 2])\n",
    "wrong": "import random, torch\nimport numpy as np\n"
    "for wrong in (-1, 'x'):\n"
    "    try: np.random.seed(wrong)\n"
    "    except Exception as error: print(repr(error))\n"
    "random.seed('a text'); np.random.seed(np.int64(5)); torch.manual_seed(-1)\n",
}


@pytest.mark.parametrize(
    ("name", "found", "shown"),
    [
        ("all", {"torch": 42, "random": 43, "numpy": 44}, "torch 42, random 43, numpy 44"),
        ("some", {"numpy": "[1, 2]"}, "numpy [1, 2], torch, random not set"),
        (
            "wrong",
            {"torch": 2**64 - 1, "random": "a text", "numpy": 5},
            f"torch {2**64 - 1}, random a text, numpy 5",
        ),
    ],
)
def test_a_run_holds_what_the_script_has_seeded_before_its_first_step(zygote, tmp_path, name, found, shown):
    (tmp_path / "train.py").write_text(SCRIPTS[name] + LOOP)
    recorded = zygote.clew(tmp_path, "run", "--name", "run", "train.py")
    assert recorded.code == 0, recorded.stderr
    if "torch" in found:
        (plain,) = zygote.run(Job(tmp_path, ["train.py"]))
        assert recorded.stdout == plain.stdout
    seeds = dict(clew.open_run(tmp_path / "runs" / "run").info.seeds)
    assert isinstance(seeds.pop(SEED_AT_START), int)
    assert seeds == found
    assert f"  {shown}\n" in zygote.clew(tmp_path, "show", "run").stdout


def test_seeds_are_seen_before_torch_is_there(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPTS["all"])
    command = [sys.executable, "-m", "clew", "run", "--name", "run", "train.py"]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, timeout=300)
    seeds = clew.open_run(tmp_path / "runs" / "run").info.seeds
    assert (seeds["torch"], seeds["random"], seeds["numpy"]) == (42, 43, 44)


def test_seeds_inside_a_watch_are_seen_and_the_functions_are_given_back(tmp_path):
    before = random.seed, np.random.seed
    model = torch.nn.Linear(2, 1)
    with clew.watch(model, out=tmp_path, name="run") as run:
        torch.manual_seed(7)
        random.seed(8)
        model(torch.ones(1, 2)).sum().backward()
        np.random.seed(9)
    assert (random.seed, np.random.seed) == before
    seeds = clew.open_run(run.path).info.seeds
    assert {name: seeds[name] for name in seeds if name != SEED_AT_START} == {"torch": 7, "random": 8}


def test_seeds_of_a_script_without_a_step_are_kept(tmp_path):
    with clew.watch(out=tmp_path, name="run") as run:
        torch.manual_seed(7)
        np.random.seed(9)
    seeds = clew.open_run(run.path).info.seeds
    assert (seeds["torch"], seeds["numpy"]) == (7, 9)
