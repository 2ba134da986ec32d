"""A siamese net: the same model sees two views and their mixture before one backward.

steps: 5
sites: encoder head encoder.weight
kinds: output grad_output param grad update batch
scalars: loss
watch: yes
"""

import torch
import witness
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 12)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.encoder(x))))


witness.start(6)
model = Net()
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
with witness.watching(model, optimizer):
    for _ in range(5):
        a = torch.randn(8, 6)
        b = a + 0.1 * torch.randn(8, 6)
        optimizer.zero_grad()
        loss = (model(a) - model(b)).square().mean() - 0.1 * model(0.5 * a + 0.5 * b).std()
        loss.backward()
        optimizer.step()
        witness.note(loss)
witness.finish(model, optimizer)
