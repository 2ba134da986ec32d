"""Activation checkpointing (nonreentrant): the blocks with dropout run a second time inside the backward.

steps: 4
sites: blocks.0 blocks.1.0 head blocks.0.0.weight
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import torch
import witness
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


witness.start(16)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with witness.watching(model, optimizer):
    for _ in range(4):
        x = torch.randn(8, 8, requires_grad=True)
        optimizer.zero_grad()
        loss = model(x).logsumexp(1).mean()
        loss.backward()
        optimizer.step()
        witness.note(loss)
        witness.note(x.grad.norm())
witness.finish(model, optimizer)
