"""No optimizer: weights are updated by hand under no_grad.

steps: 5
sites: 0 2 0.weight
kinds: output grad_output param grad
scalars: loss
"""

import torch
import witness
from torch import nn

witness.start(22)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
for _ in range(5):
    x = torch.randn(10, 4)
    loss = (model(x) - x.prod(1, keepdim=True)).square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.1 * p.grad)
    witness.note(loss)
witness.finish(model)
