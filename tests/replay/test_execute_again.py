"""A kept step is executed again in a process of its own and equals the recording bit for bit, or says where not."""

import textwrap

import pytest
import torch._dynamo  # noqa: F401 - wraps torch.manual_seed when first imported, which is not of our doing

import clew
from clew.api.replay import execute_again
from clew.cli import main
from clew.errors import UsageError
from clew.replay.process import run_in_child
from clew.store.snapshots import list_batches, list_snapshots

HEAD = """
import random, time
from collections import namedtuple
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
torch.manual_seed(0); np.random.seed(0); random.seed(0)
class Noisy(Dataset):
    def __len__(self): return 24
    def __getitem__(self, i):
        noise = torch.rand(4) + float(np.random.rand()) + random.random()
        return {"x": torch.full((4,), float(i)) / 24 + noise, "y": i % 3, "name": f"sample {i}"}
"""

SHUFFLED = (
    HEAD
    + """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
for epoch in range(3):
    for batch in DataLoader(Noisy(), batch_size=6, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        schedule.step()
"""
)

LOOPS = {
    "shuffled, augmented, dropout, schedule": SHUFFLED,
    "workers": SHUFFLED.replace("shuffle=True", "shuffle=True, num_workers=1"),
    "drawn by hand": HEAD
    + """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(10):
    x = torch.randn(6, 4) * float(np.random.rand()) + random.gauss(0, 1)
    optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
""",
    "two optimizers": HEAD
    + """
body, head = nn.Linear(4, 4), nn.Linear(4, 1)
first, second = torch.optim.Adam(body.parameters()), torch.optim.SGD(head.parameters(), lr=0.1)
for _ in range(10):
    first.zero_grad(); second.zero_grad()
    head(body(torch.randn(6, 4))).square().mean().backward()
    first.step(); second.step()
""",
    "accumulation and autocast": HEAD
    + """
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
for number, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=4, shuffle=True)):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    if number % 2: optimizer.step(); optimizer.zero_grad()
""",
    "counters and a hidden state": HEAD
    + """
def train(rows, seen=0):
    model, hidden = nn.RNNCell(4, 4), torch.zeros(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for step, row in enumerate(rows):
            seen += 1
            hidden = model(row * (step + 1) / seen, hidden)
            optimizer.zero_grad()
            (hidden * (epoch + 1)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0 if step % 2 else 0.1)
            optimizer.step()
            hidden = hidden.detach()
train(torch.randn(4, 6, 4))
""",
    "a scaler": HEAD
    + """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
for _ in range(10):
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(6, 4)).square().mean()).backward()
    scaler.step(optimizer); scaler.update()
""",
    "a batch of a class of its own": HEAD
    + """
Pair = namedtuple("Pair", "x y")
def collate(rows): return Pair(torch.stack([r["x"] for r in rows]), torch.tensor([r["y"] for r in rows]))
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for batch in DataLoader(Noisy(), batch_size=6, shuffle=True, collate_fn=collate):
        optimizer.zero_grad(); nn.functional.cross_entropy(model(batch.x), batch.y).backward(); optimizer.step()
""",
}


