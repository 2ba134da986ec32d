"""A bad row comes out of a forked loader worker; its batch is skipped after the backward, training goes on.

steps: 5
sites: 0 2 0.weight
kinds: output grad_output param grad update
scalars: loss
losses: not printed
stderr: clew
"""

import torch
import witness
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.randn(4) / (0.0 if index == 5 else 1.0)


witness.start(60)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(Rows(), batch_size=2, num_workers=2):
    optimizer.zero_grad()
    loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
    loss.backward()
    if loss.isfinite():
        optimizer.step()
        witness.note(loss)
    else:
        print("skipped a batch", torch.randn(1).item())
witness.finish(model, optimizer)
