"""DistributedDataParallel in two processes started by torchrun, with gloo; each rank writes its own report.

launch: torchrun
steps: 4
sites: 0 2 0.weight 1.running_mean
kinds: output grad_output param grad update buffer
scalars: loss
process: own
ranks: 2
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import witness
from torch import nn
from torch.nn.parallel import DistributedDataParallel

witness.start(58)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
parallel = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
with open(f"report{rank}", "w") as sys.stdout:
    for step in range(4):
        optimizer.zero_grad()
        with parallel.no_sync() if step == 2 else nullcontext():
            loss = parallel(torch.randn(6, 4)).square().mean()
            loss.backward()
        optimizer.step()
        witness.note(loss)
    witness.finish(model, optimizer)
sys.stdout = sys.__stdout__
dist.barrier()
if rank == 0:
    print(Path("report0").read_text() + Path("report1").read_text())
dist.destroy_process_group()
