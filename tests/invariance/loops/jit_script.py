"""A scripted module inside an ordinary one, trained with dropout.

steps: 5
sites: head head.weight
kinds: output grad_output param grad update
scalars: loss
"""

import warnings

import torch
import witness
from torch import nn

warnings.simplefilter("ignore", DeprecationWarning)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = -x
        return self.drop(torch.relu(self.inner(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.jit.script(Body())
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


witness.start(42)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    optimizer.step()
    witness.note(loss)
witness.finish(model, optimizer)
