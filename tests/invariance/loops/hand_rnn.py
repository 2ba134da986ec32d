"""A recurrent cell written by hand, unrolled in the script, with truncated backpropagation through time.

steps: 6
sites: inner recur cell inner.weight
kinds: output grad_output param grad update
scalars: loss
"""

import torch
import witness
from torch import nn


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.recur = nn.Linear(3, 8), nn.Linear(8, 8, bias=False)
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x, h):
        return self.cell(torch.tanh(self.inner(x) + self.recur(h)), h)


witness.start(14)
model, readout = Cell(), nn.Linear(8, 3)
optimizer = torch.optim.SGD([*model.parameters(), *readout.parameters()], lr=0.1)
for _ in range(2):
    hidden = torch.zeros(4, 8)
    for _ in range(3):
        loss = torch.zeros(())
        for _ in range(4):
            x = torch.randn(4, 3)
            hidden = model(x, hidden)
            loss = loss + (readout(hidden) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hidden = hidden.detach()
        witness.note(loss)
witness.finish(model, readout, optimizer, hidden)
