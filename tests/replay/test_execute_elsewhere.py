"""Steps recorded by clew.watch in a script of one's own, and by ranks that train together, are executed again."""

import json
import os
import socket
import textwrap

import pytest
import torch._dynamo

import clew
from clew.api.replay import check_command, execute_again
from clew.api.script import execute, load_script
from clew.api.why import why
from clew.capture.torch.snapshot import SnapshotLens
from clew.cli import main
from clew.errors import UsageError
from clew.replay.fork import rest_openmp
from clew.replay.process import run_in_child
from clew.store.snapshots import list_snapshots

WATCHED = """
import sys, clew, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.seed() if "unseeded" in sys.argv else torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
with clew.watch(model, out="runs", name="warm"):
    for _ in range(2):
        optimizer.zero_grad(); model(torch.randn(3, 4)).square().mean().backward(); optimizer.step()
with clew.watch(model, out="runs", name="main", snapshots="every:4", budget="off", explain="off") as watch:
    for (x,) in data:
        out = model(x).square()
        loss = out.mean() if watch.step != 9 else (out * 0).log().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step(); schedule.step()
        watch.log(double=2.0)
print("after", file=open("after.txt", "a"))
"""


def run_plainly(folder, *argv):
    """Run a script as python does, in a copy of this process."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(WATCHED))

    def act(child):
        os.chdir(folder)
        child.answer({"code": execute(load_script("train.py"), list(argv)).exit_code})

    assert run_in_child(act) == {"code": 0}


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    run_plainly(folder)
    return folder


@pytest.mark.parametrize(("name", "step", "way"), [("warm", 1, "start"), ("main", 6, "snapshot")])
def test_a_watched_block_is_found_again(watched, name, step, way):
    again = execute_again(clew.open_run(watched / "runs" / name), step)
    assert (again.exactness, again.way, again.reasons) == ("identical", way, []), again
    assert (watched / "after.txt").read_text() == "after\n"  # the script does not go on after the step
    assert sorted(path.name for path in (watched / "runs").iterdir()) == ["main", "warm"]


def test_why_of_a_watched_run(watched, capsys):
    path = str(watched / "runs" / "main")
    assert main(["why", path, "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["op"], verdict["source"]["line"], verdict["replay"]) == ("log", 16, "identical")


def test_a_script_that_seeds_nothing_is_exact_from_a_snapshot_and_says_why_not_from_the_start(tmp_path):
    run_plainly(tmp_path, "unseeded")
    run = clew.open_run(tmp_path / "runs" / "main")
    assert execute_again(run, 6).exactness == "identical"
    again = execute_again(run, 6, ways=("start",))
    assert again.exactness == "diverged"
    assert again.reasons == ["the script does not seed torch before clew.watch, so its weights are others"]


def test_a_block_inside_a_tool_is_refused_by_name(tmp_path):
    model = torch.nn.Linear(2, 1)
    with clew.watch(model, out=str(tmp_path), name="run"):
        model(torch.ones(1, 2))
    with pytest.raises(
        UsageError, match=r"it was recorded inside .+, not by a script|a notebook or at a prompt"
    ):
        check_command(clew.open_run(tmp_path / "run"))


# ------------------------------------------------------------------------ ranks

RANKS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
parallel = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
for step in range(7):
    optimizer.zero_grad()
    out = parallel(torch.randn(6, 4)).square()
    if step == 5:
        out = (out * (1 - rank)).log() if rank else out
    out.mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def train_together(folder, *options):
    """Record two ranks, each a copy of this process, and return the run."""
    (folder / "train.py").write_text(RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rest_openmp()
    words = ["run", "--no-status", "--out", str(folder / "runs"), "--name", "run", *options]

    def act(child, rank):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
        os.environ.update(place)
        child.answer({"code": main([*words, str(folder / "train.py")])})

    second = os.fork()
    if not second:
        run_in_child(lambda child: act(child, 1))
        os._exit(0)
    assert run_in_child(lambda child: act(child, 0)) == {"code": 0}
    os.waitpid(second, 0)
    return clew.open_run(folder / "runs" / "run")


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    folder = tmp_path_factory.mktemp("together")
    return train_together(folder, "--snapshots", "every:2", "--budget", "off")


@pytest.mark.parametrize(("rank", "step", "way"), [(0, 1, "start"), (1, 3, "snapshot")])
def test_a_step_of_a_rank_is_executed_with_all_of_them(together, rank, step, way):
    again = execute_again(together, step, rank=rank)
    assert (again.exactness, again.way, again.reasons) == ("identical", way, []), again
    assert again.compared["hashes"] > 40


def test_a_rank_that_is_not_there_and_more_ranks_than_can_be_started(together, monkeypatch):
    monkeypatch.setattr(together.info, "world_size", 16)
    with pytest.raises(UsageError, match="cannot be executed again") as caught:
        execute_again(together, 3)
    assert "the run has 16 ranks, and no more than 8 are started again on one machine" in str(caught.value)
    monkeypatch.setattr(together.info, "world_size", 3)
    with pytest.raises(UsageError, match="of the 3 ranks only 0, 1 wrote into the run"):
        execute_again(together, 3)


def test_ranks_take_their_snapshots_before_the_same_steps(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, period in (("one", 13), ("other", 25)):  # what a snapshot costs is not the same for all
        monkeypatch.setattr(SnapshotLens, "_choose_period", lambda _, period=period: period)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with clew.watch(model, out=str(tmp_path), name=name, doctor=False) as watch:
            for _ in range(90):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                watch._recording._snapshots.writer.wait()  # one that is busy would let a step go by
        kept.append({each.step for each in list_snapshots(tmp_path / name / "rank0")})
    assert kept == [{40, 60, 80}, {40, 80}]


def test_why_names_the_rank_that_made_it(together, capsys):
    verdicts = [verdict for verdict in together.verdicts() if verdict["step"] == 5 and verdict["found"]]
    assert [(verdict["rank"], verdict["op"]) for verdict in verdicts] == [(1, "log")]
    assert any("on this rank alone" in note for note in verdicts[0]["notes"])
    assert main(["why", str(together.path), "--step", "5", "--rank", "1", "--rerun", "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["rank"], verdict["op"], verdict["replay"]) == (1, "log", "identical")
    with pytest.raises(UsageError, match="the run has no rank 7"):
        execute_again(together, 3, rank=7)


# ------------------------------------------------------------------------ weights that are written by hand

BY_HAND = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
for turn in range(8):
    model.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.1 * weight.grad / (0.0 if turn == 5 else 1.0)
"""


def test_the_line_that_wrote_a_bad_weight_is_found_one_step_back(tmp_path):
    (tmp_path / "train.py").write_text(BY_HAND)
    words = [
        "run",
        "--no-status",
        "--out",
        str(tmp_path),
        "--name",
        "run",
        "--explain",
        "off",
        "--budget",
        "off",
    ]

    def act(child):
        child.answer({"code": main([*words, str(tmp_path / "train.py")])})

    assert run_in_child(act) == {"code": 0}
    run = clew.open_run(tmp_path / "run")
    late = why(run, step=6)
    assert (late["phase"], late["site"], late["replay"]) == ("parameter", "weight", "identical")
    verdict = why(run)
    assert (verdict["step"], verdict["phase"], verdict["op"]) == (5, "optimizer", "div")
    assert (verdict["source"]["line"], verdict["replay"]) == (10, "identical")
