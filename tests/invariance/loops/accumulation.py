"""Gradients of three micro-batches are added up before each optimizer step.

steps: 4
sites: 0 2 0.weight 2.weight
kinds: output grad_output param grad update
scalars: loss lr
watch: yes
"""

import torch
import witness
from torch import nn

witness.start(2)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
with witness.watching(model, optimizer):
    for micro in range(12):
        x = torch.randn(4, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() / 3
        loss.backward()
        witness.note(loss)
        if micro % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
witness.finish(model, optimizer)
