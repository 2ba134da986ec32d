"""In-place activations, and outputs and views of outputs that the caller modifies in place.

steps: 5
sites: conv act head conv.weight
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
        self.conv, self.norm = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.2, inplace=True)
        self.split = nn.Unflatten(1, (2, 2))
        self.head = nn.Linear(40, 3)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y += x.repeat(1, 2, 1)
        parts = self.split(y)
        parts[:, 0].mul_(2)
        parts.add_(0.1)
        return self.head(self.act(self.drop(y)).flatten(1))


witness.start(30)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, nesterov=True, momentum=0.9)
with witness.watching(model, optimizer):
    for _ in range(5):
        optimizer.zero_grad()
        logits = model(torch.randn(4, 2, 10))
        logits -= logits.mean()
        loss = nn.functional.cross_entropy(logits, torch.randint(3, (4,)))
        loss.backward()
        optimizer.step()
        witness.note(loss)
witness.finish(model, optimizer)
