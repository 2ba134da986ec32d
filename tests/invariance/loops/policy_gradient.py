"""Reinforcement learning: sampled actions, a target network copied now and then, a teacher under no_grad.

steps: 6
sites: 0 2 0.weight
kinds: output grad_output param grad update
scalars: loss
"""

import random

import torch
import witness
from torch import nn
from torch.distributions import Categorical

witness.start(56)
make = lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))  # noqa: E731
policy, target = make(), make()
target.load_state_dict(policy.state_dict())
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for episode in range(6):
    terms, state = [], torch.zeros(3)
    for _ in range(random.randint(2, 5)):
        choice = Categorical(logits=policy(state))
        action = choice.sample()
        with torch.no_grad():
            value = target(state).max()
        terms.append(-choice.log_prob(action) * (action - 0.5 + value))
        state = state + torch.randn(3) * (action + 0.1)
    loss = torch.stack(terms).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    witness.note(loss)
    if episode % 2:
        target.load_state_dict(policy.state_dict())
witness.finish(policy, target, optimizer)
