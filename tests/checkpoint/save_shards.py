"""How ``data/sharded`` was made: two processes, ``python save_shards.py 0`` and ``… 1``, in an empty folder."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

if __name__ == "__main__":
    rank = int(sys.argv[1])
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(35, dtype=torch.float32).reshape(7, 5)
    tree = {
        "model": {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole.bfloat16(), mesh, [Shard(1)]),
            "all": distribute_tensor(whole, mesh, [Replicate()]),
        },
        "step": 3,
    }
    dcp.save(tree, checkpoint_id="sharded")
    dist.destroy_process_group()
