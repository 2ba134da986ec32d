"""One optimizer per parameter that steps inside the backward, and frees the gradient at once.

steps: >=4
sites: 0 2 0.weight
kinds: output grad_output param
scalars: loss
"""

import torch
import witness
from torch import nn

witness.start(54)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizers = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()}


def step_now(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_now)
for _ in range(4):
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    witness.note(loss)
witness.finish(model, *optimizers.values())
