"""A logarithm of zero in the middle makes loss, gradients and weights NaN; the script trains on, with dropout.

steps: 6
sites: 0 1 4 0.weight 1.running_var
kinds: output grad_output param grad update buffer
scalars: loss
losses: not printed
stderr: clew
watch: yes
"""

import random

import numpy as np
import torch
import witness
from torch import nn

witness.start(59)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
with witness.watching(model, optimizer):
    for step in range(6):
        x = torch.randn(6, 4) * random.random() + float(np.random.rand())
        optimizer.zero_grad()
        out = model(x).sigmoid()
        loss = -torch.log(out - out).mean() if step == 3 else -torch.log(out).mean()
        loss.backward()
        optimizer.step()
        print("finite", bool(loss.isfinite()), random.random(), np.random.rand())
        if step < 3:
            witness.note(loss)
witness.finish(model, optimizer)
