"""weight_norm and spectral_norm parametrizations, an orthogonal one, pruning, and the old weight_norm.

steps: 5
sites: 0 2 4 6 0.bias
kinds: output grad_output param grad update buffer
scalars: loss
watch: yes
"""

import warnings

import torch
import witness
from torch import nn
from torch.nn.utils import parametrizations, prune

witness.start(38)
model = nn.Sequential(
    parametrizations.weight_norm(nn.Linear(4, 8)), nn.ReLU(),
    parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU(),
    parametrizations.orthogonal(nn.Linear(8, 8)), nn.ReLU(),
    prune.l1_unstructured(nn.Linear(8, 2), "weight", amount=0.3),
)  # fmt: skip
with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    old = nn.utils.weight_norm(nn.Linear(2, 2))
optimizer = torch.optim.Adam([*model.parameters(), *old.parameters()], lr=1e-2)
with witness.watching(model, optimizer):
    for _ in range(5):
        optimizer.zero_grad()
        loss = old(model(torch.randn(6, 4))).square().mean()
        loss.backward()
        optimizer.step()
        witness.note(loss)
        witness.note(model[2].weight.norm())
witness.finish(model, old, optimizer)
