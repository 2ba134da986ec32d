"""Mixed precision with bfloat16 autocast; weights stay float32.

steps: 4
sites: 0 3 0.weight
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import torch
import witness
from torch import nn

witness.start(17)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with witness.watching(model, optimizer):
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(torch.randn(6, 1, 8, 8))
            loss = nn.functional.cross_entropy(logits, torch.randint(5, (6,)))
        loss.backward()
        optimizer.step()
        witness.note(loss)
        print(logits.dtype)
witness.finish(model, optimizer)