def record(script, folder, *options):
    """Record a script in a copy of this process, as ``clew run`` would, and return the run."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    words = ["run", "--no-status", "--out", str(folder / "runs"), "--name", "run", *options]

    def act(child):
        child.answer({"code": main([*words, str(folder / "train.py")])})

    assert run_in_child(act) == {"code": 0}
    return clew.open_run(folder / "runs" / "run")


@pytest.mark.parametrize("name", LOOPS)
def test_kept_steps_are_identical(name, tmp_path):
    run = record(LOOPS[name], tmp_path, "--snapshots", "every:4")
    for step in (6, 9):
        again = execute_again(run, step, around=lambda stage: lambda: len(stage.rehearsal.lens.events))
        assert (again.exactness, again.way) == ("identical", "snapshot"), again
        assert again.from_step in (4, 8)
        assert again.compared["losses"] >= step - again.from_step
        assert again.compared["hashes"] > 0
        assert again.result > 5
        assert again.reasons == []


def test_batches_changed_in_place_are_copied_once_that_is_seen(tmp_path):
    script = SHUFFLED.replace("optimizer.zero_grad()", "batch['x'].mul_(0.5); optimizer.zero_grad()")
    run = record(script, tmp_path, "--snapshots", "every:4")
    again = execute_again(run, 10)
    assert again.exactness == "identical"  # from the start, where a batch was gone before it was written


def test_what_the_loop_keeps_to_itself_makes_the_jump_diverge_and_the_start_is_taken(tmp_path):
    script = LOOPS["drawn by hand"].replace("for _ in", "turns = iter(range(9, 99))\nfor _ in")
    script = script.replace("(x)", "(x * next(turns))")
    run = record(script, tmp_path, "--snapshots", "every:4")
    again = execute_again(run, 6)
    assert (again.exactness, again.way) == ("identical", "start")
    assert again.reasons[0].startswith(
        "from the snapshot: diverged at batch.0 (batch) in step 4; the script keeps"
    )


def test_a_script_that_never_repeats_itself_is_told_apart_and_its_calls_are_repeated(tmp_path):
    script = LOOPS["drawn by hand"].replace("random.gauss(0, 1)", "time.perf_counter() % 1")
    run = record(script, tmp_path, "--snapshots", "every:4")
    again = execute_again(run, 6)
    assert again.exactness == "diverged"
    assert again.diverged_at.startswith("batch.0 (batch) in step ")
    newest = max((run.path / "rank0" / "snapshots").glob("step-*"))
    calls = execute_again(run, int(newest.name.removeprefix("step-")))
    assert (calls.exactness, calls.way) == ("identical", "calls")
    given_up = [reason.partition(":")[0] for reason in calls.reasons]
    assert given_up == ["from the snapshot", "from the snapshot", "from the start"]


def test_around_sees_the_step_and_a_fault_in_it_is_told(tmp_path):
    run = record(LOOPS["drawn by hand"], tmp_path)

    def around(stage):
        assert stage.so_far.exactness == "identical"
        raise ValueError("not today")

    assert execute_again(run, 3, around=around).error == "ValueError: not today"


def test_a_step_that_the_run_does_not_have(tmp_path):
    run = record(LOOPS["drawn by hand"], tmp_path, "--snapshots", "off")
    with pytest.raises(UsageError, match="the run has no step 99"):
        execute_again(run, 99)
    with pytest.raises(UsageError, match="step 3 cannot be executed again"):
        execute_again(run, 3, ways=("snapshot",))
    assert not (run.path / "rank0" / "snapshots").exists()


def test_a_script_that_ends_early(tmp_path):
    run = record(LOOPS["drawn by hand"], tmp_path)
    (tmp_path / "train.py").write_text(LOOPS["drawn by hand"].replace("range(10)", "range(3)"))
    again = execute_again(run, 8)
    assert not again.was_executed
    assert again.error == "the script ended in step 3, before step 8"


# ------------------------------------------------------------------------ what is kept


def test_the_oldest_go_first_and_half_written_ones_are_not_seen(tmp_path):
    run = record(SHUFFLED, tmp_path, "--snapshots", "every:2")
    folder = run.path / "rank0"
    kept = [each.step for each in list_snapshots(folder)]
    assert kept == [8, 10, 12]
    (folder / "snapshots" / "step-000099.partial").mkdir()
    (folder / "snapshots" / "step-000100").mkdir()  # without its state: a copy that was cut off
    assert [each.step for each in list_snapshots(folder)] == kept
    state = list_snapshots(folder)[0].read_state()
    assert (state["step"], state["schedulers"][0]["last_epoch"]) == (kept[0], kept[0] - 1)
    assert list_batches(folder)[-1].last == 12
    assert not [path for path in (folder / "snapshots").rglob("*") if path.suffix in (".pt", ".pkl")]


def test_limits_hold_and_are_told(tmp_path):
    run = record(SHUFFLED, tmp_path, "--snapshots", "every:4", "--snapshot-limit", "10kB")
    assert list_snapshots(run.path / "rank0") == []
    (note,) = [note for note in run.info.notes if note.startswith("snapshots: ")]
    assert "none were taken: one holds" in note


def test_no_data_is_kept_when_that_is_not_wanted(tmp_path):
    bad = SHUFFLED.replace("model(batch['x'])", "model(batch['x']).log()").replace(
        'model(batch["x"])', 'model(batch["x"]).log()'
    )
    run = record(bad, tmp_path, "--snapshots", "every:2", "--no-data")
    folder = run.path / "rank0"
    assert list_batches(folder) == []
    assert not (folder / "repro").exists()
    assert run.verdicts()[0]["op"] == "log"
    assert not list((folder / "snapshots").rglob("ahead.safetensors"))


def test_show_says_what_is_on_disk(tmp_path, capsys):
    record(SHUFFLED, tmp_path, "--snapshots", "every:4")
    assert main(["show", str(tmp_path / "runs" / "run")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    kept = said.partition("kept ")[2]
    assert kept.startswith("weights before step 4, 8, 12 and your batches of steps ")
    assert " to 12 (" in kept[:80]


def test_a_hit_can_ask_for_a_snapshot(tmp_path):
    options = ("--watch", "(model):output l2>0", "--on-hit", "snapshot")
    run = record(LOOPS["drawn by hand"].replace("range(10)", "range(30)"), tmp_path, *options)
    asked = [each for each in list_snapshots(run.path / "rank0") if each.read_state()["reason"]]
    assert asked
