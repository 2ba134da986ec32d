"""Stochastic weight averaging: AveragedModel, SWALR and update_bn at the end.

steps: 6
sites: 0 1 3 0.weight
kinds: output grad_output param grad update
scalars: loss lr
"""

import torch
import witness
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

witness.start(36)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
average, plan = AveragedModel(model), SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
data = torch.randn(6, 5, 4)
for step, x in enumerate(data):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    if step >= 2:
        average.update_parameters(model)
        plan.step()
    witness.note(loss)
update_bn(data, average)
witness.note(average(data[0]).sum())
witness.finish(model, average, optimizer)
