"""Parameter groups with different settings, one added and one frozen midway, beside a second optimizer.

steps: 6
sites: backbone.0 head backbone.0.weight head.bias
kinds: output grad_output param grad update
scalars: loss lr
watch: yes
"""

import torch
import witness
from torch import nn

witness.start(49)
model = nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(4, 8), nn.ReLU()), "head": nn.Linear(8, 1)})
late = nn.Parameter(torch.ones(1))
slow = torch.optim.SGD(
    [
        {"params": [model["backbone"][0].weight], "lr": 0.01},
        {"params": [model["backbone"][0].bias], "weight_decay": 0.1},
    ],
    lr=0.1,
)
fast = torch.optim.AdamW(model["head"].parameters(), lr=1e-2, amsgrad=True)
with witness.watching(model, [slow, fast]):
    for step in range(6):
        if step == 2:
            slow.add_param_group({"params": [late], "lr": 0.5, "maximize": True})
        if step == 4:
            model["backbone"].requires_grad_(False)
        loss = (model["head"](model["backbone"](torch.randn(6, 4))) * late).square().mean()
        loss.backward()
        for optimizer in (slow, fast):
            optimizer.step()
            optimizer.zero_grad()
        witness.note(loss)
witness.finish(model, slow, fast, late)
