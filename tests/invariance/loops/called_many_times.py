"""One small block is called a different number of times in each step.

steps: 6
sites: block block.0 block.0.weight out
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import random

import torch
import witness
from torch import nn


class Iterated(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())
        self.out = nn.Linear(6, 1)

    def forward(self, x, times):
        for _ in range(times):
            x = x + 0.5 * self.block(x)
        return self.out(x)


witness.start(11)
model = Iterated()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
with witness.watching(model, optimizer):
    for _ in range(6):
        optimizer.zero_grad(set_to_none=True)
        loss = model(torch.randn(5, 6), times=random.randint(1, 7)).square().mean()
        loss.backward()
        optimizer.step()
        witness.note(loss)
witness.finish(model, optimizer)
