"""LBFGS calls the closure, with its forward and backward, several times inside one step.

steps: 3
sites: 0 2 0.weight 2.bias
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import torch
import witness
from torch import nn

witness.start(5)
model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
x = torch.randn(20, 4)
y = x[:, :1] * x[:, 1:2]


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    witness.note(loss)
    return loss


with witness.watching(model, optimizer):
    for _ in range(3):
        witness.note(optimizer.step(closure))
witness.finish(model, optimizer)
