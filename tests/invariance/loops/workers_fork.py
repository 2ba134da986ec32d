"""DataLoader with two forked workers and random augmentation by numpy, torch and random.

steps: 8
sites: 0 2 0.weight
kinds: output grad_output param grad update batch
scalars: loss
"""

import random

import numpy as np
import torch
import witness
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        torch_seed_noise = torch.randn(4)
        x = torch.full((4,), float(index)) / 16 + torch_seed_noise * random.random()
        return {"x": x + float(np.random.rand()), "y": torch.tensor([index % 2.0])}


def seed_worker(worker):
    np.random.seed(torch.initial_seed() % 2**32)


witness.start(26)
loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, worker_init_fn=seed_worker)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(2):
    for batch in loader:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        witness.note(loss)
witness.finish(model, optimizer)
