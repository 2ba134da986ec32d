"""A custom optimizer (sharpness-aware) that runs the closure twice and moves the weights between.

steps: >=4
sites: 0 2 0.weight
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import torch
import witness
from torch import nn


class Sharpness(torch.optim.Optimizer):
    def __init__(self, params, inner, rho=0.05):
        super().__init__(params, {"rho": rho})
        self.inner = inner(self.param_groups, lr=0.05)

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        members = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in members]).norm() + 1e-12
        moves = [p.grad * (self.defaults["rho"] / norm) for p in members]
        torch._foreach_add_(members, moves)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(members, moves)
        self.inner.step()
        return loss


witness.start(55)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
optimizer = Sharpness(model.parameters(), torch.optim.SGD)
with witness.watching(model, optimizer):
    for _ in range(4):
        x = torch.randn(6, 4)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        witness.note(optimizer.step(closure))
witness.finish(model, optimizer)
