"""One model, one optimizer, the loop of every tutorial.

steps: 6
sites: 0 1 2 0.weight 2.bias
kinds: output grad_output param grad update batch
scalars: loss lr
watch: yes
"""

import torch
import witness
from torch import nn

witness.start(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()
with witness.watching(model, optimizer):
    for _ in range(6):
        x, y = torch.randn(12, 8), torch.randint(3, (12,))
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        witness.note(loss)
witness.finish(model, optimizer)
