"""Lazy modules that get their shape in the first forward, float64, anomaly detection and saved-tensor hooks.

steps: 4
sites: 0 2 0.weight
kinds: output grad_output param grad update
scalars: loss
"""

import warnings

import torch
import witness
from torch import nn

warnings.simplefilter("ignore")
witness.start(57)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.LazyLinear(6), nn.Mish(), nn.LazyLinear(1))
model(torch.randn(2, 5))
optimizer = torch.optim.Rprop(model.parameters(), lr=1e-2)
for step in range(4):
    optimizer.zero_grad()
    with torch.autograd.graph.save_on_cpu() if step % 2 else torch.autograd.detect_anomaly():
        loss = model(torch.randn(6, 5)).square().mean()
        loss.backward()
    optimizer.step()
    witness.note(loss)
witness.finish(model, optimizer)
