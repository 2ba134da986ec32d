"""A quota far below what a training would leave: the record stays under it, and what it keeps is of use."""

import torch

import clew
from clew.store.layout import folder_bytes
from clew.store.snapshots import list_batches


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
