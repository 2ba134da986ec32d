"""Modules kept in plain Python lists and dicts, unknown to their parent, with one optimizer over all.

steps: 5
sites: weight
kinds: output grad_output param grad update
scalars: loss
"""

import torch
import witness
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(4, 4) for _ in range(2)]
        self.heads = {"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)}
        self.known = nn.Linear(4, 4)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {name: head(self.known(x)) for name, head in self.heads.items()}


witness.start(45)
model = Net()
hidden = nn.ModuleList([*model.layers, *model.heads.values()])
optimizer = torch.optim.Adam([*hidden.parameters(), *model.parameters()], lr=1e-2)
for _ in range(5):
    optimizer.zero_grad()
    out = model(torch.randn(6, 4))
    loss = (out["a"] - out["b"]).square().mean() + out["a"].mean()
    loss.backward()
    optimizer.step()
    witness.note(loss)
witness.finish(model, hidden, optimizer)
