"""DataLoader with spawned workers, which import this very file again.

steps: 4
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
        return 8

    def __getitem__(self, index):
        return torch.randn(4) + index, np.float32(random.random() < 2), __name__


def main():
    witness.start(27)
    loader = DataLoader(
        Noisy(),
        batch_size=2,
        shuffle=True,
        num_workers=1,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y, names in loader:
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
        optimizer.step()
        witness.note(loss)
        print(names)
    witness.finish(model, optimizer)


if __name__ == "__main__":
    main()
