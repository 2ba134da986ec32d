"""Second order: a Hessian-vector product in the loss, a graph kept for two backwards, backward(inputs=…).

steps: 4
sites: 0 2 0.weight
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import torch
import witness
from torch import nn

witness.start(44)
model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
params = list(model.parameters())
with witness.watching(model, optimizer):
    for _ in range(4):
        loss = model(torch.randn(6, 4)).square().mean()
        first = torch.autograd.grad(loss, params, create_graph=True)
        direction = [torch.randn_like(p) for p in params]
        product = torch.autograd.grad(first, params, direction, retain_graph=True)
        optimizer.zero_grad()
        sharpness = sum((g * g).sum() for g in first)
        loss.backward(retain_graph=True)
        (0.1 * sharpness).backward(inputs=params[:2])
        optimizer.step()
        witness.note(loss)
        witness.note(sharpness)
        witness.note(sum(p.abs().sum() for p in product))
witness.finish(model, optimizer)
