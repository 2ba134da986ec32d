"""A process killed while it writes a snapshot: what was finished stays whole, the rest is left out with a word."""

import random
import shutil
import signal

import pytest
import torch._dynamo  # noqa: F401 - wraps torch.manual_seed when first imported, which is not of our doing
from safetensors.torch import load_file

import clew
from clew.api.replay import execute_again
from clew.store.snapshots import list_snapshots, list_unfinished
from zygote import Job

TRAIN = """
import os, signal, sys, torch
from torch import nn
torch.manual_seed(0)
left = [int(sys.argv[1])]
def count(event, given):
    if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir") and "/snapshots" in str(given[0]):
        left[0] -= 1
        if not left[0]: os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(14):
    loss = model(torch.randn(6, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print(-left[0])
"""
MOMENTS = 7


@pytest.fixture(scope="module")
def runs(zygote, tmp_path_factory):
    """Record one training to its end and the same one killed at some of the moments it touches a snapshot."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "train.py").write_text(TRAIN)
    words = ["-m", "clew", "run", "--no-status", "--snapshots", "every:2", "--name", "run", "train.py"]
    (whole,) = zygote.run(Job(folder, [*words, "0"]))
    moments = random.Random(7).sample(range(8, int(whole.stdout.split()[0])), MOMENTS)
    killed = [tmp_path_factory.mktemp("killed") for _ in moments]
    for each in killed:
        (each / "train.py").write_text(TRAIN)
    jobs = [Job(each, [*words, str(moment)]) for each, moment in zip(killed, moments, strict=True)]
    assert {ending.code for ending in zygote.run(*jobs)} == {-signal.SIGKILL}
    return folder / "runs" / "run", [each / "runs" / "run" for each in killed]


@pytest.mark.parametrize("number", range(MOMENTS))
def test_what_was_finished_is_whole_and_replays(runs, number):
    whole, killed = runs[0], runs[1][number]
    assert clew.open_run(killed).state == "died"
    kept = list_snapshots(killed / "rank0")
    for each in kept:
        assert each.read_state()["step"] == each.step
        assert load_file(each.path / "weights.safetensors").keys() == {
            "0.bias",
            "0.weight",
            "2.bias",
            "2.weight",
        }
        assert load_file(each.path / "optimizer.safetensors")
    if not kept:
        return  # killed before the first was there
    # What the killed process had no time to record, the whole one has: the same training.
    shutil.rmtree(whole / "rank0" / "snapshots")
    shutil.copytree(killed / "rank0" / "snapshots", whole / "rank0" / "snapshots")
    again = execute_again(clew.open_run(whole), kept[-1].step + 1, ways=("snapshot",))
    assert (again.exactness, again.from_step) == ("identical", kept[-1].step)
    unfinished = list_unfinished(killed / "rank0")
    assert again.reasons == [
        f"the snapshot of step {step} was not finished when the process ended, so it is left out"
        for step in unfinished
        if step <= kept[-1].step + 1
    ]


def test_an_unfinished_one_is_named(runs):
    whole = runs[0]
    shutil.rmtree(whole / "rank0" / "snapshots")
    (whole / "rank0" / "snapshots" / "step-000008.partial").mkdir(parents=True)
    again = execute_again(clew.open_run(whole), 9)
    assert (again.exactness, again.way) == ("identical", "start")
    assert again.reasons == [
        "the snapshot of step 8 was not finished when the process ended, so it is left out"
    ]
