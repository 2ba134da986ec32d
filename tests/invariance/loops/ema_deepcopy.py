"""Exponential moving average in a deep copy, itself evaluated, and a copy of the optimizer's state.

steps: 5
sites: 0 2 0.weight
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import copy

import torch
import witness
from torch import nn

witness.start(32)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
average = None
with witness.watching(model, optimizer):
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        witness.note(loss)
        if step == 1:
            average = copy.deepcopy(model).requires_grad_(False)
            kept = copy.deepcopy(optimizer.state_dict())
        if average is not None:
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now.detach(), 0.1)
            witness.note(average(torch.ones(1, 4)).sum())
optimizer.load_state_dict(kept)
witness.finish(model, average, optimizer)
