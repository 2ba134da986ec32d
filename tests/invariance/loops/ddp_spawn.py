"""DistributedDataParallel over two spawned processes with gloo; rank 0 prints.

steps: 4
sites: 0 2 0.weight
kinds: output grad_output param grad update
scalars: loss
gap: processes that the script itself spawns are not recorded
"""

import os
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import witness
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def work(rank, store, report):
    witness.start(52)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    with open(report + str(rank), "w") as sys.stdout:
        for _ in range(4):
            optimizer.zero_grad()
            loss = parallel(torch.randn(6, 4)).square().mean()
            loss.backward()
            optimizer.step()
            witness.note(loss)
        witness.finish(model, optimizer)
    sys.stdout = sys.__stdout__
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", next(n for _, n in socket.if_nameindex()))
        torch.multiprocessing.spawn(work, (f"{folder}/store", f"{folder}/report"), nprocs=2)
        for rank in range(2):
            print(Path(f"{folder}/report{rank}").read_text())
