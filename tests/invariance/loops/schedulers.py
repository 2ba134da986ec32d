"""OneCycle, cosine with warm-up chained, and reduce-on-plateau, with momentum cycling.

steps: 12
sites: 0 2 0.weight
kinds: output grad_output param grad update
scalars: loss lr
watch: yes
"""

import torch
import witness
from torch import nn
from torch.optim import lr_scheduler as schedule

witness.start(35)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def plans(optimizer):
    yield schedule.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    warm, cool = schedule.LinearLR(optimizer, 0.1, total_iters=2), schedule.CosineAnnealingLR(optimizer, 3)
    yield schedule.SequentialLR(optimizer, [warm, cool], milestones=[2])
    yield schedule.ReduceLROnPlateau(optimizer, patience=0)


optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with witness.watching(model, optimizer):
    for plan in plans(optimizer):
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4)).square().mean()
            loss.backward()
            optimizer.step()
            plan.step(*([float(loss)] if isinstance(plan, schedule.ReduceLROnPlateau) else []))
            witness.note(loss)
            print(optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"])
witness.finish(model, optimizer)
