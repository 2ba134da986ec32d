"""torch.compile with the inductor backend, dropout and a validation pass that compiles a second time.

steps: 4
kinds: param grad update
sites: 0.weight 3.weight
scalars: loss
needs: inductor
"""

import torch
import witness
from torch import nn

witness.start(20)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 2))
compiled = torch.compile(model, backend="inductor")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(4):
    compiled.train()
    optimizer.zero_grad()
    loss = compiled(torch.randn(8, 6)).square().mean()
    loss.backward()
    optimizer.step()
    witness.note(loss)
    if step == 2:
        compiled.eval()
        with torch.no_grad():
            witness.note(compiled(torch.ones(8, 6)).sum())
witness.finish(model, optimizer)
