"""GradScaler with float16 and a scale so high that the first steps overflow and are skipped.

steps: >=3
sites: 0 2 0.weight
kinds: output grad_output param grad update
scalars: loss scaler.scale
watch: yes
"""

import torch
import witness
from torch import nn

witness.start(18)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
with witness.watching(model, optimizer):
    for _ in range(9):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(torch.randn(8, 8)), torch.randint(4, (8,)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        witness.note(loss)
        print("scale", scaler.get_scale())
witness.finish(model, optimizer, scaler.state_dict())
