"""Gradient penalty: autograd.grad with create_graph inside the loss, then a backward through it.

steps: 5
sites: body.0 body.2 body.0.weight
kinds: output grad_output param grad update
scalars: loss
"""

import torch
import witness
from torch import nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, x):
        return self.body(x).squeeze(1)


witness.start(4)
critic = Critic()
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
for _ in range(5):
    real, fake = torch.randn(8, 3), torch.randn(8, 3) + 1
    mix = torch.rand(8, 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    witness.note(loss)
    witness.note(penalty)
witness.finish(critic, optimizer)
