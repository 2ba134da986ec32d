"""A small convolutional net with BatchNorm, dropout and random numpy augmentation.

steps: 5
sites: 0 1 3 6 0.weight 1.running_var
kinds: output grad_output param grad update buffer
scalars: loss
watch: yes
"""

import numpy as np
import torch
import witness
from torch import nn

witness.start(29)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Dropout2d(0.3), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(36, 3), nn.AlphaDropout(0.1),
)  # fmt: skip
optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
with witness.watching(model, optimizer):
    for _ in range(5):
        x = torch.randn(6, 1, 8, 8)
        if np.random.rand() < 0.5:
            x = x.flip(-1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), torch.randint(3, (6,)))
        loss.backward()
        optimizer.step()
        witness.note(loss)
witness.finish(model, optimizer)
