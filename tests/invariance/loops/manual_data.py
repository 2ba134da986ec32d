"""No optimizer and no module: bare tensors with .data updates and gradients zeroed by hand, beside a model.

steps: 5
sites: lin lin.weight
kinds: output grad_output param grad
scalars: loss
"""

import torch
import witness
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.lin(x))


witness.start(23)
model, extra = Net(), torch.randn(4, 1, requires_grad=True)
for _ in range(5):
    loss = (model(torch.randn(9, 4)) @ extra).square().mean()
    loss.backward()
    for p in [*model.parameters(), extra]:
        p.data.add_(p.grad.data, alpha=-0.05)
        p.grad.data.zero_()
    witness.note(loss)
witness.finish(model, [extra, extra._version])
