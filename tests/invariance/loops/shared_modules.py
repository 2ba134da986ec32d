"""One module registered under two names and used at both places, and one activation used everywhere.

steps: 5
sites: first last first.weight
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import torch
import witness
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.act = nn.SiLU()
        self.again = self.first
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        x = self.act(self.first(x))
        x = self.act(self.again(x)) + x
        return self.last(self.act(x))


witness.start(7)
model = Net()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
with witness.watching(model, optimizer):
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).logsumexp(1).mean()
        loss.backward()
        optimizer.step()
        witness.note(loss)
witness.finish(model, optimizer)
