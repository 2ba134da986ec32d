"""clip_grad_norm_ and clip_grad_value_ in turn; the norms they return are printed.

steps: 6
sites: 0 2 0.weight
kinds: output grad_output param grad update
scalars: loss grad_norm
watch: yes
"""

import torch
import witness
from torch import nn

witness.start(34)
model = nn.Sequential(nn.Linear(4, 8), nn.ELU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
with witness.watching(model, optimizer):
    for step in range(6):
        optimizer.zero_grad()
        loss = 10 * model(torch.randn(6, 4)).square().mean()
        loss.backward()
        if step % 2:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        else:
            witness.note(
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=2.0 if step else "inf")
            )
        optimizer.step()
        witness.note(loss)
witness.finish(model, optimizer)
