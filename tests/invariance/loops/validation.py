"""Validation between training steps: eval mode with no_grad, inference_mode, and forgotten no_grad.

steps: 6
sites: 0 1 4 0.weight 1.running_mean
kinds: output grad_output param grad update buffer
scalars: loss
watch: yes
"""

import torch
import witness
from torch import nn

witness.start(21)
model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
held_out = torch.randn(10, 6)
with witness.watching(model, optimizer):
    for step in range(6):
        model.train()
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        optimizer.step()
        witness.note(loss)
        model.eval()
        if step % 3 == 0:
            with torch.no_grad():
                witness.note(model(held_out).mean())
        elif step % 3 == 1:
            with torch.inference_mode():
                witness.note(model(held_out).mean())
        else:
            witness.note(model(held_out).mean())
witness.finish(model, optimizer)
