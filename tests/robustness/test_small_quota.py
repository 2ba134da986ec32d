"""A quota far below what a training would leave: the record stays under it, and what it keeps is of use."""

import json

import torch

import clew
from clew.store.layout import folder_bytes
from clew.store.snapshots import list_batches, list_snapshots


def test_batches_and_pictures_keep_within_a_small_quota(tmp_path):
    """Batches of some steps are written together; more than may be kept would only push themselves out."""
    quota = 1_200_000
    model = torch.nn.Sequential(torch.nn.Linear(512, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(1600, 512))
    with clew.watch(out=tmp_path, name="run", quota=quota, snapshots="every:1000") as run:
        session = run._recording.session
        for step, (x,) in enumerate(torch.utils.data.DataLoader(data, batch_size=16)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            session.add_media(f"picture{step}", bytes(20_000), ".png")
        assert session.recorder.flight.snapshots.kept_bytes <= quota // 8
    folder = run.path / "rank0"
    kept = list_batches(folder)
    assert 50_000 < sum(each.size_bytes for each in kept) <= quota // 4
    assert kept[-1].last >= 99
    assert 200_000 < folder_bytes(folder / "media") <= quota // 4
    assert folder_bytes(run.path) <= quota


SCRIPT = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(30):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_what_a_quota_ends_is_told_in_numbers_that_agree_and_as_nobody_s_fault(zygote, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    said = zygote.clew(tmp_path, "run", "--quota", "1kB", "--name", "run", "train.py").stderr
    reason = (
        "the quota of 1,000 bytes is used up: nothing more is recorded after step 0; allow more with --quota"
    )
    assert "clew: 30 steps, 1 of them on record, last loss" in said
    assert f"clew: recording stopped early: {reason}" in said
    shown = zygote.clew(tmp_path, "show", "run").stdout
    assert "  steps     30, 1 of them on record\n" in shown
    assert f"! recording stopped early: {reason}" in shown
    assert "fault" not in said + shown
    assert "thinned" not in shown
    (listed,) = clew.list_runs(tmp_path / "runs")
    assert listed.steps == 1


def test_snapshots_batches_and_pictures_end_with_the_recording(tmp_path):
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(240, 8))
    with clew.watch(out=tmp_path, name="run", quota=400_000, snapshots="every:10") as run:
        recording = run._recording
        for step, (x,) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step == 30:
                recording._snapshots.writer.wait()
                recording.session.recorder.hand_over()
                recording._writer.flush()
                (run.path / "rank0/big").write_bytes(bytes(500_000))
                recording._writer._others_seen = 0.0
            if step == 31:
                recording.session.recorder.hand_over()
                recording._writer.flush()
                (run.path / "rank0/big").unlink()
                assert recording._writer.stopped
            if step > 31:
                recording.session.add_media("picture", bytes(10), ".png")
    folder = run.path / "rank0"
    assert max(each.step for each in list_snapshots(folder)) <= 31
    assert all(each.last <= 31 for each in list_batches(folder))
    assert not (folder / "media").exists()
    assert json.loads((run.path / "run.json").read_text())["trained_steps"] == 60


def test_steps_without_statistics_are_not_told_as_recorded_in_full(tmp_path):
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with clew.watch(out=tmp_path, name="run", quota=1_000_000, every=1, doctor=False) as run:
        recording = run._recording
        for step in range(20):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if step in (10, 11):
                recording.session.recorder.hand_over()
                recording._writer.flush()
                recording._writer._others_seen = 0.0
            if step == 10:
                (run.path / "rank0/big").write_bytes(bytes(920_000 - folder_bytes(run.path)))
    record = clew.open_run(run.path)
    last = int(record.stats(columns=["l2"])["step"][-1])
    assert 10 <= last < 19
    assert record.ended_steps.tolist() == list(range(20))
    assert record.scalars()["clew.recorded"].values.tolist() == [float(step <= last) for step in range(20)]
    assert recording._count_full() == (last + 1, "quota")
    assert "nearly used up: only scalars" in record.problems[0]
